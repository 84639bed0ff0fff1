"""The plans that programs run under: tiles in one to three dims, in space and in time, copies, shards, channels, stages."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from widefield.plans import Plan

from .program import Program

SPACE = {
    1: ([2], [3], [4], [2], [3]),
    2: ([2, 1], [1, 2], [2, 2], [3, 1], [1, 3], [2, 2], [4, 1]),
    3: ([2, 1, 1], [1, 2, 1], [1, 1, 2], [2, 2, 1], [1, 2, 2], [3, 1, 1], [1, 1, 3], [2, 1, 2]),
}
SMALL_SPACE = {1: ([2],), 2: ([2, 1], [1, 2]), 3: ([2, 1, 1], [1, 2, 1], [1, 1, 2])}
TILES = {1: ([2], [3]), 2: ([2, 2], [3, 1], [1, 4], [2, 3]), 3: ([2, 2, 1], [1, 2, 2], [3, 1, 1])}


STEPS = ("rounding_mode", "floor", "ceil", "round", "trunc", "sign(", "heaviside", "fmod", "remainder", "//", " % ")
"""Operations whose results do not change with what is a little different."""


@dataclass(frozen=True)
class Layout:
    """A plan, where its tiles end (None: evenly), whether a trial pass comes before training, and whether sizes count as large.

    as_if_large: see sizes.py.
    """

    plan: Plan
    cuts: tuple[tuple[int, ...], ...] | None = None
    rehearsed: bool = False
    as_if_large: bool = False

    def __str__(self) -> str:
        cuts = f", cut at {[list(c) for c in self.cuts]}" if self.cuts else ""
        return f"{self.plan}{cuts}{', rehearsed' * self.rehearsed}{', as if large' * self.as_if_large}"


def zero(rng: random.Random) -> dict:
    return {"shard": 2, "sharding": {"zero": rng.choice([1, 2, 3, 3])}}


def stream(rng: random.Random, dims: int) -> dict:
    return {"stream": {"tiles": rng.choice(TILES[dims]), "keep": rng.choice(["device", "host", "file"])}}


def stages(rng: random.Random) -> dict:
    schedule = rng.choice(["gpipe", "1f1b", "1f1b", "interleaved", "zero_bubble"])
    pipeline = {"schedule": schedule, "micro_batches": rng.choice([None, None, 1, 2, 3])}
    return {"stage": rng.choice([2, 2, 3]), "pipeline": pipeline}


def draw_layout(rng: random.Random, program: Program) -> Layout:
    """A layout that this program can be compared under."""
    dims = len(program.shape) - 2
    small = rng.choice(SMALL_SPACE[dims])
    kinds = [
        (30, {"space": rng.choice(SPACE[dims])}),
        (12, stream(rng, dims)),
        (5, {"space": small} | stream(rng, dims)),
        (6, {"channel": rng.choice([2, 2, 3])}),
        (2, {"space": small, "channel": 2}),
        (1, {"recompute": {"keep": rng.choice(["nothing", "convolutions"])}}),
        (0.5, {"space": small, "recompute": {}}),
        (2, {"stream": {"memory": f"{rng.randint(8, 60)}KiB", "keep": rng.choice([None, "host"])}}),
    ]
    kinds += [
        (10, {"replicate": rng.choice([2, 2, 3])}),
        (6, {"replicate": 2, "space": small}),
        (8, zero(rng)),
        (3, zero(rng) | {"space": small}),
        (2, {"replicate": 2} | stream(rng, dims)),
        (1, {"replicate": 2, "channel": 2}),
        (1, zero(rng) | {"replicate": 2}),
        (1, zero(rng) | stream(rng, dims)),
        (4, stages(rng)),
        (0.5, {"replicate": 2, "recompute": {}}),
        (0.5, zero(rng) | {"recompute": {}}),
        (0.5, {"stage": 2, "channel": 2}),
        (1, {"stage": 2, "space": small}),
        (1, {"replicate": 2, "stage": 2}),
    ]
    weights, plans = [weight for weight, _ in kinds], [Plan(**axes) for _, axes in kinds]
    plan = rng.choices(plans, [weight * can_run(program, plan) for weight, plan in zip(weights, plans, strict=True)])[0]
    cut_sizes = program.shape[len(program.shape) - len(plan.space) :]
    cuts = tuple(tuple(cut(rng, size, ways)) for size, ways in zip(cut_sizes, plan.space, strict=True))
    laid = Layout(plan, cuts if plan.space and rng.random() < 0.6 else None, rng.random() < 0.15 and plan.stage == 1)
    if rng.random() < 0.6:
        return laid
    in_buckets = plan.model_copy(update={"bucket_mib": 1e-4}) if plan.replicate * plan.shard > 1 else plan
    return replace(laid, plan=in_buckets, as_if_large=True)


def can_run(program: Program, plan: Plan) -> bool:
    """Whether what the program does has a meaning under a plan, so that its numbers can be compared."""
    copies, habit = plan.replicate * plan.shard, program.habit
    if copies > 1 and (None in program.per_sample or program.shape[0] < copies):
        return False  # copies share the batch: what each output says of samples is known, and there are enough of these
    if copies > 1 and any(word in program.text() for word in STEPS):
        return False  # where samples meet in the size of a step, the first forward of copies may not see that they do
    if copies > 1 and re.search(r"wf_whole\((v\d+|x)\)", program.text()):
        return False  # it gives all samples of copies that share a batch
    if habit.evaluates and copies * plan.stage > 1:
        return False  # where each copy has its own samples and each stage its own part
    if habit.penalty and copies > 1 and not all(program.per_sample):
        return False  # a slope of what all samples give counts as often as there are copies
    if habit.penalty and plan.shard > 1 and plan.sharding.zero > 1:
        return False  # units of layers take gradients once
    if plan.stage > 1:  # whose loss is a sum over samples, and whose images learn nothing
        once = habit.forwards == habit.backwards == 1 and not habit.penalty
        return once and all(program.per_sample) and "use_reentrant=True" not in program.text()
    return True


def cut(rng: random.Random, size: int, ways: int) -> Sequence[int]:
    """Where tiles end, of which few are empty."""
    return [0, *sorted(rng.randint(0 if rng.random() < 0.2 else min(1, size), size) for _ in range(ways - 1)), size]
