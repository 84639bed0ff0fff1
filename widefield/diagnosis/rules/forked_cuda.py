"""CUDA was used before a fork."""

from __future__ import annotations

TITLE = "a process was forked after CUDA had begun"
KIND = "cause"
PATTERNS = (r"Cannot re-initialize CUDA in forked subprocess",)
CAUSE = (
    "A forked process has none of the driver's threads. A dataset returns tensors on the GPU, or the main process used "
    "CUDA before ranks were forked."
)
REMEDY = "Datasets return tensors on the CPU; start ranks with spawn or torchrun; touch CUDA after the fork alone."
SOURCE = "pytorch/pytorch, multiprocessing"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
        "must use the 'spawn' start method",
        "re-initialize",
    ),
    ("RuntimeError: context has already been set", None),
]
