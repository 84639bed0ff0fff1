"""Finds out which rank this process is, or starts the ranks."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from widefield.config import RunConfig
from widefield.plans import check, plan_of, ranks_asked_for, ranks_of_a_replica
from widefield.training.terminal import say

if TYPE_CHECKING:
    from widefield.comm.mesh import World
    from widefield.launchers._forking import Forking


def world_of(config: RunConfig, options: Namespace, arguments: Callable[[], list[str]]) -> tuple[World | None, int]:
    """(this process's World, 0) or, where it started ranks and they have ended, (None, their exit status).

    arguments: returns the arguments of the command that each rank runs, if ranks are started here.
    ValueError, NotImplementedError, before any rank is started: the ranks cannot carry out the plan.
    """
    from widefield.launchers import world_from

    world = world_from(os.environ)
    if world is not None:
        options.is_rank = world.size > 1
        return world, 0
    asked, replica = ranks_asked_for(config), ranks_of_a_replica(config)
    with _forking(asked or replica, config.data.name) as forked:
        import torch

        from widefield.comm.devices import ranks_per_gpu
        from widefield.comm.mesh import World
        from widefield.launchers.local import local_ranks, start

        gpus = torch.cuda.device_count()
        ranks, reason = local_ranks(asked, gpus, ranks_per_gpu(), replica=replica)
        check(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch_if_known)
        if ranks == 1:
            return World(), 0
        say(reason)
        return None, start(ranks, arguments(), forked=None if gpus else forked)


@contextlib.contextmanager
def _forking(ranks: int, data: str) -> Iterator[Forking | None]:
    """A process that loads what ranks need while this one goes on checking; None where it would be of no use."""
    from widefield.launchers._forking import Forking, may_fork
    from widefield.launchers.local import environment_of_ranks, new_run_id, python_of_ranks

    if ranks == 1 or not may_fork():
        yield None
        return
    with environment_of_ranks(ranks):
        forked = Forking([*python_of_ranks(), "-m", "widefield.forked_ranks", data], new_run_id())
    try:
        yield forked
    finally:
        forked.end()
