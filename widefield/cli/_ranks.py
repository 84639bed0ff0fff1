"""Finds out which rank this process is, or starts the ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from widefield.config import RunConfig
from widefield.plans import check, plan_of, ranks_asked_for, ranks_of_a_replica, refit
from widefield.training.terminal import say

if TYPE_CHECKING:
    from widefield.comm.mesh import World
    from widefield.launchers._forking import Forking
    from widefield.launchers._restarting import Restarts


def world_of(config: RunConfig, options: Namespace, arguments: Callable[[], list[str]]) -> tuple[World | None, int]:
    """(this process's World, 0) or, where it started ranks and they have ended, (None, their exit status).

    arguments: returns the arguments of the command that each rank runs, if ranks are started here.
    ValueError, NotImplementedError, before any rank is started: the ranks cannot carry out the plan.
    """
    from widefield.launchers import world_from

    world, watched = world_from(os.environ), getattr(options, "max_restarts", 0) > 0
    if world is not None:
        options.is_rank = world.size > 1
        _refuse_restarts(world, watched)
        return world, 0
    asked, replica = ranks_asked_for(config), ranks_of_a_replica(config)
    with _forking(asked or replica, config.data.name, even_one=watched) as forked:
        import torch

        from widefield.comm.devices import ranks_per_gpu
        from widefield.comm.mesh import World
        from widefield.launchers.local import local_ranks, start

        gpus = torch.cuda.device_count()
        ranks, reason = local_ranks(asked, gpus, ranks_per_gpu(), replica=replica)
        plan = plan_of(config, ranks)
        check(plan, ranks=ranks, samples_per_step=config.data.batch_if_known)
        if ranks == 1 and not watched:
            return World(), 0
        say(reason)
        given = arguments()
        restarts = _restarts(config, options, given, ranks, gpus * ranks_per_gpu()) if watched else None
        lost = plan.workers if plan.has_server else 0
        return None, start(ranks, given, forked=None if gpus else forked, restarts=restarts, may_be_lost=lost)


def _refuse_restarts(world: World, watched: bool) -> None:
    """ValueError: the command is to restart ranks that another launcher has started."""
    if watched:
        raise ValueError(
            f"--max-restarts is for ranks that this command starts, and {world.launcher} started this one; leave it out and "
            "let the launcher restart (torchrun --max-restarts N, a requeued Slurm job), or start without one"
        )


def _restarts(config: RunConfig, options: Namespace, arguments: list[str], ranks: int, slots: int) -> Restarts:
    """What to do after a failure of a run that starts on `ranks` ranks.

    arguments: of its ranks.  slots: for how many ranks the GPUs of this machine are; 0 without GPUs.
    ValueError: options.min_ranks is above `ranks`.
    """
    from widefield.launchers._restarting import Again, Restarts
    from widefield.training.endings import failure_since

    least = options.min_ranks
    if least is not None and least > ranks:
        raise ValueError(f"--min-ranks {least} is above the {ranks} ranks that the run starts on; set it to {ranks} at most")
    slots_left = _slots_left if slots else lambda: ranks

    def starts(most: int) -> Again | None:
        left = slots_left()
        for number in range(min(most, left), (least or (1 if left < most else ranks)) - 1, -1):
            try:
                fitted, _ = refit(config, number)
                check(plan_of(fitted, number), ranks=number, samples_per_step=config.data.batch_if_known)
            except (ValueError, NotImplementedError):
                if not options.planned:  # the ranks of mesh.auto plan for what they are
                    continue
            return Again(number, arguments if number == ranks else options.planned or arguments)
        return None

    folder = Path(options.run)
    since = partial(failure_since, folder)
    return Restarts(options.max_restarts, failure_since=since, starts=starts, takes_back=config.agreement.takes_back)


def _slots_left() -> int:
    """For how many ranks there are GPUs now, asked in a new process, since this one knows of those that it has begun with."""
    from widefield.comm.devices import ranks_per_gpu
    from widefield.launchers.local import python_of_ranks

    program = "import torch; print(torch.cuda.device_count())"
    told = subprocess.run([*python_of_ranks(), "-c", program], capture_output=True, text=True).stdout.strip()
    return int(told) * ranks_per_gpu() if told.isdecimal() else 0


@contextlib.contextmanager
def _forking(ranks: int, data: str, *, even_one: bool) -> Iterator[Forking | None]:
    """A process that loads what ranks need while this one goes on checking; None where it would be of no use."""
    from widefield.launchers._forking import Forking, may_fork
    from widefield.launchers.local import environment_of_ranks, new_run_id, python_of_ranks

    if (ranks == 1 and not even_one) or not may_fork():
        yield None
        return
    with environment_of_ranks(ranks):
        forked = Forking([*python_of_ranks(), "-m", "widefield.forked_ranks", data], new_run_id())
    try:
        yield forked
    finally:
        forked.end()
