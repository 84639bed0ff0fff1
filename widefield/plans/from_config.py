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
    others = mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage
    return Plan(**{**found, "replicate": mesh.replicate or max(1, ranks // others)})


def ranks_asked_for(config: RunConfig) -> int | None:
    """The number of ranks of a config's mesh; None where mesh.replicate is null."""
    mesh = config.mesh
    if mesh.replicate is None:
        return None
    return mesh.replicate * mesh.shard * math.prod(mesh.space) * mesh.channel * mesh.stage
