"""Which of a run's ranks is this process, or does it start them?"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from widefield.config import RunConfig
from widefield.plans import check, plan_of, ranks_asked_for

if TYPE_CHECKING:
    from widefield.comm.mesh import World


def world_of(config: RunConfig, options: Namespace, arguments: Callable[[], list[str]]) -> tuple[World | None, int]:
    """This process's place among the ranks; or, where it has started ranks and seen them end, None and their status.

    arguments: gives the words of the command that each rank is to be, where ranks are started here.
    ValueError, NotImplementedError, before any rank is started: a plan that so many ranks cannot carry out.
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

    ranks, reason = local_ranks(ranks_asked_for(config), torch.cuda.device_count(), ranks_per_gpu())
    check(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch_size)
    if ranks == 1:
        return World(), 0
    print(reason, flush=True)
    return None, start(ranks, arguments())
