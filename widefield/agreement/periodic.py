"""Workers train by themselves and average their weights now and then: local SGD and what was made of it.

    local SGD        the mean of the weights every `period` steps                     Stich 2019, arXiv:1805.09767
    post-local SGD   every step at first, every `period` later                        Lin et al. 2020, arXiv:1808.07217
    hierarchical     within groups more often than among all                          the same paper
    SlowMo           momentum over the means: x' = x - a r u, u = b u + (x - mean) / rWang et al. 2020, arXiv:1910.00643
    DiLoCo           an outer optimizer, whose gradient is x - mean                   Douillard et al. 2023, arXiv:2311.08105

x are the weights that all agreed on last, r is the workers' learning rate.  A mean counts each worker as often as it had
samples since all last averaged, as in federated averaging (McMahan et al. 2017, arXiv:1602.05629); with equal batches that is
the plain mean.
Momentum of the workers' own optimizers stays with them, unless `keeps_state` is False.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from widefield.agreement.descent import Descent, DescentState


@dataclass(frozen=True)
class SlowMomentum:
    """Options of SlowMo.  rate: a, 1 in the paper; momentum: b, 0.4 to 0.8 there."""

    rate: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or self.rate <= 0:
            raise ValueError(
                f"SlowMo with momentum {self.momentum} and rate {self.rate} goes nowhere; take a momentum from 0 to below 1 "
                "and a rate above 0"
            )


def slow_momentum_step(
    agreed: Tensor, mean: Tensor, velocity: Tensor | None, options: SlowMomentum, lr: float
) -> tuple[Tensor, Tensor]:
    """(new weights, new velocity) of SlowMo.

    agreed: the weights before the period.  mean: of the workers' weights after it.  velocity: None at first.
    lr: the workers' learning rate, above 0, by which velocities of periods with different rates are comparable.
    """
    if lr <= 0:
        raise ValueError(f"SlowMo divides by the workers' learning rate, which is {lr}; let the schedule end above 0")
    moved = (agreed - mean) / lr
    velocity = moved if velocity is None else options.momentum * velocity + moved
    return agreed - options.rate * lr * velocity, velocity


def outer_step(agreed: Tensor, mean: Tensor, state: DescentState, rate: float) -> Tensor:
    """The new weights of DiLoCo: a step of the outer optimizer from those agreed on, along `agreed - mean`."""
    return state.step(agreed, agreed - mean, rate)


@dataclass(frozen=True)
class PeriodicAveraging:
    """When workers average, over whom, and what is done with the mean; see local_sgd, slowmo and diloco.

    period: steps between averages over all.  start: so many steps at first are each followed by a plain average over all.
    groups: pairs (period, size): every so many steps, groups of so many workers average among themselves; where several
        periods end with one step, the longest counts.
    outer: what is done with the average over all; None: the workers take it.
    """

    descent: Descent = field(default_factory=Descent)
    period: int = 8
    start: int = 0
    groups: tuple[tuple[int, int], ...] = ()
    outer: Descent | SlowMomentum | None = None
    keeps_state: bool = True

    def __post_init__(self) -> None:
        """ValueError: a period that never ends, or groups that average no more often than all do."""
        if self.period < 1 or self.start < 0:
            raise ValueError(f"a period of {self.period} steps after {self.start}; take a period of 1 or more after 0 or more")
        for period, size in self.groups:
            if not (1 <= period < self.period and size > 1):
                raise ValueError(
                    f"groups of {size} workers that average every {period} steps, where all do every {self.period}; take "
                    "groups of 2 or more and a shorter period"
                )

    def averages_after(self, step: int, workers: int) -> int:
        """How many workers average among themselves after a step, counted from 1; 1 where nobody does.

        >>> hierarchical(8, ((2, 4),)).averages_after(6, workers=16)
        4
        """
        since = step - self.start
        if since <= 0 or since % self.period == 0:
            return workers
        return max(((period, min(size, workers)) for period, size in self.groups if since % period == 0), default=(0, 1))[1]

    def has_outer_step(self, step: int) -> bool:
        """Whether the average over all after this step is that of a period, to which `outer` applies."""
        return self.outer is not None and step > self.start and (step - self.start) % self.period == 0


def local_sgd(period: int, descent: Descent | None = None) -> PeriodicAveraging:
    """The mean of the weights every `period` steps."""
    return PeriodicAveraging(descent or Descent(), period)


def post_local_sgd(period: int, start: int, descent: Descent | None = None) -> PeriodicAveraging:
    """An average after each of the first `start` steps, then every `period` steps."""
    return PeriodicAveraging(descent or Descent(), period, start=start)


def hierarchical(period: int, groups: tuple[tuple[int, int], ...], descent: Descent | None = None) -> PeriodicAveraging:
    """All average every `period` steps, groups of neighbours more often."""
    return PeriodicAveraging(descent or Descent(), period, groups=groups)


def slowmo(period: int, descent: Descent | None = None, *, rate: float = 1.0, momentum: float = 0.5) -> PeriodicAveraging:
    """Momentum over the means of local SGD."""
    return PeriodicAveraging(descent or Descent(), period, outer=SlowMomentum(rate, momentum))


def diloco(period: int, descent: Descent | None = None, outer: Descent | None = None) -> PeriodicAveraging:
    """An outer optimizer over the means; without options as in the paper: AdamW inside, Nesterov 0.9 at 0.7 outside."""
    inner = descent or Descent(lr=1e-3, kind="adamw", weight_decay=0.1)
    return PeriodicAveraging(inner, period, outer=outer or Descent(lr=0.7, momentum=0.9, nesterov=True))
