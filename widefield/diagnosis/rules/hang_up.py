"""The terminal was closed."""

from __future__ import annotations

TITLE = "the terminal, or the connection, was closed, and torchrun ended with it (SIGHUP)"
KIND = "cause"
PATTERNS = (
    r"got signal: 1\b",
    r"Received (?:1|Signals\.SIGHUP) death signal",
    r"Received Signals\.SIGHUP",
)
CAUSE = (
    "torchrun ends its ranks on SIGHUP, which a shell sends when its window or connection closes; nohup does not help, "
    "since torchrun asks for the signal itself."
)
REMEDY = (
    "Start it in tmux or screen, as a batch job, or with setsid. widefield's own launcher keeps SIGHUP ignored where "
    "nohup ignored it."
)
WRONG = {
    "nohup torchrun": "torchrun sets its own handler for the signal",
}
SOURCE = "pytorch/pytorch#67538"

CASES: list[tuple[str, str | None]] = [
    ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 80321 got signal: 1", "signal: 1"),
    ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 80321 got signal: 15", None),
]
