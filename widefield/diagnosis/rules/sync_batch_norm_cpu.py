"""torch's SyncBatchNorm is for GPUs alone."""

from __future__ import annotations

TITLE = "torch.nn.SyncBatchNorm was given a tensor on the CPU"
KIND = "cause"
PATTERNS = (r"SyncBatchNorm expected input tensor to be on",)
CAUSE = "torch has it for GPUs alone, so that it cannot be tried with gloo on a laptop."
REMEDY = "wf.SyncBatchNorm, or wf.parallelize, which puts it in: the same numbers on CPU and GPU."
WRONG = {
    "BatchNorm in its place": "on few images per rank it gives other numbers than one device",
}
SOURCE = "pytorch/pytorch, nn/modules/batchnorm.py"

CASES: list[tuple[str, str | None]] = [
    ("ValueError: SyncBatchNorm expected input tensor to be on cuda or xpu or hpu", "SyncBatchNorm"),
    ("nn.SyncBatchNorm.convert_sync_batchnorm(model)", None),
]
