"""A kernel found a number out of range: mostly a label."""

from __future__ import annotations

TITLE = "a label, or an index, is out of range on the GPU"
KIND = "cause"
PATTERNS = (
    r"device-side assert triggered",
    r"Assertion `t >= 0 && t < n_classes` failed",
    r"Assertion `.*(?:index out of bounds|srcIndex < srcSelectDimSize).*` failed",
    r"IndexError: Target -?\d+ is out of bounds",
)
CAUSE = (
    "A class number is not below the number of classes: labels that count from 1, 255 for what is not labelled, or a "
    "head of another dataset. After it the whole process can use its GPU no more, so what follows shows other places."
)
REMEDY = (
    "Run one batch on the CPU, which names the line, or with CUDA_LAUNCH_BLOCKING=1. Set ignore_index for what is not "
    "labelled. widefield looks at labels before the first step."
)
WRONG = {
    "a smaller batch": "it only makes the bad label come later",
    "a longer NCCL timeout": "the other ranks wait for one whose GPU is lost",
}
SOURCE = "pytorch/pytorch, CUDA semantics"

CASES: list[tuple[str, str | None]] = [
    (
        "/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], "
        "thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
        "RuntimeError: CUDA error: device-side assert triggered",
        "t >= 0",
    ),
    ("IndexError: Target 10 is out of bounds.", "Target 10"),
    ("RuntimeError: CUDA error: out of memory", None),
]
