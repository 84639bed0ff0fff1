"""A kernel that does nothing for a while, behind which others wait."""

from __future__ import annotations

import torch

CYCLES_PER_SECOND = 2e9
"""Of a GPU's clock, about."""


def sleep_on_gpu(seconds: float) -> None:
    """Start a kernel of about so many seconds on the current GPU."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
