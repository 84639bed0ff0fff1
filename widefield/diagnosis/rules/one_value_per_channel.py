"""BatchNorm was given a single value per channel."""

from __future__ import annotations

TITLE = "BatchNorm has one value per channel: a batch of one image"
KIND = "cause"
PATTERNS = (r"Expected more than 1 value per channel when training",)
CAUSE = "A rank's last batch has one image, and its pixels were pooled away: a variance of one number is none."
REMEDY = "drop_last=True, a batch that divides, or SyncBatchNorm, which counts the images of all ranks."
WRONG = {
    "model.eval()": "training then uses old statistics, and the layer learns nothing",
}
SOURCE = "pytorch/pytorch, nn/functional.py"

CASES: list[tuple[str, str | None]] = [
    (
        "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 256, 1, 1])",
        "1 value per channel",
    ),
    ("ValueError: expected 4D input (got 2D input)", None),
]
