"""What do the guards cost?  Steps with and without a look at the gradient's norm, and with a comparison of the replicas.

    python benchmarks/guards.py --save

One learner takes steps on one batch, in turns: without a guard of the gradient, with it, and with a comparison of all weights,
buffers and optimizer states after every step.  `guard.checksum_every=k` costs a k-th of the last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import turns

from widefield.comm.mesh import join, leave
from widefield.config import GuardConfig, parse_config
from widefield.data import Dataset
from widefield.launchers import world_from
from widefield.plans import plan_of
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.checksums import Checksums
from widefield.training.guard import Guard
from widefield.training.loop import Learner

RESULT = Path(__file__).parent / "results" / "guards.json"
EVERY = (10, 100)
MEAN, STD = [0.5] * 3, [0.25] * 3


class Noise:
    """Images that are all drawn alike, so that reading takes no time."""

    def __init__(self, samples: int, side: int) -> None:
        self.image = torch.randint(256, (3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 10

    def name_of(self, index: int) -> str:
        return str(index)


def stepping(learner: Learner, batches: list, guard: Guard, sums: Checksums | None, spent: list[float]) -> Iterator[None]:
    """spent: gets the processor's seconds of each comparison on this rank."""
    while True:
        learner.guard = guard
        learner.learn(batches, stop=False)
        if sums is not None:
            began = time.process_time()
            assert not sums.differences(learner.model, learner.optimizer, None)
            spent.append(time.process_time() - began)
        yield


def on_rank(options: argparse.Namespace) -> None:
    world = world_from(os.environ)
    config = parse_config(
        f"model: {{name: torchvision/resnet18}}\ndata: {{name: digits, batch_size: {options.batch * world.size}, workers: 0}}\n"
        "optimizer: {name: adamw, lr: 1.0e-6}\nschedule: {name: constant, length: 100000step}\nprecision: float32\n"
    )
    mesh = join(world, plan_of(config, world.size))
    images = Noise(options.batch * world.size, options.side)
    parts = assemble(config, mesh, Dataset(images, images, [str(i) for i in range(10)], 3, MEAN, STD, in_memory=True))
    learner, _ = learner_of(parts)
    batches = [next(training_batches(parts, first=0, last=1))]
    bare, looking = Guard(GuardConfig(gradient=False)), Guard(GuardConfig(spike="stop", window=1000))
    spent: list[float] = []
    loops = {
        "without": stepping(learner, batches, bare, None, []),
        "gradient": stepping(learner, batches, looking, None, []),
        "checksums": stepping(learner, batches, bare, Checksums(mesh, has_same_buffers=True), spent),
    }
    times = turns.in_turns(loops, options, mesh.device)
    if mesh.is_main:
        about = turns.conditions(mesh, options, model="torchvision resnet18, AdamW", **{"batch per rank": options.batch})
        result = {"question": "what guards add to a step", "conditions": about}
        for name in ("gradient", "checksums"):
            result[name] = turns.compared(times, name, "without", options.steps)
        step = result["checksums"]["processor"]["seconds per step, without"] / mesh.size
        result["one comparison, processor's seconds of a rank"] = round(statistics.median(spent), 4)
        result["share of a step, by checksum_every"] = {str(k): round(statistics.median(spent) / step / k, 5) for k in EVERY}
        result["load of the machine at the end"] = round(os.getloadavg()[0], 1)
        turns.tell(result, RESULT, options)
    leave(mesh)


if __name__ == "__main__":
    sys.exit(turns.command(on_rank, RESULT, about=__doc__, ranks=2, batch=8, side=64, steps=4, pairs=8))
