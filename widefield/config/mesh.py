"""The section `mesh` of a recipe: the number of ranks along each axis."""

from __future__ import annotations

import math

from pydantic import model_validator

from widefield.config.field_types import Positive
from widefield.config.strategies import DataStrategy
from widefield.section import Section


class MeshConfig(Section):
    auto: bool = False
    """Let the planner choose the axes, ZeRO, recompute and tiles in time, for the machines that the run starts on; the other
    axes here stay as they are by default then."""
    replicate: Positive | None = None
    """Full copies of the model (data parallelism); null: all ranks that the other axes leave."""
    shard: Positive = 1
    """Ranks over which weights, gradients and optimizer state are sharded (ZeRO), each with its part of the batch; see
    `sharding`."""
    space: list[Positive] = []
    """Tiles that every image is cut into, one number per dim, each tile on a rank of its own: `[2, 1]` gives the upper half to
    one rank and the lower to another.  The numbers stay one device's.  `[]` leaves images whole, and so does `[1, 1]`."""
    channel: Positive = 1
    """Ranks that share every large layer (tensor parallelism): each computes some of its channels, with their weights."""
    stage: Positive = 1
    """Stages of a pipeline: each rank has some of the layers, first to last; see `pipeline`."""
    data_strategy: DataStrategy = "data"
    """A file in widefield/parallel/strategies/: `data` averages gradients over processes, `data_parallel` is
    torch.nn.DataParallel in one process."""
    independent: bool = False
    """Let every copy and stage draw random numbers (dropout), write to buffers and mix samples by itself.  For models that do
    so this is faster, and not one device's numbers; without it copies run as rows of one batch."""

    @model_validator(mode="after")
    def _chosen_once(self) -> MeshConfig:
        """ValueError: auto beside axes that it would choose."""
        sizes = {"replicate": self.replicate or 1, "shard": self.shard, "channel": self.channel, "stage": self.stage}
        given = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        given += [f"space={self.space}"] if math.prod(self.space) > 1 else []
        if self.auto and given:
            raise ValueError(f"auto=true chooses the axes, and {', '.join(given)} is set too; leave one of them out")
        return self
