"""ZeRO-1: of the parameters that ranks replicate, each rank steps some, and so has the optimizer state of these only."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.mesh import Mesh

_OTHERS: WeakKeyDictionary[torch.optim.Optimizer, set[int]] = WeakKeyDictionary()
"""Of a shared optimizer: the ids of the parameters that other ranks step."""


def share_states(optimizer: torch.optim.Optimizer, mesh: Mesh) -> torch.optim.Optimizer:
    """Make each rank of the innermost axis of `mesh.shards` step some of the parameters; returns the same optimizer.

    For full parameters with equal gradients on all ranks, and an optimizer whose step on one parameter depends on no other.
    Cost: per step one broadcast from each rank of the weights that it stepped.  After a step, `grad` is None for the parameters
    that other ranks step.
    """
    assert mesh.shards is not None
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]  # of this rank's stage
    rank, group = mesh.shards.get_local_rank(mesh.shards.ndim - 1), mesh.shards.get_group(mesh.shards.ndim - 1)
    owners = _owners(parameters, group.size())
    others = _OTHERS[optimizer] = {key for key, owner in owners.items() if owner != rank}

    def drop(*_: Any) -> None:
        for parameter in parameters:
            if id(parameter) in others:
                parameter.grad = None

    def send(*_: Any) -> None:
        for owner in range(group.size()):
            _send(owner, [p for p in parameters if owners[id(p)] == owner], group)

    optimizer.register_step_pre_hook(drop)
    optimizer.register_step_post_hook(send)
    return optimizer


def steps(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether this rank steps `parameter`, and so has its state: always without `share_states`."""
    return id(parameter) not in _OTHERS.get(optimizer, ())


def _owners(parameters: list[Tensor], ranks: int) -> dict[int, int]:
    """The rank that steps each parameter, by id: large parameters first, each to the rank with the least so far."""
    loads, owners = [0] * ranks, {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        owner = loads.index(min(loads))
        loads[owner] += parameter.numel()
        owners[id(parameter)] = owner
    return owners


@torch.no_grad()
def _send(owner: int, parameters: list[Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast `parameters` from one rank of the group, in one message."""
    if not parameters:
        return
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    dist.broadcast(flat, group_src=owner, group=group)
    if group.rank() != owner:
        for parameter, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view(parameter.shape))
