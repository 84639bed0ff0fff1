"""The loop of a worker: fetch weights and a share, compute its gradient, push it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from widefield.agreement.compression import ErrorFeedback, pack
from widefield.agreement.serving import Share
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import END, HELLO, WorkersGradient, failed, not_finite, push, with_bytes
from widefield.asynchrony.samples import Samples
from widefield.asynchrony.weights import compression_of
from widefield.comm.failure import PeerFailedError, in_words
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.requests import Message
from widefield.config import RunConfig
from widefield.data.transforms import seed_of
from widefield.training.assemble import assemble, learner_of
from widefield.training.state import seed_everything
from widefield.training.trainer import Outcome

Ask = Callable[[Message], Message]
"""Sends the server a request and returns its answer."""


class Worker:
    """The parts of a run on one rank, of which only the model's passes are used.  number: of `workers`."""

    def __init__(self, config: RunConfig, alone: Mesh, *, number: int, workers: int) -> None:
        self.number = number
        self.parts = assemble(config, alone)
        check_parts(self.parts.model, self.parts.task, f"agreement={config.agreement.name}")
        self.learner, _ = learner_of(self.parts)
        self.flat, self.samples = FlatModel(self.learner.model), Samples(self.parts, workers=workers)
        self._reader = self.parts.reader(train=True)
        compression = compression_of(config.agreement)
        self._feedback = None if compression is None else ErrorFeedback(compression)
        seed_everything(seed_of(config.seed, "worker", number))

    def gradient(self, share: Share, state: Tensor) -> Message:
        """What to push.  AgreedError: a sample cannot be read, or what would be compressed is no finite number."""
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
        loss_sum, change = loss.item(), change.to(gradient)
        if self._feedback is not None:
            values, absent = self._compressed(self._feedback, share, gradient, change, absent, loss_sum=loss_sum, count=count)
        else:
            values = torch.cat([gradient, change])
        seconds = time.perf_counter() - began
        return push(share, values, absent, loss_sum=loss_sum, count=count, seconds=seconds)

    def _compressed(
        self, feedback: ErrorFeedback, share: Share, gradient: Tensor, change: Tensor, absent: tuple[int, ...], *,
        loss_sum: float, count: float,
    ) -> tuple[Tensor, tuple[int, ...]]:  # fmt: skip
        """(what to push in place of gradient and change, the places of parameters for which nothing is sent).

        What was left of earlier gradients waits where the server does not step, which is where no loss counts.
        AgreedError: the loss or the gradient is no finite number; nothing was compressed.
        """
        if not (math.isfinite(loss_sum) and bool(torch.isfinite(gradient).all())):
            raise not_finite(WorkersGradient(share, gradient, change, frozenset(absent), loss_sum, count, 0.0), self.number)
        if not count:
            return with_bytes(pack(torch.zeros_like(gradient), feedback.options), change), absent
        packed, sent = feedback.pack(gradient)
        return with_bytes(packed, change), self.flat.lasting(absent, sent)


def work(config: RunConfig, alone: Mesh, ask: Ask, folder: Path, *, number: int, workers: int) -> Outcome:
    """Learn until the server says that the run ends.

    PeerFailedError: the server is gone, or failed.  Other errors of this rank end the run, and the server says why.
    """
    try:
        worker = Worker(config, alone, number=number, workers=workers)
        answer = ask_server(ask, Message(HELLO))
        while answer.kind != END:
            assert answer.values is not None, "the server gives weights"
            step, place = answer.ints
            answer = ask_server(ask, worker.gradient((step, place), answer.values))
    except PeerFailedError:
        raise
    except Exception as error:
        ask_server(ask, failed(str(error) if isinstance(error, (ValueError, NotImplementedError)) else in_words(error)))
        raise
    has_failed, status, step = answer.ints
    if has_failed:
        raise PeerFailedError("the server failed; its message is above")
    return Outcome("complete" if status == 0 else "interrupted", step, status, None, folder)


def ask_server(ask: Ask, message: Message) -> Message:
    try:
        return ask(message)
    except RuntimeError as error:
        raise PeerFailedError(
            f"lost the server, which reported no error ({str(error).splitlines()[0]}); it was killed, or its machine or the "
            "network is down. The same command goes on from the newest checkpoint"
        ) from error
