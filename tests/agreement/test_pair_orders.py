"""The whole protocol of averages in pairs, in random orders of messages and deaths: the log has the weights of the living."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from agreement.pair_world import World
from agreement.replicas_by_hand import ByHand
from command import DIGITS

from widefield.agreement import EventLog, replay
from widefield.agreement.sample_account import times_learned
from widefield.config import read_config

SMALL = [
    "precision=float64", "data.augment=[]", "data.batch_size=13", "batch_norm=averaged", "schedule.warmup=0step",
    "schedule.name=constant", "schedule.length=8step", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}",
    "model.name=agreement.nets:Plain", "model.options={}",
]  # fmt: skip


@pytest.fixture(scope="module")
def hand():
    return ByHand(read_config(DIGITS, SMALL), 1)


def assert_logged(world, folder, mean, steps):
    """The log has the mean of the living, and each sample of so many steps once."""
    log = EventLog.from_text((folder / "events.jsonl").read_text())
    found = replay(log, world.algorithm, world.objective).weights
    assert (found - mean).abs().max() <= 1e-12 * max(1.0, float(mean.abs().max()))
    times = times_learned(log)
    assert sum(times.values()) == 13 * steps and max(times.values()) == 1
    return log


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 8))])
def test_the_log_has_the_weights_of_the_living_whoever_dies(hand, tmp_path, seed):
    draw, died = random.Random(seed), Counter()
    for _ in range(75):
        workers = draw.randint(2, 6)
        world = World(draw, hand, tmp_path, workers=workers, deaths=draw.randint(0, workers - 1))
        mean = world.run([3, 5, 8])
        world.keeper.close()
        log = assert_logged(world, tmp_path, mean, 8)
        deaths = workers - len(world.living)
        assert deaths or sum(event.bytes for event in log.events if event.kind == "offer") == world.sent
        died[deaths] += 1
    assert len(died) > 3


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_run_goes_on_from_a_checkpoint_before_what_its_log_has(hand, tmp_path, seed):
    """With as many workers, more or fewer, after workers had died between checkpoint and end."""
    draw = random.Random(f"again {seed}")
    for _ in range(50):
        first = World(draw, hand, tmp_path, workers=draw.randint(2, 5), deaths=2)
        saved, counts = first.run([2, 4]), draw.choice([[], [5], [5, 6], [7]])
        first.run(counts)
        first.keeper.close()
        world = World(draw, hand, tmp_path, workers=draw.randint(1, 5), deaths=1, step=4, start=saved)
        mean = world.run([6, 8])
        world.keeper.close()
        assert_logged(world, tmp_path, mean, 8)
