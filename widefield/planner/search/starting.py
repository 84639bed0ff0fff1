"""How a run that starts comes to its plan: for which ranks, and on ranks that a launcher has started, on all of them alike."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from widefield.comm.devices import ranks_per_gpu
from widefield.comm.meeting import placed_on_machine, rendezvous_seconds, said_by_first_rank
from widefield.comm.mesh import AgreedError, World
from widefield.config import RunConfig
from widefield.cores import usable_cores
from widefield.planner.search.automatic import planned_run, predict_into
from widefield.training.given import Given
from widefield.training.planned import planned_from
from widefield.training.terminal import say

CPU_RANKS_MOST = 4
PLANNING_SECONDS = 600.0
"""How long ranks wait for the plan of rank 0."""
REFUSED = "refused: "


def local_ranks_to_plan() -> int:
    """The ranks to plan for on this machine: one per GPU, or per core, of which CPU_RANKS_MOST at most."""
    gpus = torch.cuda.device_count() * ranks_per_gpu()
    return gpus or min(CPU_RANKS_MOST, usable_cores())


def planned_together(config: RunConfig, folder: Path, world: World, given: Given) -> RunConfig:
    """The config with a plan for the ranks of `world` in place of mesh.auto.  Rank 0 plans; every rank calls it.

    AgreedError, on every rank: nothing fits, or the model cannot be planned.
    """
    if world.size == 1:
        return planned_run(config, folder, ranks=1, given=given, say=say).applied(config)
    nodes = _nodes(world)

    def plan() -> str:
        try:
            return planned_run(config, folder, ranks=world.size, nodes=nodes, given=given, say=say).to_text()
        except (ValueError, NotImplementedError) as error:
            return f"{REFUSED}{error}"

    text = said_by_first_rank(plan, world, seconds=PLANNING_SECONDS)
    if text.startswith(REFUSED):
        raise AgreedError(text.removeprefix(REFUSED))
    return planned_from(text).applied(config)


def predicted_first(config: RunConfig, folder: Path, world: World, given: Given) -> None:
    """Predict the run on rank 0, for which the others wait; a run that cannot be predicted goes on, with words that say why."""

    nodes = _nodes(world)

    def predict() -> str:
        try:
            predict_into(folder, config, ranks=world.size, nodes=nodes, given=given)
        except (ValueError, NotImplementedError, OSError) as error:
            say(f"log.predict: the run is not predicted: {error}")
        return "done"

    if world.size == 1:
        predict()
        return
    said_by_first_rank(predict, world, seconds=PLANNING_SECONDS)


def _nodes(world: World) -> int:
    """The number of machines, which every rank asks for, since the ranks may have to meet for it."""
    placed = world if world.size == 1 else placed_on_machine(world, timeout=timedelta(seconds=rendezvous_seconds()))
    return max(1, placed.size // max(1, placed.local_size))
