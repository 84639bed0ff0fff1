"""The ranks of a run with a parameter server: the last one serves, and its run is one of a single rank; the others work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from widefield.asynchrony import pair_worker
from widefield.asynchrony.checks import server_in_words
from widefield.asynchrony.messages import server_failed
from widefield.asynchrony.pair_keeper import PairTrainer
from widefield.asynchrony.server import ServerTrainer
from widefield.asynchrony.worker import work
from widefield.comm.failure import FailureWatch
from widefield.comm.mesh import World, join, leave
from widefield.comm.replica_mesh import alone_on
from widefield.comm.requests import Requests, asked
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
    with ExitStack() as stack:
        mesh, serves = join(world, plan, timeout_seconds=timeout_seconds), world.rank == plan.workers
        group = mesh.checkpoint_group
        assert group is not None, "a server and a worker are two ranks"
        interrupt = stack.enter_context(Interrupt(watch_parent=world.launcher == "torchrun", tells=serves))
        stack.callback(leave, mesh)
        alone = alone_on(mesh)
        if not serves:
            if plan.agreement.name == "ad_psgd":
                return pair_worker.work(config, alone, group, folder, number=world.rank, workers=plan.workers)
            ask = partial(asked, peer=plan.workers, group=group)
            return work(config, alone, ask, folder, number=world.rank, workers=plan.workers)
        requests = Requests(range(plan.workers), group)
        stack.callback(requests.close, server_failed(), seconds=FAILED_SECONDS)
        kind = PairTrainer if plan.agreement.name == "ad_psgd" else ServerTrainer
        trainer = partial(kind, requests=requests, workers=plan.workers)
        with FailureWatch(alone) as watch:
            watched = replace(alone, watch=watch)
            return run(config, folder, watched, interrupt, stack, NOTHING, [server_in_words(plan)], trainer)
