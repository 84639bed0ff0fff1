"""Which samples each rank reads at each step.

The order of an epoch is a permutation that depends on (seed, epoch) only and, where neighbours are read together, on the blocks
of these; or, where samples have weights, as many samples drawn with replacement, which depend on the weights too.  Step k of an
epoch takes positions [k B, k B + B), the last step the rest.
This interval is cut evenly over passes, and each pass over ranks.  So ranks and workers change only who reads what.  No sample
is dropped or repeated: a rank's part may be shorter than others, or empty.  For an empty part the rank reads a dummy image, so
that it can join the collectives; it is marked as no sample (`Batch.samples` is 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from widefield.data.transforms import seed_of
from widefield.geometry import Interval, even_cut, parts_of


@dataclass(frozen=True)
class Steps:
    """The arithmetic of steps: `samples` per epoch, `batch` per step; the last step of an epoch has the rest."""

    samples: int
    batch: int

    @property
    def per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    def epoch_of(self, step: int) -> int:
        return step // self.per_epoch

    def positions(self, step: int) -> Interval:
        """The positions, in their epoch's order, of the samples of step `step` of the run, counted from 0."""
        start = (step % self.per_epoch) * self.batch
        return Interval(start, min(start + self.batch, self.samples))

    def seen(self, step: int) -> int:
        """How many samples were consumed before step `step`, over all epochs."""
        return self.epoch_of(step) * self.samples + (step % self.per_epoch) * self.batch


@dataclass(frozen=True)
class Key:
    """One sample to read: image `index`, at `position` of the order of `epoch`.  real: False for a dummy.

    repeat: how often the epoch had this image before, where samples are drawn with replacement.
    """

    epoch: int
    position: int
    index: int
    real: bool = True
    repeat: int = 0

    def seed(self, seed: int, purpose: str) -> int:
        """The seed of what is random about this sample: another one each time the image is drawn."""
        return seed_of(seed, purpose, self.epoch, self.index, *([self.repeat] if self.repeat else []))


@dataclass(frozen=True)
class ShuffleBlocks:
    """Shuffling by blocks of neighbours, for files that are read fastest in succession.

    bounds: (blocks + 1,) int64, where each block of images begins, and where the last one ends.
    mixed: of how many blocks images are mixed; more are nearer to a permutation of all.
    """

    bounds: np.ndarray[Any, Any]
    mixed: int


def order_of(seed: int, epoch: int, samples: int, weights: Tensor | None = None, blocks: ShuffleBlocks | None = None) -> Tensor:
    """The order of an epoch: entry p is the image at position p.

    A permutation; with `weights`, (samples,) float64, as many images drawn with replacement in proportion to them.
    With `blocks`, the blocks are permuted, and then the images of so many blocks that follow each other, so that images of one
    block are never far apart.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "order", epoch))
    if weights is None:
        return torch.randperm(samples, generator=generator) if blocks is None else _permuted_by_blocks(blocks, generator)
    bounds = weights.numpy().cumsum()
    drawn = torch.rand(samples, dtype=torch.float64, generator=generator).numpy() * bounds[-1]
    return torch.from_numpy(np.searchsorted(bounds, drawn, side="right").clip(max=int(weights.nonzero().max())))


def _permuted_by_blocks(blocks: ShuffleBlocks, generator: torch.Generator) -> Tensor:
    order = torch.randperm(len(blocks.bounds) - 1, generator=generator).numpy()
    parts = []
    for first in range(0, len(order), blocks.mixed):
        some = order[first : first + blocks.mixed]
        images = np.concatenate([np.arange(blocks.bounds[block], blocks.bounds[block + 1]) for block in some])
        parts.append(torch.from_numpy(images)[torch.randperm(len(images), generator=generator)])
    return torch.cat(parts)


def repeats_in(order: Tensor) -> Tensor:
    """How often each entry of an order occurs before it.

    >>> repeats_in(torch.tensor([2, 0, 2, 2, 0])).tolist()
    [0, 0, 1, 2, 1]
    """
    found = torch.zeros_like(order)
    together, places = order.sort(stable=True)
    starts = torch.searchsorted(together, together)  # the first place of each one's equals
    found[places] = torch.arange(len(order)) - starts
    return found


@dataclass(frozen=True)
class EpochOrder:
    """The images of an epoch by position, see `order_of`, and how often each was drawn before, see `repeats_in`."""

    epoch: int
    order: Tensor
    repeats: Tensor

    @classmethod
    def of(
        cls, seed: int, epoch: int, samples: int, weights: Tensor | None = None, blocks: ShuffleBlocks | None = None
    ) -> EpochOrder:
        """As `order_of`."""
        order = order_of(seed, epoch, samples, weights, blocks)
        return cls(epoch, order, torch.zeros_like(order) if weights is None else repeats_in(order))

    def keys(self, part: Interval) -> list[Key]:
        """The samples at some positions."""
        return [Key(self.epoch, at, int(self.order[at]), repeat=int(self.repeats[at])) for at in part]


def share_of(positions: Interval, *, rank: int, ranks: int, passes: int, multiple: int) -> list[Interval]:
    """The positions of a step that `rank` reads, one interval per pass; some may be empty.

    Cut over passes first and then over ranks, so that a pass has the same images on any number of ranks: batch
    normalization uses the statistics of a pass.  multiple: cut at multiples of this, see `_parts`.

    >>> share_of(Interval(0, 10), rank=1, ranks=2, passes=2, multiple=1)
    [Interval(start=3, stop=5), Interval(start=8, stop=10)]
    """
    return [_parts(part, ranks, multiple)[rank] for part in _parts(positions, passes, multiple)]


def _parts(run: Interval, parts: int, multiple: int) -> list[Interval]:
    """Even parts of `run`, cut at multiples counted from the epoch's start, since mixed pairs begin at even positions."""
    before = run.start % multiple
    cut = even_cut(before + len(run), parts, multiple=multiple)
    return parts_of([run.start + max(0, boundary - before) for boundary in cut])


