"""The section `sharding` of a recipe: ZeRO over the ranks of `mesh.shard`."""

from __future__ import annotations

from typing import Literal

from widefield.section import Section


class ShardingConfig(Section):
    """What is sharded over the ranks of `mesh.shard`."""

    zero: Literal[1, 2, 3] = 3
    """What is sharded: 1 optimizer state; 2 gradients too; 3 weights too, which are gathered where they are used."""
    units: list[str] | None = None
    """Modules whose weights are gathered and freed together, by name or pattern, as `layer*`; one per stage of a
    convolutional net where null."""
    offload: bool = False
    """Keep the shards in the CPU's memory, and run the optimizer there."""
