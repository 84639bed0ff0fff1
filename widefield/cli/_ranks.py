"""Finds out which rank this process is, or starts the ranks."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from widefield.config import RunConfig
from widefield.plans import check, plan_of, ranks_asked_for, ranks_of_a_replica

if TYPE_CHECKING:
    from widefield.comm.mesh import World


def world_of(config: RunConfig, options: Namespace, arguments: Callable[[], list[str]]) -> tuple[World | None, int]:
    """(this process's World, 0) or, where it started ranks and they have ended, (None, their exit status).

    arguments: returns the arguments of the command that each rank runs, if ranks are started here.
    ValueError, NotImplementedError, before any rank is started: the ranks cannot carry out the plan.
    """
    from widefield.launchers import world_from
    from widefield.launchers.local import local_ranks, start

    world = world_from(os.environ)
    if world is not None:
        options.is_rank = world.size > 1
        return world, 0
    import torch

    from widefield.comm.devices import ranks_per_gpu
    from widefield.comm.mesh import World

    replica = ranks_of_a_replica(config)
    ranks, reason = local_ranks(ranks_asked_for(config), torch.cuda.device_count(), ranks_per_gpu(), replica=replica)
    check(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch_size)
    if ranks == 1:
        return World(), 0
    print(reason, flush=True)
    return None, start(ranks, arguments())
