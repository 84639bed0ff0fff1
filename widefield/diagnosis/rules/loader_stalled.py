"""A loader gave no batch in time."""

from __future__ import annotations

TITLE = "a loader worker gave no batch in time"
KIND = "cause"
PATTERNS = (
    r"DataLoader timed out after \d+ seconds",
    r"(?:RuntimeError|TimeoutError).*loader.*(?:no batch|timed out)",
)
CAUSE = (
    "A read hangs (a network filesystem, a lock of HDF5, a decoder), or a worker waits for a lock that was held when it "
    "was forked."
)
REMEDY = (
    "py-spy dump on the worker shows the line. Open files in the worker, not before; multiprocessing_context='spawn' "
    "where a library has threads; OMP_NUM_THREADS=1 and cv2.setNumThreads(0) in workers."
)
WRONG = {
    "timeout=0": "it then waits for ever",
    "a longer NCCL timeout": "the other ranks wait for the same worker",
}
SOURCE = "pytorch/pytorch, torch.utils.data"

CASES: list[tuple[str, str | None]] = [
    ("RuntimeError: DataLoader timed out after 120 seconds", "120 seconds"),
    ("DataLoader worker (pid 3) is killed by signal: Killed.", None),
]
