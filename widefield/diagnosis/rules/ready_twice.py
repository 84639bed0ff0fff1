"""A parameter's gradient came twice in one backward."""

from __future__ import annotations

TITLE = "a parameter got its gradient twice in one step"
KIND = "cause"
PATTERNS = (r"Expected to mark a variable ready only once",)
CAUSE = (
    "A parameter is used by two recomputed (checkpointed) blocks, or by two backward passes between two forward passes of DDP."
)
REMEDY = (
    "checkpoint(..., use_reentrant=False); with several backward passes, DDP's no_sync() around all but the last. "
    "recompute of a recipe does this."
)
WRONG = {
    "find_unused_parameters=True": "it causes this error where blocks are recomputed, and cures none",
    "static_graph=True": "it hides the second gradient; check the numbers against one device first",
}
SOURCE = "DistributedDataParallel's documentation, on checkpointing"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function.",
        "ready only once",
    ),
    ("RuntimeError: Expected all tensors to be on the same device", None),
]
