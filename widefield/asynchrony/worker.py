"""The loop of a worker: fetch weights and a share, compute its gradient, push it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from widefield.agreement.compression import ErrorFeedback, pack
from widefield.agreement.serving import Share
from widefield.asynchrony.asking import failure_is_told, outcome_of
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import GIVE, STRUCK, WorkersGradient, check_finite, push, text_of, with_bytes
from widefield.asynchrony.samples import Samples
from widefield.asynchrony.server_links import Channel, ServerLinks
from widefield.asynchrony.weight_parts import check_optimizer
from widefield.asynchrony.weights import compression_of
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.requests import Message
from widefield.config import RunConfig
from widefield.data.transforms import seed_of
from widefield.training.assemble import assemble, learner_of
from widefield.training.state import seed_everything
from widefield.training.trainer import Outcome


class Worker:
    """The parts of a run on one rank, of which only the model's passes are used.  number: of `workers`."""

    def __init__(self, config: RunConfig, alone: Mesh, *, number: int, workers: int) -> None:
        self.number = number
        self.parts = assemble(config, alone)
        check_parts(self.parts.model, self.parts.task, f"agreement={config.agreement.name}")
        self.learner, _ = learner_of(self.parts)
        self.flat, self.samples = FlatModel(self.learner.model), Samples(self.parts, workers=workers - config.agreement.backup)
        self._reader = self.parts.reader(train=True)
        compression = compression_of(config.agreement)
        self._feedback = None if compression is None else ErrorFeedback(compression)
        self.before_backward: Callable[[], None] = lambda: None
        seed_everything(seed_of(config.seed, "worker", number))

    def gradient(self, share: Share, state: Tensor) -> Message:
        """What to push.  AgreedError: a sample cannot be read, or what would be compressed is no finite number."""
        began, found = time.perf_counter(), self.learned(share, state)
        absent = tuple(sorted(found.absent))
        if self._feedback is not None:
            values, absent = self._compressed(self._feedback, found, absent)
        else:
            values = torch.cat([found.gradient, found.statistics])
        seconds = time.perf_counter() - began
        return push(share, values, absent, loss_sum=found.loss_sum, count=found.count, seconds=seconds)

    def learned(self, share: Share, state: Tensor) -> WorkersGradient:
        """The gradient of a share's mean loss, with the weights and statistics of `state`.  AgreedError: as of `gradient`."""
        began, learner = time.perf_counter(), self.learner
        self.flat.load(state)
        before = self.flat.statistics()
        batch = self._reader.__getitems__(self.samples.keys(share))
        if batch.problem is not None:
            raise AgreedError(batch.problem)
        image, target = learner.prepared(batch)
        count = float(learner.task.count(target))
        learner.model.zero_grad(set_to_none=True)
        with learner.arithmetic.autocast():
            output = learner.model(image)
        loss = learner.loss_of(output, target, seeds=batch.seeds)
        self.before_backward()
        (loss / max(1.0, count)).backward()
        gradient, absent = self.flat.gradient()
        change = (self.flat.statistics() - before).to(gradient)
        loss_sum = loss.item()
        return WorkersGradient(share, gradient, change, frozenset(absent), loss_sum, count, time.perf_counter() - began)

    def _compressed(
        self, feedback: ErrorFeedback, found: WorkersGradient, absent: tuple[int, ...]
    ) -> tuple[Tensor, tuple[int, ...]]:
        """(what to push in place of gradient and change, the places of parameters for which nothing is sent).

        What was left of earlier gradients waits where the server does not step, which is where no loss counts.
        AgreedError: the loss or the gradient is no finite number; nothing was compressed.
        """
        check_finite(found, self.number)
        if not found.count:
            return with_bytes(pack(torch.zeros_like(found.gradient), feedback.options), found.statistics), absent
        packed, sent = feedback.pack(found.gradient)
        return with_bytes(packed, found.statistics), self.flat.lasting(absent, sent)


def work(
    config: RunConfig, alone: Mesh, servers: Sequence[Channel], folder: Path, *, number: int, workers: int,
    pushes: Sequence[Channel] = (),
) -> Outcome:  # fmt: skip
    """Learn until the server says that the run ends, or that this worker was struck out.

    servers: to all of them.  pushes: to all, beside these; see ServerLinks.
    PeerFailedError: a server is gone, or failed.  Other errors of this rank end the run, and the first server says why.
    """
    with ExitStack() as at_end, failure_is_told((*pushes, *servers)[0], "the server"):
        worker = Worker(config, alone, number=number, workers=workers)
        if len(servers) > 1:
            check_optimizer(worker.learner.optimizer, len(servers))
        links = ServerLinks(worker.flat, servers[0], servers[1:], pushes, worker=number)
        at_end.callback(links.close)  # a failure is told before others are waited for
        worker.before_backward = links.ask_ahead
        answer = links.begin()
        while answer.kind == GIVE:
            assert answer.values is not None, "the server gives weights"
            step, place = answer.ints
            answer = links.push(worker.gradient((step, place), answer.values))
    return ended(answer, folder, number=number)


def ended(answer: Message, folder: Path, *, number: int) -> Outcome:
    """How the run ended for a worker, of the server's last answer.  PeerFailedError: the server failed."""
    if answer.kind == STRUCK:
        print(f"widefield: worker {number} {text_of(answer)}", file=sys.stderr, flush=True)
        return Outcome("complete", 0, 0, None, folder)
    return outcome_of(answer, folder, "the server")
