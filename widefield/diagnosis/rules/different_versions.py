"""Hosts have different versions of Python, torch or widefield."""

from __future__ import annotations

TITLE = "hosts have different versions"
KIND = "cause"
PATTERNS = (
    r"\bis not the same on all machines: ",
    r"ranks disagree on how many they are",
)
CAUSE = (
    "One host has another environment, container or checkout, or was given another number of ranks. What they would "
    "compute, and send, may differ."
)
REMEDY = (
    "Install the same everywhere, or start all ranks from one image, with one command. srun widefield doctor compares "
    "versions and code of all hosts."
)
WRONG = {
    "a longer timeout": "they have met; what they are is not the same",
}
SOURCE = "widefield, roll call of the first meeting"

CASES: list[tuple[str, str | None]] = [
    (
        "widefield: torch is not the same on all machines: 2.14.1 on n1 (rank 0); 2.15.0 on n2 (rank 1). Install "
        "the same everywhere",
        "2.15.0 on n2",
    ),
    (
        "widefield: ranks disagree on how many they are: rank 0, process 7 on n1, says 2, and rank 1, process 8 on n2, says 4",
        "says 4",
    ),
    ("torch 2.14.1", None),
]
