"""The learning rate as a pure function of the samples seen.

So neither the number of ranks nor accumulation changes it, and a resumed run needs no state.  Every curve is a factor of the
peak learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from widefield.config import ScheduleConfig
from widefield.naming import did_you_mean
from widefield.own_code import code_named, is_code

Curve = Callable[["Schedule", float, int], float]
"""(schedule, share of the samples after the warm-up, samples seen) -> factor of the peak learning rate."""


@dataclass(frozen=True)
class Schedule:
    """A curve and its lengths in samples: `total` of training, `warmup` of them linear, `every` between drops of `step`."""

    config: ScheduleConfig
    total: int
    warmup: int
    every: int
    curve: Curve

    def factor(self, samples: int) -> float:
        """The learning rate after `samples` samples / the peak learning rate.  ValueError: a user's curve gives no factor."""
        if samples < self.warmup:
            start = self.config.warmup_from
            return start + (1 - start) * samples / self.warmup
        share = min(1.0, (samples - self.warmup) / max(1, self.total - self.warmup))
        factor = self.curve(self, share, samples)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ValueError(
                f"schedule.name={self.config.name} gives {factor!r} after {samples} samples, as a factor of the peak learning "
                "rate; a number from 0 is wanted"
            )
        return float(factor)


def build_schedule(config: ScheduleConfig, *, seen: Callable[[int], int], steps_per_epoch: int) -> Schedule:
    """The schedule of a config.  seen(step): the samples consumed before a step.

    ValueError: no such curve, a run of no steps, a warm-up longer than the run, `step` without `every`, `onecycle` without a
    warm-up, a user's own curve that gives no factors.
    """
    curve = _curve(config.name)
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
    schedule = Schedule(config, seen(length), seen(warmup), seen(every), curve)
    for samples in (schedule.warmup, (schedule.warmup + schedule.total) // 2, schedule.total):
        schedule.factor(samples)  # to refuse a user's curve now and not in mid-run
    return schedule


def known_schedules() -> list[str]:
    """The names that schedule.name can have."""
    return [*_CURVES, "package.module:callable"]


def _curve(name: str) -> Curve:
    if is_code(name):
        return code_named(name, key="schedule.name")
    if name not in _CURVES:
        raise ValueError(
            f"there is no schedule '{name}'{did_you_mean(name, _CURVES)} It can be: {', '.join(_CURVES)}, or "
            "package.module:callable"
        )
    return _CURVES[name]


def _cosine(schedule: Schedule, share: float, samples: int) -> float:
    """Loshchilov and Hutter 2017, arXiv:1608.03983, one period."""
    final = schedule.config.final
    return final + (1 - final) * (1 + math.cos(math.pi * share)) / 2


def _step(schedule: Schedule, share: float, samples: int) -> float:
    return schedule.config.gamma ** (samples // schedule.every)


def _polynomial(schedule: Schedule, share: float, samples: int) -> float:
    final = schedule.config.final
    return final + (1 - final) * (1 - share) ** schedule.config.power


_CURVES: dict[str, Curve] = {
    "constant": lambda schedule, share, samples: 1.0,
    "cosine": _cosine,
    "step": _step,
    "polynomial": _polynomial,
    "onecycle": _cosine,  # linear up over the warm-up, cosine down (Smith 2018, arXiv:1803.09820, as torch draws it)
}
