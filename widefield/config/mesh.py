"""How many ranks lie along each axis of the mesh?  The section `mesh` of a recipe."""

from __future__ import annotations

from widefield.config.field_types import Positive
from widefield.config.strategies import DataStrategy
from widefield.section import Section


class MeshConfig(Section):
    replicate: Positive | None = None
    """Whole copies of the model (data parallelism); where null, all ranks that the other axes leave."""
    shard: Positive = 1
    """Copies of the model that share its weights, gradients and optimizer state, each holding a part; see `sharding`."""
    space: list[Positive] = []
    """Tiles that every image is cut into, one number per dim, each tile on a rank of its own: `[2, 1]` gives the upper half to
    one rank and the lower to another.  The numbers stay one device's.  `[]` leaves images whole, and so do ones alone."""
    channel: Positive = 1
    """Ranks that share every large layer: each computes a part of its channels and holds that part of its weights."""
    stage: Positive = 1
    """Ranks that the layers are dealt out to, first to last; see `pipeline`."""
    data_strategy: DataStrategy = "data"
    """A file in widefield/parallel/strategies/: `data` averages gradients over processes, `data_parallel` is
    torch.nn.DataParallel in one process."""
    independent: bool = False
    """Let every copy and stage draw random numbers (dropout), write to buffers and mix samples by itself.  It is faster for
    models that do, and not one device's numbers: those are what copies give as rows of one batch."""
