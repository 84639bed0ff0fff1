"""Which samples a share (step, place) has: those of one of `workers` ranks in a step of data-parallel training."""

from __future__ import annotations

import torch
from torch import Tensor

from widefield.agreement.serving import Share
from widefield.data.order import Key, Steps, order_of, repeats_in, share_of
from widefield.tasks import labels_of
from widefield.training.assemble import Parts
from widefield.training.balance import sample_weights_of


class Samples:
    """The same on every rank.  workers: into how many shares each step is divided."""

    def __init__(self, parts: Parts, *, workers: int) -> None:
        data, train = parts.config.data, parts.dataset.train
        self.steps, self.seed, self.workers = Steps(len(train), data.batch), parts.config.seed, workers
        self._multiple = 2 if data.mixup > 0 or data.cutmix > 0 else 1
        self._weights = sample_weights_of(parts.config, parts.dataset, parts.mesh, labels=labels_of(parts.task))
        self._blocks = getattr(train, "blocks", None)
        self._orders: dict[int, tuple[Tensor, Tensor]] = {}
        """Of the last epochs that were asked for, two at most: workers are in two near the end of one."""

    def keys(self, share: Share) -> list[Key]:
        step, place = share
        epoch, positions = self.steps.epoch_of(step), self.steps.positions(step)
        (part,) = share_of(positions, rank=place, ranks=self.workers, passes=1, multiple=self._multiple)
        order, repeats = self._order(epoch)
        return [Key(epoch, at, int(order[at]), repeat=int(repeats[at])) for at in part]

    def places(self, step: int) -> list[int]:
        """The places of a step that have samples."""
        positions = self.steps.positions(step)
        ranks = range(self.workers)
        shares = [share_of(positions, rank=one, ranks=self.workers, passes=1, multiple=self._multiple)[0] for one in ranks]
        return [place for place, part in enumerate(shares) if len(part)]

    def numbers(self, share: Share) -> tuple[int, ...]:
        """Of the samples in a log of events: counted over epochs."""
        return tuple(key.epoch * self.steps.samples + key.index for key in self.keys(share))

    def _order(self, epoch: int) -> tuple[Tensor, Tensor]:
        if epoch not in self._orders:
            self._orders = {old: one for old, one in self._orders.items() if old == epoch - 1}
            order = order_of(self.seed, epoch, self.steps.samples, self._weights, self._blocks)
            repeats = torch.zeros_like(order) if self._weights is None else repeats_in(order)
            self._orders[epoch] = order, repeats
        return self._orders[epoch]
