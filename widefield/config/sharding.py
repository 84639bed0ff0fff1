"""What of a model do the copies of `mesh.shard` share?  The section `sharding` of a recipe."""

from __future__ import annotations

from typing import Literal

from widefield.section import Section


class ShardingConfig(Section):
    """How `mesh.shard` copies of a model share it."""

    zero: Literal[1, 2, 3] = 3
    """What each rank holds a part of: 1 optimizer state; 2 gradients too; 3 weights too, gathered where they are used."""
    units: list[str] | None = None
    """Modules whose weights are gathered and freed together, by name or pattern, as `layer*`; one per stage of a
    convolutional net where null."""
    offload: bool = False
    """Keep the parts in the CPU's memory, and let the optimizer run there."""
