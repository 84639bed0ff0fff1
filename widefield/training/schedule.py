"""The learning rate at a moment of training, as a pure function of the samples seen.

Counted in samples, so that neither the number of ranks nor accumulation changes it, and a resumed run needs no state.
Every curve is a factor of the peak learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from widefield.config import ScheduleConfig
from widefield.naming import did_you_mean


@dataclass(frozen=True)
class Schedule:
    """`total` samples of training, `warmup` of them rising; `every` samples between drops of `step`."""

    config: ScheduleConfig
    total: int
    warmup: int
    every: int

    def factor(self, samples: int) -> float:
        """The learning rate after `samples` samples, as a share of the peak."""
        if samples < self.warmup:
            start = self.config.warmup_from
            return start + (1 - start) * samples / self.warmup
        share = min(1.0, (samples - self.warmup) / max(1, self.total - self.warmup))
        return _CURVES[self.config.name](self, share, samples)


def build_schedule(config: ScheduleConfig, *, seen: Callable[[int], int], steps_per_epoch: int) -> Schedule:
    """The schedule of a config; `seen(step)` is the samples consumed before a step.

    ValueError: no such curve, a run of nothing, a warm-up longer than the run, `step` without `every`, `onecycle`
    without a warm-up.
    """
    if config.name not in _CURVES:
        hint = did_you_mean(config.name, _CURVES)
        raise ValueError(f"there is no schedule '{config.name}'{hint} It can be: {', '.join(_CURVES)}")
    length, warmup = config.length.in_steps(steps_per_epoch), config.warmup.in_steps(steps_per_epoch)
    if length < 1:
        raise ValueError(f"schedule.length is {config.length}, so there is nothing to train; write 1step or more")
    if warmup > length:
        raise ValueError(
            f"schedule.warmup is {config.warmup} ({warmup} steps), longer than schedule.length, "
            f"{config.length} ({length} steps); shorten it"
        )
    if config.name == "step" and config.every is None:
        raise ValueError("schedule.name=step drops the learning rate every so often; add schedule.every, as 30ep")
    if config.name == "onecycle" and warmup == 0:
        raise ValueError("schedule.name=onecycle rises and then falls; add schedule.warmup, as a third of schedule.length")
    every = config.every.in_steps(steps_per_epoch) if config.every is not None else length
    return Schedule(config, seen(length), seen(warmup), seen(every))


def _cosine(schedule: Schedule, share: float, samples: int) -> float:
    """Loshchilov and Hutter 2017, arXiv:1608.03983, one period."""
    final = schedule.config.final
    return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2


def _step(schedule: Schedule, share: float, samples: int) -> float:
    return schedule.config.gamma ** (samples // schedule.every)


def _polynomial(schedule: Schedule, share: float, samples: int) -> float:
    final = schedule.config.final
    return final + (1 - final) * (1 - share) ** schedule.config.power


_CURVES: dict[str, Callable[[Schedule, float, int], float]] = {
    "constant": lambda schedule, share, samples: 1.0,
    "cosine": _cosine,
    "step": _step,
    "polynomial": _polynomial,
    "onecycle": _cosine,  # linear up over the warm-up, cosine down (Smith 2018, arXiv:1803.09820, as torch draws it)
}
