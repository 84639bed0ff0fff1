"""The section `recompute` of a recipe: activation checkpointing and offloading."""

from __future__ import annotations

from typing import Literal

from widefield.quantity import Memory
from widefield.section import Section


class RecomputeConfig(Section):
    """Which activations are recomputed in the backward, or offloaded to the CPU, and not saved on the device."""

    blocks: list[str] | None = None
    """Modules that save only their input and run again in the backward, by name or pattern, as `layer*.*`; null: chosen by
    `memory`, or all blocks."""
    keep: Literal["nothing", "convolutions"] = "nothing"
    """What of a block is saved nevertheless: the results of convolutions and matrix products cost most to recompute."""
    memory: Memory | None = None
    """The memory for the activations of a pass on the device, as `6GiB`: the fewest blocks that fit it are recomputed."""
    offload: bool = False
    """Move saved activations to the CPU's memory until the backward needs them."""
