"""Servers hold the weights; workers fetch them and push gradients.

    synchronous        a step with the mean of all workers' gradients
    backup workers     a step with the first n - b gradients; later ones are dropped     Chen et al. 2016, arXiv:1604.00981
    asynchronous       a step with each gradient as it comes                             Dean et al. 2012, NeurIPS 25
    bounded staleness  no worker is more than `bound` steps ahead of the slowest         Ho et al. 2013, NeurIPS 26
    bounded delay      no gradient meets weights more than `max_staleness` updates on    Agarwal and Duchi 2011, arXiv:1104.5525
    delay compensated  g + l g g (w now - w then) for a gradient g of old weights        Zheng et al. 2017, arXiv:1609.08326
    compressed         gradients are pushed in fewer bytes; see compression.py
    Hogwild            no server: all read and write shared memory without locks         Niu et al. 2011, arXiv:1106.5730

Weights, versions and the optimizer's state are kept in parts, one per server (or block of memory).  The *version* of a part is
the number of updates it has had; the *staleness* of a gradient is how many it had between the reading of the weights and the
update.  Rules here are elementwise, on tensors of any shape and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from widefield.agreement.compression import Compression
from widefield.agreement.descent import Descent, DescentState


def even_parts(numel: int, servers: int) -> list[slice]:
    """Which of the flat parameters each server holds; their numbers differ by one at most.

    ValueError: there are more servers than parameters.

    >>> even_parts(7, 3)
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if not 1 <= servers <= numel:
        raise ValueError(f"{numel} parameters on {servers} servers; take 1 server or more, and no more than parameters")
    size, longer = divmod(numel, servers)
    starts = [one * size + min(one, longer) for one in range(servers + 1)]
    return [slice(*ends) for ends in zip(starts, starts[1:], strict=False)]


# ---------------------------------------------------------------------------------------------- delay compensation


@dataclass(frozen=True)
class DelayCompensation:
    """DC-ASGD.  strength: lambda; 0 is plain asynchronous SGD.

    decay: None for a constant lambda; for the adaptive one the decay of the mean square of gradients (0.95 in the paper), by
    whose root lambda is divided, element by element.
    """

    strength: float
    decay: float | None = None

    def __post_init__(self) -> None:
        if self.strength < 0 or (self.decay is not None and not 0 <= self.decay < 1):
            raise ValueError(
                f"a compensation of strength {self.strength} with decay {self.decay}; take a strength of 0 or more and a decay "
                "from 0 to below 1, or None"
            )


LEAST_SQUARE = 1e-7
"""What is added to the mean square of gradients, as in the paper."""


def delay_compensated(gradient: Tensor, now: Tensor, then: Tensor, strength: float | Tensor) -> Tensor:
    """The gradient at the weights `now`, of one at the weights `then`: a Taylor series in which g g stands for the Hessian."""
    return gradient + strength * gradient * gradient * (now - then)


def adaptive_strength(gradient: Tensor, mean_square: Tensor | None, options: DelayCompensation) -> tuple[Tensor, Tensor]:
    """(lambda of each element, new mean square).  mean_square: None at first, which counts as 0."""
    assert options.decay is not None, "an adaptive lambda has a decay"
    old = torch.zeros_like(gradient) if mean_square is None else mean_square
    mean_square = options.decay * old + (1 - options.decay) * gradient.square()
    return options.strength / (mean_square + LEAST_SQUARE).sqrt(), mean_square


# ---------------------------------------------------------------------------------------------- a server's part


