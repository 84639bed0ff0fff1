"""What accuracy do replicas that step apart reach, beside data-parallel training with equal samples?  Digits, several seeds.

Each setting trains the digits recipe on the same ranks, from the same weights and in the same order of samples, with
batch_norm=averaged, and is evaluated as a run is: the mean of the replicas on all held-out images.  Told is the difference in
top-1 from data-parallel training, in points, with the interval of the mean over seeds at 95 % (Student's t).

    python benchmarks/agreement.py [--ranks 4] [--seeds 5] [--epochs 20] [--only local_sgd,gossip] [--save]
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import turns

from widefield.comm.mesh import join, leave
from widefield.config import read_config
from widefield.launchers import world_from
from widefield.plans import plan_of
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches

RESULT = Path(__file__).parent / "results" / "agreement.json"
BASE = "data parallel"
SETTINGS = {
    BASE: [],
    "local_sgd": ["agreement={name: local_sgd, period: 8}"],
    "post_local_sgd": ["agreement={name: post_local_sgd, period: 8, start: 46}"],
    "slowmo": ["agreement={name: slowmo, period: 8}"],
    "gossip": ["agreement=gossip"],
    "gossip on a ring": ["agreement={name: gossip, graph: ring}"],
}  # fmt: skip
GATES = {"local_sgd": 0.5, "slowmo": 0.5, "gossip": 1.2, "gossip on a ring": 1.2}
"""Points that the mean may be below data-parallel training."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5th percentile of Student's t, by the number of seeds."""


def trained(settings: list[str], seed: int, options: argparse.Namespace) -> float:
    """The top-1 in percent, on every rank."""
    given = ["batch_norm=averaged", f"schedule.length={options.epochs}ep", "data.workers=0", f"seed={seed}"]
    config = read_config("digits", [*given, *settings])
    world = world_from(os.environ)
    mesh = join(world, plan_of(config, world.size))
    parts = assemble(config, mesh)
    learner, _ = learner_of(parts)
    last = config.schedule.length.in_steps(learner.steps.per_epoch)
    batches = training_batches(parts, first=0, last=last)
    for _ in range(last):
        learner.learn([next(batches)], stop=False)
    with learner.consensus():
        found = evaluate_parts(parts, learner.model)
    leave(mesh)
    return found.metrics["top1"]


def on_rank(options: argparse.Namespace) -> None:
    names = options.only.split(",") if options.only else list(SETTINGS)
    reached: dict[str, list[float]] = {}
    for name in dict.fromkeys([BASE, *names]):
        reached[name] = [trained(SETTINGS[name], seed, options) for seed in range(options.seeds)]
        if os.environ["RANK"] == "0":
            print(name, [round(one, 2) for one in reached[name]], flush=True)
    if os.environ["RANK"] == "0":
        turns.tell(_result(reached, options), RESULT, options)


def _result(reached: dict[str, list[float]], options: argparse.Namespace) -> dict:
    rows = []
    for name, tops in reached.items():
        below = [one - base for one, base in zip(tops, reached[BASE], strict=True)]
        mean = statistics.mean(below)
        half = (
            STUDENT.get(len(below), math.nan) * statistics.stdev(below) / math.sqrt(len(below)) if len(below) > 1 else math.nan
        )
        rows.append(
            {
                "agreement": name, "top-1 of seeds, %": [round(one, 2) for one in tops],
                "points over data parallel": round(mean, 2), "95 % interval, +-": round(half, 2), "gate": GATES.get(name),
            }
        )  # fmt: skip
    conditions = {
        "recipe": "digits", "epochs": options.epochs, "replicas": options.ranks, "held out": 360, "precision": "float32",
        "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    return {"rows": rows, "conditions": conditions}


if __name__ == "__main__":
    sys.exit(turns.command(on_rank, RESULT, about=__doc__, only="settings", ranks=4, seeds=5, epochs=20))
