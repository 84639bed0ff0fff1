"""The ranks of a run with a parameter server: the last ones serve, and the others work.

The first server is a run of a single rank in all that concerns files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from widefield.asynchrony import hogwild_worker, pair_worker, part_server
from widefield.asynchrony.asking import lost
from widefield.asynchrony.checks import check_machines, server_in_words
from widefield.asynchrony.messages import PUSHES, server_failed
from widefield.asynchrony.pair_keeper import PairTrainer
from widefield.asynchrony.server import ServerTrainer
from widefield.asynchrony.server_links import Channel
from widefield.asynchrony.worker import work
from widefield.comm.coming_back import came_back, meet_again, returns_of
from widefield.comm.devices import device_of
from widefield.comm.failure import FailureWatch
from widefield.comm.mesh import Mesh, World, join, leave
from widefield.comm.replica_mesh import alone_on
from widefield.comm.requests import PeerCameBack, Requests, close_all
from widefield.config import RunConfig
from widefield.plans import Plan
from widefield.training.given import NOTHING
from widefield.training.interrupt import Interrupt
from widefield.training.trainer import Outcome

FAILED_SECONDS = 0.5
"""How long a run that failed waits for workers to hear of it; less than launchers wait for the rank that failed to end."""


def train(
    config: RunConfig, folder: Path, world: World, plan: Plan, *, run: Callable[..., Outcome], timeout_seconds: float
) -> Outcome:
    """The part of this rank in a run.  run: trains on the mesh of one rank, with the trainer that it is given."""
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": 0})})  # nothing is read ahead
    if came_back(os.environ):
        return _back_as_a_worker(config, folder, world, plan)
    with ExitStack() as stack:
        mesh, leads = join(world, plan, timeout_seconds=timeout_seconds), world.rank == plan.workers
        group = mesh.checkpoint_group
        assert group is not None, "a server and a worker are two ranks"
        interrupt = stack.enter_context(Interrupt(watch_parent=world.launcher == "torchrun", tells=leads))
        stack.callback(leave, mesh)
        check_machines(plan, mesh)
        alone, servers = alone_on(mesh), plan.agreement.servers
        if not leads:
            part = partial(_part_of, config, alone, group, folder, workers=plan.workers, servers=servers)
            return part(rank=world.rank, in_pairs=plan.agreement.name == "ad_psgd")
        further = range(plan.workers + 1, plan.workers + servers)
        requests = Requests([*range(plan.workers), *further], group)
        pushes = Requests(range(plan.workers), group, tag=PUSHES, into=requests) if plan.agreement.overlap else None
        at_end = stack.enter_context(ExitStack())
        stack.callback(close_all, (requests, pushes), server_failed(), seconds=FAILED_SECONDS)
        _take_back(stack, world, [one for one in (requests, pushes) if one is not None])
        if plan.agreement.name == "ad_psgd":
            trainer = partial(PairTrainer, requests=requests, workers=plan.workers)
        else:
            trainer = partial(
                ServerTrainer, requests=requests, pushes=pushes, workers=plan.workers, further=further, at_end=at_end
            )
        with FailureWatch(alone) as watch:
            watched = replace(alone, watch=watch)
            return run(config, folder, watched, interrupt, stack, NOTHING, [server_in_words(plan)], trainer)


def _take_back(stack: ExitStack, world: World, several: list[Requests]) -> None:
    """Let the server hear of workers that come back, once nothing more comes of the processes that they were."""

    def came(rank: int, group: Any) -> None:
        for requests in several:
            requests.let_go(rank)
        several[0].put(rank, PeerCameBack(group))

    returns = returns_of(world, came)
    if returns is not None:
        stack.callback(returns.close)


def _back_as_a_worker(config: RunConfig, folder: Path, world: World, plan: Plan) -> Outcome:
    """The part of a worker that takes the place of one that died.  PeerFailedError: the server is gone."""
    with ExitStack() as stack:
        stack.enter_context(Interrupt(watch_parent=world.launcher == "torchrun", tells=False))
        alone = Mesh(
            Plan(), World(local_size=world.local_size, launcher=world.launcher), device_of(world.rank, world.local_rank)
        )
        try:
            group = meet_again(world)
        except RuntimeError as error:
            failed = lost("the server", str(error).splitlines()[0])
            raise failed from error
        server = partial(Channel, 1, group)
        pushes = [server(PUSHES)] if plan.agreement.overlap else []
        return work(config, alone, [server()], folder, number=world.rank, workers=plan.workers, pushes=pushes)


def _part_of(
    config: RunConfig, alone: Mesh, group: Any, folder: Path, *, rank: int, workers: int, servers: int, in_pairs: bool
) -> Outcome:
    """That of a worker, or of a server but the first."""
    if in_pairs:
        return pair_worker.work(config, alone, group, folder, number=rank, workers=workers)
    if config.agreement.kind == "hogwild":
        return hogwild_worker.work(config, alone, group, folder, number=rank, workers=workers)
    if rank > workers:
        return part_server.serve(config, alone, group, folder, rank=rank, workers=workers, servers=servers)
    ranks = range(workers, workers + servers)
    pushes = [Channel(one, group, PUSHES) for one in ranks] if config.agreement.overlap else []
    return work(config, alone, [Channel(one, group) for one in ranks], folder, number=rank, workers=workers, pushes=pushes)
