"""Some samples were evaluated twice."""

from __future__ import annotations

TITLE = "the validation counted some samples twice, so its number depends on the number of ranks"
KIND = "notice"
PATTERNS = (
    r"It looks like the dataset has \d+ samples, but \d+ samples were used for the validation",
    r"Setting the world size to 1 is always a safe bet",
    r"It is recommended to use .*devices=1.* to ensure each sample/batch gets evaluated exactly once",
)
CAUSE = "DistributedSampler repeats samples until all ranks have equally many, and means of ranks' means count them again."
REMEDY = "wf.evaluate_exactly, or widefield evaluate RUN: each sample once, on any number of ranks."
WRONG = {
    "drop_last=True in validation": "some samples are then not evaluated at all",
}
SOURCE = "pytorch/pytorch#25162; vision#4559"

CASES: list[tuple[str, str | None]] = [
    (
        "UserWarning: It looks like the dataset has 50000 samples, but 50008 samples were used for the "
        "validation, which might bias the results. Setting the world size to 1 is always a safe bet.",
        "50008",
    ),
    ("evaluated 50000 samples", None),
]
