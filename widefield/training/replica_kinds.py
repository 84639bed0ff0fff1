"""The replicas of a recipe: which way to agree they have, and what they cannot have."""

from __future__ import annotations

from widefield.comm.mesh import Mesh
from widefield.config import RunConfig
from widefield.training.gossip_replicas import GossipReplicas
from widefield.training.periodic_replicas import PeriodicReplicas
from widefield.training.replicas import Replicas


def replicas_of(mesh: Mesh) -> Replicas:
    """This rank's replica, of a plan that has some.  Every rank calls it."""
    return GossipReplicas(mesh) if mesh.plan.agreement.name == "gossip" else PeriodicReplicas(mesh)


def check_replicas(config: RunConfig, *, scales: bool) -> None:
    """ValueError: what replicas that are not in step cannot have.  scales: whether gradients are scaled, as of float16."""
    name = f"agreement={config.agreement.name}"
    if scales:
        raise ValueError(
            f"precision={config.precision} leaves out steps whose gradients overflow and under {name} each replica would leave "
            "out its own; set precision=bfloat16 or float32"
        )
    if config.guard.checksum_every is not None:
        raise ValueError(
            f"guard.checksum_every={config.guard.checksum_every} compares replicas bit by bit and under {name} they differ; "
            "leave it out"
        )
    if config.optimizer.lr == "find":
        raise ValueError(
            f"optimizer.lr=find tries rates with steps of all copies together and under {name} they step apart; find the rate "
            "with agreement=mean, and set it"
        )