@dataclass
class ServerPart:
    """What one server holds: a part of the weights, its version, and the state of its optimizer.

    staleness: of each update so far, in updates.
    """

    weights: Tensor
    state: DescentState
    compensation: DelayCompensation | None = None
    version: int = 0
    mean_square: Tensor | None = None
    staleness: list[int] = field(default_factory=list)

    def push(self, gradient: Tensor, rate: float, *, then: Tensor, version: int) -> int:
        """Update with a gradient; its staleness.

        then, version: the part's weights that the gradient is of.  ValueError: the version is one that has not been.
        """
        if not 0 <= version <= self.version:
            raise ValueError(
                f"a gradient of version {version} comes to a server at version {self.version}; a push has to carry the version "
                "with which its weights were sent"
            )
        self.weights = self.state.step(self.weights, self._compensated(gradient, then), rate)
        self.staleness.append(self.version - version)
        self.version += 1
        return self.staleness[-1]

    def _compensated(self, gradient: Tensor, then: Tensor) -> Tensor:
        if self.compensation is None:
            return gradient
        strength: float | Tensor = self.compensation.strength
        if self.compensation.decay is not None:
            strength, self.mean_square = adaptive_strength(gradient, self.mean_square, self.compensation)
        return delay_compensated(gradient, self.weights, then, strength)


@dataclass
class StalenessClocks:
    """Who may read now?  A worker's clock counts its updates; it may be at most `bound` ahead of the slowest clock.

    bound: None: everybody may, always.  0: nobody begins a step before all have ended the last one.
    """

    bound: int | None = None
    clocks: dict[int, int] = field(default_factory=dict)
    _slowest: int | None = None
    """The least clock, where it is known."""

    def enter(self, worker: int) -> None:
        """A worker begins, or comes back: it is as far as the slowest one."""
        self.clocks[worker] = min(self.clocks.values(), default=0)
        self._slowest = None

    def leave(self, worker: int) -> None:
        """Nobody waits any longer for a worker that died or has nothing to do.  One that never entered is no error."""
        self.clocks.pop(worker, None)
        self._slowest = None

    def advance(self, worker: int) -> None:
        """A gradient of this worker was applied.  One of a worker that left changes no clock."""
        if worker in self.clocks:
            self.clocks[worker] += 1
            self._slowest = None

    def ahead(self, worker: int) -> int:
        """How far a worker is before the slowest one, in steps."""
        if self._slowest is None:
            self._slowest = min(self.clocks.values())
        return self.clocks[worker] - self._slowest

    def may_read(self, worker: int, *, on_way: int = 0) -> bool:
        """on_way: gradients of the worker that are not applied yet."""
        return self.bound is None or self.ahead(worker) + on_way <= self.bound


@dataclass
class StalenessLimit:
    """Which gradient may be applied now, such that none will ever be staler than `most` updates?

    A worker that has read and not pushed is open, with the version that it read.  All open ones can still be applied in time
    if, in the order of their versions, the i-th (from 0) would have a staleness of at most `most` after i more updates.  A push
    that would break this waits; that of the oldest never does, so no two wait for each other.  So the open ones may push up to
    the first that cannot wait for one more update, and those behind it wait.
    """

    most: int | None = None
    version: int = 0
    open: dict[tuple[int, int], int] = field(default_factory=dict)
    """By worker and how often it has died, in the order of their versions."""
    _may: set[tuple[int, int]] | None = None
    """Who may push now, where it is known."""

    def may_read(self) -> bool:
        return self.most is None or len(self.open) <= self.most

    def read(self, key: tuple[int, int]) -> None:
        self.forget(key)
        self.open[key] = self.version

    def may_push(self, key: tuple[int, int]) -> bool:
        """Of an open one."""
        if self.most is None:
            return True
        if self._may is None:
            self._may = set(self._until_one_that_cannot_wait(self.most))
        return key in self._may

    def _until_one_that_cannot_wait(self, most: int) -> Iterator[tuple[int, int]]:
        """The open ones, the oldest first, up to the first that would be too old after an update before its turn."""
        for place, (key, version) in enumerate(self.open.items()):
            yield key
            if self.version + 1 + place - version > most:
                return

    def push(self, key: tuple[int, int]) -> None:
        self.version += 1
        self.forget(key)

    def forget(self, key: tuple[int, int]) -> None:
        """A worker that died or found nothing to do will not push."""
        self.open.pop(key, None)
        self._may = None


# ---------------------------------------------------------------------------------------------- the algorithm


