"""Machines have different NCCL."""

from __future__ import annotations

TITLE = "ranks have different versions of NCCL"
KIND = "cause"
PATTERNS = (
    r"Mismatched NCCL version detected",
    r"NCCL WARN .*[Nn]et(?:work)? plugin .*version mismatch",
)
CAUSE = "Versions of NCCL do not talk to each other. One host has another environment, container or LD_LIBRARY_PATH."
REMEDY = (
    "The same image or environment on all hosts: srun widefield doctor compares them. Unset LD_LIBRARY_PATH, through "
    "which a system's NCCL comes before torch's."
)
SOURCE = "NCCL, init.cc; nccl#286"

CASES: list[tuple[str, str | None]] = [
    (
        "n2:991:1201 [0] init.cc:1021 NCCL WARN Mismatched NCCL version detected : rank 0 version 22203 rank 8 version 22605",
        "Mismatched NCCL",
    ),
    ("NCCL version 2.27.3+cuda12.9", None),
]
