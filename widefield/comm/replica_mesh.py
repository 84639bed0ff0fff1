"""The mesh of one replica, where replicas of a model do not agree in every step, and the ranks that hold the same part of each.

A replica is what one value of the axis `replicate` names: a model on one rank, or sharded, tiled and staged over several.
Within it everything is as in a run of these ranks alone.  So it has a Mesh, with groups of its own for what is summed, and
shares with the mesh of all ranks those groups that lie within a replica anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm import process_groups
from widefield.comm.mesh import Mesh, World
from widefield.plans import Plan
from widefield.private_torch.process_groups import c10d_world


def replica_mesh(mesh: Mesh) -> Mesh:
    """The mesh of this rank's replica.  Every rank of `mesh` calls it; `leave(mesh)` ends its groups too."""
    plan = mesh.plan.of_replica()
    size, world = plan.ranks, mesh.world
    host = size if world.has_one_host else min(size, world.local_size)
    own = Mesh(
        plan, replace(world, rank=world.rank % size, size=size, local_size=host), mesh.device, grid=mesh.grid, watch=mesh.watch,
        of_all=mesh,
    )  # fmt: skip
    if size == 1:
        return own
    before = set(c10d_world.pg_map)
    group = process_groups.group_among([list(range(first, first + size)) for first in range(0, mesh.size, size)])
    meshes = own.side_by_side
    found = replace(
        own,
        devices=mesh.devices,
        group=group,
        data_group=process_groups.data_group(plan, meshes) if plan.channel * plan.stage > 1 else group,
        statistics_group=process_groups.data_group(plan, meshes),
        channel_group=mesh.channel_group,
        stage_group=mesh.stage_group,
        copy_group=mesh.copy_group,
        shards=None if mesh.shards is None else mesh.shards["shard"],
    )
    mesh.further.extend(group for group in c10d_world.pg_map if group not in before)
    return found


@dataclass(frozen=True)
class Peers:
    """The ranks that hold the same part of some replicas, in the order of these."""

    group: dist.ProcessGroup

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce: the sum of `tensor` over the peers, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def exchanged(self, own: Tensor, *, hears: Sequence[int], hearers: Sequence[int]) -> list[Tensor]:
        """What the peers `hears` sent, each like `own`, which is sent to `hearers`.  Both: places in the group, from 0."""
        return self.start_exchange(own, hears=hears, hearers=hearers)()

    def start_exchange(self, own: Tensor, *, hears: Sequence[int], hearers: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start to exchange as `exchanged` does; the function returned waits until all is sent and there, and gives it.

        `own` has to stay as it is until then.
        """
        heard = [torch.empty_like(own) for _ in hears]
        messages = [dist.P2POp(dist.isend, own, group=self.group, group_peer=one) for one in hearers]
        for place, one in zip(hears, heard, strict=True):
            messages.append(dist.P2POp(dist.irecv, one, group=self.group, group_peer=place))
        works = dist.batch_isend_irecv(messages) if messages else []

        def waited() -> list[Tensor]:
            for work in works:
                work.wait()
            return heard

        return waited


def peers_of(mesh: Mesh, size: int) -> Peers:
    """The peers of this rank in its group of `size` neighbouring replicas, a divisor of all.  Every rank of `mesh` calls it."""
    each = mesh.size // mesh.plan.replicate
    firsts = range(0, mesh.size, size * each)
    group = process_groups.group_among(
        [list(range(first + place, first + size * each, each)) for first in firsts for place in range(each)]
    )
    mesh.further.append(group)
    return Peers(group)


def alone_on(mesh: Mesh) -> Mesh:
    """The mesh of a run of one rank, on the device of this one, which shares its machine with as many."""
    return Mesh(Plan(), World(local_size=mesh.world.local_size, launcher=mesh.world.launcher), mesh.device, of_all=mesh)
