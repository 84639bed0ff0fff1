"""Which plan does a config ask for, on so many ranks?"""

from __future__ import annotations

import math

from widefield.config.run import RunConfig
from widefield.plans.plan import Plan


def plan_of(config: RunConfig, ranks: int) -> Plan:
    """The plan that a config asks for on `ranks` ranks; an axis left null takes the ranks that the others leave.

    It takes over what has the same name in the config: keys of `mesh` and of `gradient`, keys and sections of the run itself.
    """
    mesh = config.mesh
    found = {name: value for place in (config, mesh, config.gradient) for name, value in place if name in Plan.model_fields}
    others = mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage
    return Plan(**{**found, "replicate": mesh.replicate or max(1, ranks // others)})


def ranks_asked_for(config: RunConfig) -> int | None:
    """How many ranks the mesh of a config names; None where `replicate` is left to the machine."""
    mesh = config.mesh
    if mesh.replicate is None:
        return None
    return mesh.replicate * mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage
