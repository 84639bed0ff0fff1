"""torchrun gave each rank one thread."""

from __future__ import annotations

TITLE = "torchrun set OMP_NUM_THREADS=1 (its banner is no error)"
KIND = "notice"
PATTERNS = (r"Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",)
CAUSE = "It keeps ranks from taking each other's cores. On GPUs it costs little; operations on the CPU then have one core."
REMEDY = "OMP_NUM_THREADS=cores / ranks, where the CPU computes."
SOURCE = "torchrun"

CASES: list[tuple[str, str | None]] = [
    (
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system "
        "being overloaded",
        "OMP_NUM_THREADS",
    ),
    ("OMP_NUM_THREADS=4", None),
]