class TrainSampler(Sampler[list[Key]]):
    """Yields a list of keys per pass, from step `first` to before `last` of the run, so prefetching crosses epochs.

    weights: of samples drawn with replacement, blocks: of samples that are near each other, see `order_of`.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        seed: int,
        first: int,
        last: int,
        rank: int,
        ranks: int,
        passes: int,
        multiple: int,
        weights: Tensor | None = None,
        blocks: ShuffleBlocks | None = None,
    ) -> None:
        self.steps, self.seed, self.first, self.last, self.weights, self.blocks = steps, seed, first, last, weights, blocks
        self.share = {"rank": rank, "ranks": ranks, "passes": passes, "multiple": multiple}

    def __len__(self) -> int:
        return (self.last - self.first) * self.share["passes"]

    def __iter__(self) -> Iterator[list[Key]]:
        found = EpochOrder(-1, torch.empty(0), torch.empty(0))
        for step in range(self.first, self.last):
            epoch = self.steps.epoch_of(step)
            if epoch != found.epoch:
                found = EpochOrder.of(self.seed, epoch, self.steps.samples, self.weights, self.blocks)
            positions = self.steps.positions(step)
            wholes = _parts(positions, self.share["passes"], self.share["multiple"])
            for part, whole in zip(share_of(positions, **self.share), wholes, strict=True):
                keys = found.keys(part)
                dummy = [Key(epoch, positions.start, int(found.order[positions.start]), real=False)]
                yield keys or (dummy if len(whole) else [])


class EvaluateSampler(Sampler[list[Key]]):
    """Yields every image of a split once over all ranks, in order, `batch` at a time.

    even: equally many batches on every rank; a rank with fewer images gets dummy batches at the end.
    """

    def __init__(self, samples: int, *, batch: int, rank: int, ranks: int, even: bool = False) -> None:
        shares = parts_of(even_cut(samples, ranks))
        own, longest = shares[rank], max(map(len, shares))
        self.batches = [range(start, min(start + batch, own.stop)) for start in range(own.start, own.stop, batch)]
        self.num_dummies = -(-longest // batch) - len(self.batches) if even else 0

    def __len__(self) -> int:
        return len(self.batches) + self.num_dummies

    def __iter__(self) -> Iterator[list[Key]]:
        yield from ([Key(0, index, index) for index in batch] for batch in self.batches)
        yield from ([Key(0, 0, 0, real=False)] for _ in range(self.num_dummies))