@dataclass(frozen=True)
class ParameterServer:
    """Which kind of server, and how many.

    backup: workers whose gradients a synchronous step does not wait for.
    bound: how many steps a worker may be ahead of the slowest; 0 is synchronous.  A worker that is slow all the time slows
        down all, whatever the bound.
    max_staleness: how many updates may come between reading and update.  Workers wait only where a gradient would get too old,
        so one that is k times slower than n - 1 others slows down nobody from k (n - 1) on.
    servers: how many the parameters are divided over; of Hogwild: into how many blocks a worker reads and writes them.
    compression: of what workers push, each server's part by itself, with what it leaves out in the worker's next gradient.
    """

    descent: Descent = field(default_factory=Descent)
    kind: Literal["synchronous", "asynchronous", "hogwild"] = "asynchronous"
    servers: int = 1
    backup: int = 0
    bound: int | None = None
    max_staleness: int | None = None
    compensation: DelayCompensation | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        """ValueError: an option of another kind, or one below 0."""
        if self.kind not in ("synchronous", "asynchronous", "hogwild"):
            raise ValueError(f"a server of the kind {self.kind!r}; take synchronous, asynchronous or hogwild")
        if self.backup < 0 or (self.backup and self.kind != "synchronous"):
            raise ValueError(
                f"backup={self.backup} on a server of the kind {self.kind}: only a synchronous one has backup workers"
            )
        for name in ("bound", "max_staleness"):
            value = getattr(self, name)
            if value is not None and (value < 0 or self.kind != "asynchronous"):
                raise ValueError(
                    f"{name}={value} on a server of the kind {self.kind}: only an asynchronous one takes it, of 0 or more"
                )
        if self.bound is not None and self.max_staleness is not None:
            raise ValueError(f"bound={self.bound} and max_staleness={self.max_staleness} both say who waits; leave one out")
        if self.max_staleness is not None and self.servers > 1:
            raise ValueError(
                f"max_staleness={self.max_staleness} on {self.servers} servers: a worker that one lets read could wait for "
                "another, which waits for it; take servers=1, or bound"
            )
        if self.compensation is not None and self.kind != "asynchronous":
            raise ValueError(
                f"a server of the kind {self.kind} compensates no delay; leave compensation out, or take asynchronous"
            )
        if self.kind == "hogwild" and (self.descent.momentum or self.descent.kind != "sgd"):
            raise ValueError(
                "Hogwild subtracts a gradient times the learning rate from shared memory, and has no place for momentum or "
                "AdamW; take plain SGD, or a server"
            )
        if self.compression is not None:
            self._refuse_compression()

    def _refuse_compression(self) -> None:
        """ValueError: what is left of a gradient would be learned with, or compensated for, what it is not of."""
        if self.kind == "hogwild":
            raise ValueError("Hogwild's workers write to shared memory and send nothing; leave compression out")
        if self.backup:
            raise ValueError(
                f"backup={self.backup} drops late gradients, whose samples are learned from again while a part of them is left "
                "with the worker by compression; leave one out"
            )
        if self.compensation is not None:
            raise ValueError(
                "a compressed gradient has what was left of those before it, which are of other weights, so that its delay "
                "cannot be compensated; leave compensation or compression out"
            )

    def needed(self, workers: int) -> int:
        """How many gradients a synchronous step of so many workers waits for.  ValueError: all are backup."""
        if self.backup >= workers:
            raise ValueError(f"{self.backup} backup workers of {workers} leave none to wait for; take fewer")
        return workers - self.backup

    def parts_of(self, weights: Tensor) -> list[ServerPart]:
        """The servers at the start.  weights: (P,) all of them."""
        return [
            ServerPart(weights[part].clone(), DescentState(self.descent), self.compensation)
            for part in even_parts(weights.numel(), self.servers)
        ]


def joined(parts: Iterable[Tensor]) -> Tensor:
    """The parts of flat parameters as one tensor (P,)."""
    return torch.cat(list(parts))
