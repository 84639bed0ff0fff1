"""The server's numbers: a gradient becomes an update of the weights by the recipe's optimizer.

The learning rate is the schedule's after the samples whose gradients have come so far.  An update with one gradient is made
with that times its samples / data.batch_size, so that all updates of a step together go as far as the step would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widefield.agreement import Compression, DelayCompensation, Descent, ParameterServer
from widefield.agreement.all_reduce import weighted_mean
from widefield.agreement.serving import Share
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.further_servers import FurtherServers
from widefield.asynchrony.held_weights import HeldWeights, Push, Update, clip_scale
from widefield.asynchrony.messages import WorkersGradient, check_finite, give, pushed
from widefield.comm.requests import Message
from widefield.config import RunConfig
from widefield.config.agreement import AgreementConfig
from widefield.training.loop import Learner


def algorithm_of(config: RunConfig, *, lr: float) -> ParameterServer:
    """What a recipe's section asks for, as the simulator knows it: of one server, since several do the same in one order.

    Its optimizer is the recipe's where that is sgd or adamw with a constant rate and without what is only in torch's.
    """
    asked, optimizer = config.agreement, config.optimizer
    samples = None if asked.kind == "synchronous" else config.data.batch
    return ParameterServer(
        descent_of(config, Descent(lr=lr, weight_decay=optimizer.weight_decay, lr_samples=samples)),
        asked.kind if asked.kind in ("synchronous", "hogwild") else "asynchronous",
        backup=asked.backup,
        bound=asked.bound,
        max_staleness=asked.max_staleness,
        compensation=compensation_of(asked),
        compression=compression_of(asked),
    )


def descent_of(config: RunConfig, descent: Descent) -> Descent:
    """`descent` with what the recipe's optimizer has, of sgd or adamw."""
    optimizer = config.optimizer
    if optimizer.name == "sgd":
        return replace(descent, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    return replace(descent, kind="adamw", betas=tuple(optimizer.betas)) if optimizer.name == "adamw" else descent


def compensation_of(asked: AgreementConfig) -> DelayCompensation | None:
    return None if asked.compensation is None else DelayCompensation(asked.compensation)


def compression_of(asked: AgreementConfig) -> Compression | None:
    """What is done to what workers push; None: nothing."""
    if asked.compression is None:
        return None
    return Compression(asked.compression, share=asked.compression_share, block=asked.compression_block)


@dataclass(frozen=True)
class Arrived:
    """A gradient with what was known when it came.  number: in the log.  version: of the weights that it is of."""

    number: int
    of: WorkersGradient
    worker: int
    version: int
    samples: int
    seen: int


class ServedWeights:
    """The first server's model and optimizer, and the updates of all servers.  received: samples whose gradients have come.

    further: the other servers; without any, the model itself is what is held and stepped.  With some the first part is, and
    the model has the weights only after `gather`.
    """

    def __init__(self, learner: Learner, asked: AgreementConfig, further: FurtherServers | None = None) -> None:
        self.learner, self.whole, self.further = learner, FlatModel(learner.model), further
        self.version, self.received = 0, learner.steps.seen(learner.step)
        self._is_synchronous, self._clip = asked.kind == "synchronous", learner.config.optimizer.clip_norm
        self._compression = compression_of(asked)
        self._versions: dict[Push, int] = {}
        """Of the readings whose gradients have not come."""
        if further is None:
            self.held = HeldWeights(self.whole, learner.optimizer, compensation_of(asked))
        else:
            own = further.hand_out(self.whole, learner.optimizer)
            self.held = HeldWeights(self.whole.with_pieces(own.pieces), own.optimizer, compensation_of(asked), own)

    @property
    def flat(self) -> FlatModel:
        """Of what this server sends and is pushed."""
        return self.held.flat

    @property
    def further_nbytes(self) -> int:
        """Of what the other servers send or are pushed, for a share."""
        return 0 if self.further is None else self.further.nbytes

    def greeting(self) -> Message | None:
        """The answer to a worker's first request, after which it asks for a share; None: the first one asks for it."""
        return None

    def give(self, worker: int, share: Share) -> Message:
        """What the worker is sent by this server; the others are told that it reads."""
        if self.further is not None:
            self.further.reads(worker, share)
        self._versions[worker, share] = self.version
        return give(share, self.held.read(worker, share))

    def pushed(self, worker: int, message: Message) -> WorkersGradient:
        """What a worker pushed."""
        return pushed(message, numel=self.flat.numel, dtype=self.flat.dtype, compression=self._compression)

    def unheard(self, worker: int, has: Sequence[Share]) -> tuple[WorkersGradient, str] | None:
        """A worker is gone that has some shares: what it has made of these and not told of, and how far it came, in words."""
        return None

    def arrive(self, worker: int, gradient: WorkersGradient, *, number: int, samples: int) -> Arrived:
        """AgreedError: the loss or the gradient is no finite number."""
        check_finite(gradient, worker)
        version = self._versions.pop((worker, gradient.share))
        arrived = Arrived(number, gradient, worker, version, samples, self.received)
        self.received += samples
        return arrived

    def drop(self, worker: int, share: Share) -> None:
        """A gradient came that no update is made with."""
        self._versions.pop((worker, share), None)
        self.held.forget(worker, [share])
        if self.further is not None:
            self.further.drops(worker, share)

    def strike(self, worker: int, lost: Sequence[Share], counted: Sequence[Share]) -> None:
        """A worker is gone, with the readings of `lost`; what it had pushed of `counted` is applied all the same."""
        for share in lost:
            self._versions.pop((worker, share), None)
        self.held.forget(worker, lost)
        if self.further is not None:
            self.further.strikes(worker, lost, counted)

    def update(self, gradients: Sequence[Arrived]) -> list[int]:
        """Step once with the mean of gradients; their staleness.  Those without a loss that counts change nothing."""
        samples = sum(one.samples for one in gradients)
        for one in gradients:
            if not one.of.count:
                self.drop(one.worker, one.of.share)
        gradients = [one for one in gradients if one.of.count]
        if not gradients:
            return []
        update = Update(
            tuple((one.worker, one.of.share) for one in gradients), tuple(round(one.of.count) for one in gradients),
            frozenset.intersection(*(one.of.absent for one in gradients)), self._rate(gradients, samples),
        )  # fmt: skip
        self.learner.before_update()
        self._step(update, [one.of.gradient for one in gradients])
        self.flat.move_statistics(_weighted([one.of.statistics for one in gradients], update.counts))
        staleness = [self.version - one.version for one in gradients]
        self.version += 1
        return staleness

    def _step(self, update: Update, gradients: Sequence[Tensor]) -> None:
        if self.further is not None:
            self.further.update(update)
        self.held.take(update, gradients)
        scale = 1.0
        if self._clip is not None:
            norms = [self.held.norm(), *([] if self.further is None else self.further.norms())]
            scale = clip_scale(self._clip, norms)
            if self.further is not None:
                self.further.step(update.rate, scale)
        self.held.step(update.rate, scale)

    def _rate(self, gradients: Sequence[Arrived], samples: int) -> float:
        learner = self.learner
        share = 1.0 if self._is_synchronous else samples / learner.steps.batch
        return learner.lr * learner.schedule.factor(min(one.seen for one in gradients)) * share

    def gather(self) -> None:
        """Give the model the weights of all servers; nothing is in the air."""
        if self.further is not None:
            self.learner.before_update()
            self.whole.load_trained(torch.cat([self.held.flat.weights(), *self.further.weights()]))

    def gather_optimizer(self) -> None:
        """Give the model's optimizer what those of all servers keep."""
        if self.further is not None:
            assert self.held.part is not None, "with several servers each has a part"
            self.further.gather_states(self.whole, self.learner.optimizer, self.held.part)

    def free_optimizer(self) -> None:
        """Let go of what `gather_optimizer` gave."""
        if self.further is not None:
            self.learner.before_update()
            self.learner.optimizer.state.clear()

    def close(self) -> None:
        """The run ends."""


def _weighted(tensors: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else weighted_mean(list(tensors), list(counts))
