"""The loop of a worker: fetch weights and a share, compute its gradient, push it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from widefield.agreement.serving import Share
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import END, HELLO, failed, push
from widefield.asynchrony.samples import Samples
from widefield.comm.failure import PeerFailedError, in_words
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.requests import Message
from widefield.config import RunConfig
from widefield.data.transforms import seed_of
from widefield.training.assemble import assemble, learner_of
from widefield.training.state import seed_everything
from widefield.training.trainer import Outcome

Ask = Callable[[Message], Message]
"""Sends a request and returns its answer."""


class Worker:
    """The parts of a run on one rank, of which only the model's passes are used.  number: of `workers`."""

    def __init__(self, config: RunConfig, alone: Mesh, *, number: int, workers: int) -> None:
        self.parts = assemble(config, alone)
        check_parts(self.parts.model, self.parts.task, f"agreement={config.agreement.name}")
        self.learner, _ = learner_of(self.parts)
        self.flat, self.samples = FlatModel(self.learner.model), Samples(self.parts, workers=workers)
        self._reader = self.parts.reader(train=True)
        seed_everything(seed_of(config.seed, "worker", number))

    def gradient(self, share: Share, state: torch.Tensor) -> Message:
        """What to push.  AgreedError: a sample cannot be read."""
        began, learner = time.perf_counter(), self.learner
        self.flat.load(state)
        batch = self._reader.__getitems__(self.samples.keys(share))
        if batch.problem is not None:
            raise AgreedError(batch.problem)
        image, target = learner.prepared(batch)
        count = float(learner.task.count(target))
        learner.model.zero_grad(set_to_none=True)
        with learner.arithmetic.autocast():
            output = learner.model(image)
        loss = learner.loss_of(output, target, seeds=batch.seeds)
        (loss / max(1.0, count)).backward()
        gradient, absent = self.flat.gradient()
        change = self.flat.statistics() - state[state.numel() - (self.flat.of_push - self.flat.numel) :]
        values, seconds = torch.cat([gradient, change.to(gradient)]), time.perf_counter() - began
        return push(share, values, absent, loss_sum=loss.item(), count=count, seconds=seconds)


def work(config: RunConfig, alone: Mesh, ask: Ask, folder: Path, *, number: int, workers: int) -> Outcome:
    """Learn until the server says that the run ends.

    PeerFailedError: the server is gone, or failed.  Other errors of this rank end the run, and the server says why.
    """
    ask = partial(asked_of, ask, "the server")
    with failure_is_told(ask):
        worker = Worker(config, alone, number=number, workers=workers)
        answer = ask(Message(HELLO))
        while answer.kind != END:
            assert answer.values is not None, "the server gives weights"
            step, place = answer.ints
            answer = ask(worker.gradient((step, place), answer.values))
    return outcome_of(answer, folder, "the server")


# ---------------------------------------------------------------------------------------------- of workers of any kind


def asked_of(ask: Ask, whom: str, message: Message) -> Message:
    """The answer of a rank, which is `whom` in words.  PeerFailedError: it is gone."""
    try:
        return ask(message)
    except RuntimeError as error:
        raise PeerFailedError(
            f"lost {whom}, which reported no error ({str(error).splitlines()[0]}); it was killed, or its machine or the "
            "network is down. The same command goes on from the newest checkpoint"
        ) from error


@contextmanager
def failure_is_told(ask: Ask) -> Iterator[None]:
    """Inside, an error of this rank is told to the one that answers, which then says why the run ends."""
    try:
        yield
    except PeerFailedError:
        raise
    except Exception as error:
        ask(failed(str(error) if isinstance(error, (ValueError, NotImplementedError)) else in_words(error)))
        raise


def outcome_of(end: Message, folder: Path, whose: str) -> Outcome:
    """How the run ended, of the last answer.  PeerFailedError: the rank that gave it, `whose` in words, failed."""
    has_failed, status, step = end.ints
    if has_failed:
        raise PeerFailedError(f"{whose} failed; its message is above")
    return Outcome("complete" if status == 0 else "interrupted", step, status, None, folder)
