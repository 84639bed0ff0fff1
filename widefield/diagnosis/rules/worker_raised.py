"""A dataset's own code failed in a worker."""

from __future__ import annotations

TITLE = "the dataset's own code failed in a loader worker"
KIND = "cause"
IS_WEAK = True
PATTERNS = (
    r"Caught (?P<error>\w+) in DataLoader worker process \d+",
    r"cannot read the image \S+",
)
CAUSE = (
    "The traceback below this line is the worker's: its last line is the error, and its last line of your code is the place."
)
REMEDY = "Read that image alone. data.bad_images=skip leaves unreadable ones out, counts and names them."
WRONG = {
    "num_workers=0": "the same image fails then, too",
}
SOURCE = "pytorch/pytorch, torch.utils.data"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):",
        "Caught KeyError",
    ),
    ("DataLoader worker (pid 3) is killed by signal: Killed.", None),
]
