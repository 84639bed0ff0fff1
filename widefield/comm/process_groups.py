"""The process groups of a plan: along its axes, over data-parallel ranks, over the tiles of an image.

Every rank of the run must make every group, in the same order, whether it is in the group or not.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from widefield.comm.gloo_threads import keep_gloo_from_preempting
from widefield.comm.keepalive import asking_whether_alive
from widefield.geometry.layout import Grid
from widefield.plans import Plan


@contextlib.contextmanager
def making_groups() -> Iterator[None]:
    """The groups that are made inside notice machines that are gone, and their threads take no core from those that compute.

    ValueError: see keepalive.lost_after_seconds.
    """
    with asking_whether_alive():
        yield
    keep_gloo_from_preempting()


def device_mesh(plan: Plan, device: torch.device, everyone: dist.ProcessGroup) -> DeviceMesh:
    """The plan's axes of more than one rank: replicate, shard, space0, space1, ..., channel, stage.  everyone: all ranks."""
    sizes = {"replicate": plan.replicate, "shard": plan.shard} | {f"space{axis}": size for axis, size in enumerate(plan.space)}
    return _with_axes(device.type, sizes | {"channel": plan.channel, "stage": plan.stage}, everyone)


def _with_axes(device: str, sizes: dict[str, int], everyone: dist.ProcessGroup) -> DeviceMesh:
    """A mesh without the axes of size 1, whose process groups would cost threads and sockets too."""
    large = {name: size for name, size in sizes.items() if size > 1}
    if len(large) == 1 and everyone is not dist.group.WORLD:  # for which init_device_mesh would take the default group
        return DeviceMesh.from_group(everyone, device, mesh_dim_names=tuple(large))
    return init_device_mesh(device, tuple(large.values()), mesh_dim_names=tuple(large))


def line(devices: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """The ranks along an axis, for point-to-point messages: never the group of all ranks.

    In that group, messages would wait behind those of other ranks.  torch also counts them among the group's collectives, and
    the StallWatch expects the same count on all ranks.
    """
    group = devices.get_group(axis) if devices.ndim > 1 else dist.new_group()
    assert isinstance(group, dist.ProcessGroup), f"rank {dist.get_rank()} is in no group along {axis}"
    return group


def shards_of(plan: Plan, devices: DeviceMesh, everyone: dist.ProcessGroup) -> DeviceMesh:
    """The mesh over which FSDP shards weights: (replicate, shard x space), or (shard x space) where replicate is 1."""
    tiles, inner = math.prod(plan.space), plan.channel * plan.stage
    if tiles > 1:  # ranks with tiles of one image share the weights too
        sizes = {"replicate": plan.replicate, "shard": plan.shard * tiles, "inner": inner}
        devices = _with_axes(devices.device_type, sizes, everyone)
    return devices["replicate", "shard"] if plan.replicate > 1 else devices["shard"]


def data_group(plan: Plan, meshes: int = 1) -> dist.ProcessGroup:
    """A new group of the ranks that have the same part of the model as this one.  meshes: as many of this plan side by side."""
    inner, firsts = plan.channel * plan.stage, range(0, meshes * plan.ranks, plan.ranks)
    return group_among([list(range(first + part, first + plan.ranks, inner)) for first in firsts for part in range(inner)])


def group_among(ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """New groups with the given ranks; the one that this rank is in.  Every rank must be in one."""
    with making_groups():
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend=backend)
    assert isinstance(group, dist.ProcessGroup), f"rank {dist.get_rank()} is in none of {ranks}"
    return group


def checkpoint_group(backend: str | None = "gloo") -> dist.ProcessGroup:
    """A new group of all ranks for checkpoints, with a timeout of 2 hours, since a disk may be slow."""
    group = dist.new_group(backend=backend, timeout=datetime.timedelta(hours=2))
    assert isinstance(group, dist.ProcessGroup), f"rank {dist.get_rank()} is in no group of all ranks"
    return group


def copy_group(
    plan: Plan, device: torch.device, everyone: dist.ProcessGroup, backend: str | None = "gloo"
) -> dist.ProcessGroup | None:
    """A group of the ranks of this rank's copy of the model, for CPU tensors; None where that is one rank."""
    copies = plan.replicate * plan.shard
    if plan.ranks == copies:
        return None
    if copies == 1 and device.type == "cpu":
        return everyone
    each = plan.ranks // copies
    ranks = [list(range(first, first + each)) for first in range(0, plan.ranks, each)]
    return group_among(ranks, backend=backend)


def grid_of(plan: Plan, devices: DeviceMesh, *, rank: int) -> Grid:
    """The space axes of this rank's copy, with a process group for every set of axes."""
    grid = Grid(tuple(plan.space))
    if grid.size == 1:
        return grid
    inner = plan.channel * plan.stage
    index = rank // inner % grid.size
    groups: list[tuple[tuple[int, ...], str]] = []
    for axes in grid.group_axes():
        if len(axes) == 1:
            groups.append((axes, line(devices, f"space{axes[0]}").group_name))
            continue
        others = tuple(axis for axis in range(len(grid.sizes)) if axis not in axes)
        lines = [[r for r in range(grid.size) if grid.place_on(others, r) == place] for place in range(grid.num_shards(others))]
        starts = [copy + part for copy in range(0, plan.ranks, grid.size * inner) for part in range(inner)]
        ranks = [[start + r * inner for r in line] for start in starts for line in lines]
        groups.append((axes, group_among(ranks).group_name))
    return Grid(tuple(plan.space), index, tuple(groups))


def grid_of_rows(plan: Plan, tiles: Grid, *, copy: int, meshes: int = 1) -> tuple[Grid, list[dist.ProcessGroup]]:
    """The ranks that have the same part of the model as a grid, (copies, *tiles.sizes), and its new groups.

    tiles: the ranks that share this rank's images.  copy: the index of this rank's copy of the model.
    meshes: as many of this plan side by side.
    """
    inner, firsts = plan.channel * plan.stage, range(0, meshes * plan.ranks, plan.ranks)
    grid = Grid((plan.replicate * plan.shard, *tiles.sizes), copy * tiles.size + tiles.index)
    groups = [(tuple(axis + 1 for axis in axes), name) for axes, name in tiles.groups]
    made: list[dist.ProcessGroup] = []
    for axes in grid.group_axes():
        if 0 not in axes:
            continue
        others = tuple(axis for axis in range(len(grid.sizes)) if axis not in axes)
        lines = [[r for r in range(grid.size) if grid.place_on(others, r) == place] for place in range(grid.num_shards(others))]
        ranks = [[first + r * inner + part for r in line] for first in firsts for part in range(inner) for line in lines]
        group = group_among(ranks)
        made.append(group)
        groups.append((axes, group.group_name))
    return replace(grid, groups=tuple(sorted(groups))), made
