"""A checkpoint is for another number of ranks."""

from __future__ import annotations

TITLE = "the checkpoint is for another number of ranks"
KIND = "cause"
PATTERNS = (
    r"checkpoint being loaded used a DP world size of \d+ but the current world size is \d+",
    r"(?:Loading|Restore|resume).*(?:different|other) (?:world|DP|dp) (?:size|degree).*not supported",
)
CAUSE = "Each rank saved its own part of optimizer states, and that tool reads them by rank."
REMEDY = (
    "Start with as many ranks, or convert (DeepSpeed: ds_to_universal.py). widefield's checkpoints are read by any "
    "number of ranks and any plan."
)
WRONG = {
    "loading the weights alone": "the optimizer begins anew, and the loss jumps",
}
SOURCE = "DeepSpeed#2898, #3810; torchtitan#811"

CASES: list[tuple[str, str | None]] = [
    (
        "ZeroDivisionError: The checkpoint being loaded used a DP world size of 8 but the current world size is "
        "4. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently "
        "supported.",
        "world size of 8",
    ),
    ("world size 8", None),
]
