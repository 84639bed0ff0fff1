"""Launchers, one per file: which of a run's ranks is this process, by the environment variables of its launcher?

Each file defines `PRIORITY`, lower is asked earlier; `detect(environment)`, which returns a World, None, or raises ValueError;
and `CASES`, environments with the World that they mean or a pattern of the error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from widefield.comm.world import FILE, World
from widefield.config import PipelineConfig, RecomputeConfig, ShardingConfig
from widefield.naming import load, names_in
from widefield.plans import Plan

if TYPE_CHECKING:
    from widefield.comm.mesh import Mesh


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher seems to have started this process.  A guess that loads nothing: `world_from` knows."""
    own = ("WIDEFIELD_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PET_NODE_RANK")
    return any(name in environment for name in own)


def world_from(environment: Mapping[str, str]) -> World | None:
    """The World that the launcher's variables describe; None without a launcher.

    Launchers are asked in the order of PRIORITY, the innermost first: torchrun inside srun inside a pod is torchrun.
    ValueError: variables are missing or contradict each other, since a process that is one of many must not run alone.
    """
    modules = [load(__name__, name) for name in names_in(__name__)]
    for module in sorted(modules, key=lambda module: (module.PRIORITY, module.__name__)):
        world = module.detect(environment)
        if world is not None:
            return _checked(world)
    return None


def build_mesh(
    *,
    replicate: int | None = None,
    shard: int = 1,
    space: Sequence[int] = (),
    channel: int = 1,
    stage: int = 1,
    zero: Literal[1, 2, 3] = 3,
    micro_batches: int | None = None,
    recompute: bool | Sequence[str] = False,
    batch_norm: Literal["synchronized", "averaged", "broadcast"] = "synchronized",
) -> Mesh:
    """Join the other ranks in a mesh of these axes; every rank calls it once.

    The rank is that of the process group or the launcher's environment; with neither, this process is the only rank.
    replicate: None takes all ranks that the other axes leave.  space: tiles per dim of an image, as (2, 1)
    for upper and lower halves; the ranks of an image are neighbours.
    zero: what `shard` ranks share: 1 optimizer state (`share_states`), 2 gradients too, 3 weights too.
    micro_batches: of a pass through the `stage` ranks of a pipeline; None chooses.  Run passes with `backward_of`.
    recompute: save less for the backward and compute it again there: True, or modules by name or pattern, as ["layer*.*"].
    ValueError or NotImplementedError, before any message: the axes do not fit the number of ranks, or cannot run exactly.
    """
    from widefield.comm.mesh import current_world, join

    world = current_world() or world_from(os.environ) or World()
    others = shard * math.prod(space) * channel * stage
    sizes = {"replicate": replicate or max(1, world.size // others), "shard": shard, "channel": channel, "stage": stage}
    blocks = None if isinstance(recompute, bool) else list(recompute)
    plan = Plan(
        **sizes,
        space=list(space),
        batch_norm=batch_norm,
        sharding=ShardingConfig(zero=zero),
        pipeline=PipelineConfig(micro_batches=micro_batches),
        recompute=RecomputeConfig(blocks=blocks) if recompute else None,
    )
    _refuse_alone(world, plan.ranks)
    return join(world, plan)


def _refuse_alone(world: World, ranks: int) -> None:
    """ValueError: a mesh of several ranks in a script that no launcher has started."""
    if world.launcher == "none" and ranks > 1:
        raise ValueError(
            f"the mesh is of {ranks} ranks and this script runs on one, since no launcher has started it; start it on {ranks}: "
            f"torchrun --nproc-per-node {ranks} SCRIPT.py"
        )


def numbers(environment: Mapping[str, str], names: Iterable[str], *, launcher: str) -> list[int]:
    """The variables `names` as whole numbers, in that order.  ValueError: one is missing, or no number."""
    wanted = list(names)
    require(environment, wanted, launcher=launcher)
    return [_number(environment, name) for name in wanted]


def require(environment: Mapping[str, str], names: Iterable[str], *, launcher: str) -> None:
    """ValueError: one of `names` is missing or empty."""
    wanted = list(names)
    missing = [name for name in wanted if not environment.get(name)]
    if missing:
        found = ", ".join(f"{name}={environment[name]}" for name in wanted if environment.get(name)) or "none of its variables"
        raise ValueError(
            f"the environment of {launcher} is half set: it has {found} and lacks {', '.join(missing)}; "
            f"start under {launcher}, which sets them all, or unset what is left over from an earlier run"
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{name}={environment[name]!r} is not a whole number; the launcher sets it, so leave it to the launcher"
        )
    return int(text)


def _checked(world: World) -> World:
    """Return `world`.  ValueError: its numbers contradict each other."""
    local_size = world.local_size or 1  # 0 is not known yet
    if world.rank >= world.size or world.local_rank >= local_size or local_size > world.size:
        raise ValueError(
            f"the environment of {world.launcher} contradicts itself: rank {world.rank} of {world.size}, "
            f"{world.local_rank} of {world.local_size} on its machine (ranks count from 0); start under one launcher only"
        )
    if world.size > 1 and not 0 < world.port < 65536 and not world.address.startswith(FILE):
        raise ValueError(f"the environment of {world.launcher} gives port {world.port} to meet at; set MASTER_PORT to 1..65535")
    return world
