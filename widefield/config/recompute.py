"""Which activations are not kept for the backward?  The section `recompute` of a recipe."""

from __future__ import annotations

from typing import Literal

from widefield.quantity import Memory
from widefield.section import Section


class RecomputeConfig(Section):
    """What is computed again in the backward, or fetched from the CPU's memory, rather than kept on the device."""

    blocks: list[str] | None = None
    """Modules that keep their input alone, by name or pattern, as `layer*.*`; by `memory` where null, else all blocks."""
    keep: Literal["nothing", "convolutions"] = "nothing"
    """What of a block is kept all the same: the results of convolutions and matrix products cost most to make again."""
    memory: Memory | None = None
    """What the activations of a pass may take on the device, as `6GiB`: as few blocks are computed again as fit."""
    offload: bool = False
    """Move what is kept to the CPU's memory until the backward needs it."""
