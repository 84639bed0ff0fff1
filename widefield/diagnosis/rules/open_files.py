"""A process has as many open files as it may."""

from __future__ import annotations

TITLE = "too many open files"
KIND = "cause"
PATTERNS = (
    r"\bToo many open files\b",
    r"received \d+ items of ancdata",
)
CAUSE = "Each tensor that a loader worker hands over is an open file, each peer some connections; ulimit -n is often 1024."
REMEDY = (
    "ulimit -n 65536 before the start (LimitNOFILE of slurmd, docker run --ulimit nofile=65536). Keep no list of "
    "batches, which keeps their files."
)
WRONG = {
    "torch.multiprocessing.set_sharing_strategy('file_system')": (
        "it counts no files, and leaves them in /dev/shm when a process is killed"
    ),
}
SOURCE = "pytorch/pytorch#973, #11201"

CASES: list[tuple[str, str | None]] = [
    ("OSError: [Errno 24] Too many open files: '/data/train/n0144'", "Errno 24"),
    ("RuntimeError: received 0 items of ancdata", "ancdata"),
    ("RuntimeError: Too many open files. Communication with the workers is no longer possible.", "Communication"),
    ("FileNotFoundError: [Errno 2] No such file or directory", None),
]
