"""A tensor that the backward needs was changed in place."""

from __future__ import annotations

TITLE = "a tensor that the backward needs was changed in between"
KIND = "cause"
PATTERNS = (r"one of the variables needed for gradient computation has been modified by an inplace operation",)
CAUSE = (
    "Under DDP the usual reason is two forward passes before one backward, as of a GAN's discriminator: before each "
    "forward DDP overwrites BatchNorm's statistics with rank 0's."
)
REMEDY = (
    "One forward on both batches, torch.cat([real, fake]), or broadcast_buffers=False with SyncBatchNorm, whose "
    "statistics are equal anyway. torch.autograd.set_detect_anomaly(True) names the operation."
)
WRONG = {
    "retain_graph=True": "it keeps the graph, not the old values",
    "find_unused_parameters=True": "every parameter is used; a value has changed",
}
SOURCE = "pytorch/pytorch#22095, #66504"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace "
        "operation: [torch.FloatTensor [16]] is at version 3; expected version 2 instead.",
        "inplace operation",
    ),
    ("RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.", None),
]
