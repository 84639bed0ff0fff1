"""The mesh of a run that goes on with another number of ranks than its recipe asks for, after a failure.

Axes whose size changes no number are fitted: replicate, and shard.  The others stay: what they cut has to fit the devices.
"""

from __future__ import annotations

import math

from widefield.config.mesh import MeshConfig
from widefield.config.run import RunConfig
from widefield.plans.from_config import ranks_asked_for, ranks_of_a_replica


def refit(config: RunConfig, ranks: int) -> tuple[RunConfig, str | None]:
    """The config with a mesh of `ranks` ranks, and what was changed, in a sentence; None where it fits as it is.

    A mesh with copies keeps its shards where their number divides; one without has as many shards as it has ranks for.
    ValueError: the ranks are no multiple of what space, channel and stage need.
    """
    mesh, fixed = config.mesh, math.prod(config.mesh.space) * config.mesh.channel * config.mesh.stage
    asked = ranks_asked_for(config)
    if asked == ranks or (asked is None and ranks % ranks_of_a_replica(config) == 0):
        return config, None
    if ranks % fixed:
        raise ValueError(
            f"{ranks} ranks are left of the {asked or 'many'} that the recipe asks for, and mesh.space={mesh.space}, "
            f"mesh.channel={mesh.channel} and mesh.stage={mesh.stage} need a multiple of {fixed}; start that many, or set "
            "these axes to what is left (mesh.auto=true finds a plan)"
        )
    copies = ranks // fixed
    only_shards = mesh.shard > 1 and (mesh.replicate == 1 or copies < mesh.shard)
    shard = copies if only_shards else math.gcd(copies, mesh.shard)
    fitted = MeshConfig(**{**dict(mesh), "replicate": copies // shard, "shard": shard})
    before = f"{mesh.replicate or 'null'} and {mesh.shard}"
    why = (
        f"mesh.replicate and mesh.shard are {copies // shard} and {shard}, and were {before}: {ranks} ranks go on with this run"
    )
    return config.model_copy(update={"mesh": fitted}), why
