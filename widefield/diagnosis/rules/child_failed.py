"""torchrun's summary of ranks that failed."""

from __future__ import annotations

TITLE = "torchrun says that a rank failed"
KIND = "consequence"
PATTERNS = (
    r"ChildFailedError",
    r"failed \(exitcode: -?\d+\) local_rank: \d+",
    r"rank \d+ ended with exit code \d+",
)
CAUSE = "It knows the exit code alone: a traceback is in that rank's own output, above, unless error_file is set."
REMEDY = (
    "Decorate main with torch.distributed.elastic.multiprocessing.errors.record, and torchrun prints the traceback "
    "itself; --log-dir DIR --redirects 3 gives each rank a file. exitcode -9 is a kill, -11 a crash, -15 torchrun's own "
    "end."
)
SOURCE = "torchrun, torch.distributed.elastic"

CASES: list[tuple[str, str | None]] = [
    (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n  exitcode  : 1 (pid: 2)",
        "ChildFailedError",
    ),
    ("exit code 0", None),
]
