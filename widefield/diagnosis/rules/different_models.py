"""Ranks built different models."""

from __future__ import annotations

TITLE = "ranks have different models"
KIND = "cause"
PATTERNS = (
    r"DDP expects same model across all ranks, but Rank",
    r"params? .* appears not to match sizes of the same param in process 0",
    r"same parameter (?:order|shapes) across (?:all )?(?:ranks|processes)",
)
CAUSE = (
    "A model depends on something that differs between ranks: the number of classes found in its own part of the data, "
    "another version of the code, a random choice."
)
REMEDY = "Decide it once, on rank 0, and send it to all; srun widefield doctor compares code and versions of all hosts."
WRONG = {
    "find_unused_parameters=True": "there is no parameter to leave out: shapes differ",
}
SOURCE = "pytorch/pytorch, torch/csrc/distributed/c10d/reducer.cpp"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 60 params, while rank 0 has "
        "inconsistent 62 params.",
        "Rank 1 has 60",
    ),
    ("RuntimeError: size mismatch, m1: [2 x 3]", None),
]
