"""The plan that a config asks for."""

from __future__ import annotations

import math

from widefield.config.run import RunConfig
from widefield.plans.plan import Plan


def plan_of(config: RunConfig, ranks: int) -> Plan:
    """The plan that a config asks for on `ranks` ranks; mesh.replicate null takes the ranks that the other axes leave.

    A field of the plan has the value of the same name in the config: a key of `mesh` or `gradient`, or a top-level key or
    section.
    """
    mesh = config.mesh
    found = {name: value for place in (config, mesh, config.gradient) for name, value in place if name in Plan.model_fields}
    return Plan(**{**found, "replicate": mesh.replicate or max(1, ranks // ranks_of_a_replica(config))})


def ranks_asked_for(config: RunConfig) -> int | None:
    """The number of ranks of a config's mesh; None where mesh.replicate is null."""
    replicate = config.mesh.replicate
    return None if replicate is None else replicate * ranks_of_a_replica(config)


def ranks_of_a_replica(config: RunConfig) -> int:
    """The number of ranks of all axes of a config's mesh but replicate."""
    mesh = config.mesh
    return mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage
