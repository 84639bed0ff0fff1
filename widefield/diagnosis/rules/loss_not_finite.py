"""The loss became NaN or infinite."""

from __future__ import annotations

TITLE = "the loss, or the gradient, became NaN or infinite"
KIND = "cause"
PATTERNS = (
    r"(?i)\bloss(?:es)?[ =:]+(?:is )?(?:tensor\()?[-+]?(?:nan|inf)\b",
    r"(?i)loss is (?:nan|inf|not finite)",
    r"(?i)non-?finite (?:loss|gradient|norm)",
    r"Function '\w+' returned nan values",
    r"(?i)^end: failed .*(?:\bnan\b|not finite|infinite)",
)
CAUSE = (
    "The learning rate is too high for the batch or has no warm-up, float16 overflows, a logarithm or a division met "
    "zero, a batch has broken pixels or labels, or BatchNorm's statistics are of one sample."
)
REMEDY = (
    "Take the batch that did it and run it alone; lower optimizer.lr or lengthen schedule.warmup; clip gradients "
    "(optimizer.clip_norm); bfloat16 in place of float16; SyncBatchNorm where a rank has few images. It shows on one "
    "device too, if it is not of the parallel run: widefield verify compares."
)
WRONG = {
    "find_unused_parameters=True": "it cures no instability: all it does is not to wait for gradients that never come",
    "skipping the step on that rank": ("the others took it, so the replicas differ from then on; all ranks must decide alike"),
    "a smaller batch with the same learning rate": "it is noisier; the rate has to shrink with it",
}
SOURCE = "pytorch/pytorch#96203 (SyncBatchNorm and float16); torchtitan, docs/converging.md"

CASES: list[tuple[str, str | None]] = [
    ("step 412/9000  ep 0.41  loss nan  812 img/s", "loss nan"),
    ("Loss is nan, stopping training", "Loss is nan"),
    ("step 412/9000  loss 0.31  nanometres", None),
    ("step 12 loss inf", "loss inf"),
]
