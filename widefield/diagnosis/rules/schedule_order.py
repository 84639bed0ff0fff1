"""The schedule stepped before the optimizer."""

from __future__ import annotations

TITLE = "the learning rate's schedule steps at another time than the optimizer"
KIND = "notice"
PATTERNS = (r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",)
CAUSE = (
    "The first value is skipped; under a wrapper that steps the schedule once per process, the rate also ends N times "
    "too early."
)
REMEDY = (
    "scheduler.step() after optimizer.step(), once per step of all ranks together. widefield's schedule counts samples, "
    "on any number of ranks."
)
SOURCE = "accelerate#1382, #963"

CASES: list[tuple[str, str | None]] = [
    (
        "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and "
        "later, you should call them in the opposite order",
        "lr_scheduler.step()",
    ),
    ("lr_scheduler: cosine", None),
]
