"""Which samples a share (step, place) has: those of one of `workers` ranks in a step of data-parallel training."""

from __future__ import annotations

from widefield.agreement.serving import Share
from widefield.data.order import EpochOrder, Key, Steps, share_of
from widefield.training.assemble import Parts
from widefield.training.balance import sample_weights_of


class Samples:
    """The same on every rank.  workers: into how many shares each step is divided."""

    def __init__(self, parts: Parts, *, workers: int) -> None:
        data, train = parts.config.data, parts.dataset.train
        self.steps, self.seed, self.workers = Steps(len(train), data.batch), parts.config.seed, workers
        self._multiple = data.cut_multiple
        self._weights = sample_weights_of(parts.config, parts.dataset, parts.mesh, labels=parts.dataset.labels)
        self._blocks = getattr(train, "blocks", None)
        self._orders: dict[int, EpochOrder] = {}
        """Of the last epochs that were asked for, two at most: workers are in two near the end of one."""

    def keys(self, share: Share) -> list[Key]:
        step, place = share
        epoch, positions = self.steps.epoch_of(step), self.steps.positions(step)
        (part,) = share_of(positions, rank=place, ranks=self.workers, passes=1, multiple=self._multiple)
        return self._order(epoch).keys(part)

    def places(self, step: int) -> list[int]:
        """The places of a step that have samples."""
        positions = self.steps.positions(step)
        ranks = range(self.workers)
        shares = [share_of(positions, rank=one, ranks=self.workers, passes=1, multiple=self._multiple)[0] for one in ranks]
        return [place for place, part in enumerate(shares) if len(part)]

    def numbers(self, share: Share) -> tuple[int, ...]:
        """Of the samples in a log of events: counted over epochs."""
        return tuple(key.epoch * self.steps.samples + key.index for key in self.keys(share))

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            self._orders = {old: one for old, one in self._orders.items() if old == epoch - 1}
            self._orders[epoch] = EpochOrder.of(self.seed, epoch, self.steps.samples, self._weights, self._blocks)
        return self._orders[epoch]
