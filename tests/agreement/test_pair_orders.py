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


@pytest.mark.parametrize("seed", range(4))
def test_the_log_has_the_weights_of_the_living_whoever_dies(hand, tmp_path, seed):
    draw, died = random.Random(seed), Counter()
    for number in range(100):
        workers = draw.randint(2, 6)
        (tmp_path / f"{number}").mkdir()
        world = World(draw, hand, tmp_path / f"{number}", workers=workers, deaths=draw.randint(0, workers - 1))
        mean = world.run([3, 5, 8])
        log = EventLog.from_text((tmp_path / f"{number}" / "events.jsonl").read_text())
        found = replay(log, world.algorithm, world.objective).weights
        assert (found - mean).abs().max() <= 1e-12 * max(1.0, float(mean.abs().max())), number
        times = times_learned(log)
        assert sum(times.values()) == 13 * 8 and max(times.values()) == 1, number
        died[workers - len(world.living)] += 1
    assert len(died) > 3
