"""A loader worker ended, and what it said is elsewhere."""

from __future__ import annotations

TITLE = "loader workers ended; their own message is the cause"
KIND = "cause"
IS_WEAK = True
PATTERNS = (
    r"DataLoader worker \(pid\(?s?\)? [^)]*\) exited unexpectedly",
    r"[Oo]ne or more background workers are no longer alive",
    r"is killed by signal: Segmentation fault",
    r"is killed by signal: Aborted",
)
CAUSE = "A worker died outside of Python's errors: for memory, for /dev/shm, or in a C library (a decoder on a damaged file)."
REMEDY = (
    "num_workers=0 for one run shows the error where it happens, with its file; that is to find it, not to keep. "
    "PYTHONFAULTHANDLER=1 prints the line of a crash."
)
WRONG = {
    "fewer workers, again and again": "it may help where memory was missing, and hides a damaged file",
}
SOURCE = "nnUNet#2659, #2725"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: One or more background workers are no longer alive. Exiting. Please check the print "
        "statements above for the actual error message",
        "no longer alive",
    ),
    ("RuntimeError: DataLoader worker (pid(s) 411948) exited unexpectedly", "411948"),
    ("RuntimeError: Caught KeyError in DataLoader worker process 0.", None),
]
