"""Images per second of widefield's training step beside a plain loop: ResNet-50, bfloat16, channels_last, torch.compile.

Both train the same weights on the same uint8 images, which lie on the device already, in one process, in turns (turns.py).

  by hand      autocast, cross entropy, fused SGD with momentum, loss.item() every 10 steps
  widefield    Learner.learn: the learning rate of the schedule, the loss of every step, the NaN check, the chain of samples

With --small a batch of two small images, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import turns
from rows import Row, row_of
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.comm.mesh import World, join
from widefield.config import RunConfig, parse_config
from widefield.data import Dataset
from widefield.data.batch import Batch
from widefield.plans import Plan
from widefield.training.assemble import Parts, assemble, learner_of, training_batches
from widefield.training.loop import Learner

LARGE = {"batch": 256, "side": 224, "steps": 10, "pairs": 9, "compile": True}
SMALL = {"batch": 2, "side": 32, "steps": 1, "pairs": 3, "compile": False}
CLASSES = 1000
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
AGREE = 0.02
"""How far the first losses may be apart, as a share: some roundings to bfloat16, of 2**-8 each."""


@dataclass(frozen=True)
class Noise:
    """Images drawn at random, in memory."""

    images: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % CLASSES

    def name_of(self, index: int) -> str:
        return f"image {index}"


def rows(device: torch.device, *, small: bool, until: float) -> Iterator[Row]:
    sizes = argparse.Namespace(**(SMALL if small else LARGE))
    parts = parts_of(sizes, device)
    model = copy.deepcopy(parts.model)
    learner, _ = learner_of(parts)
    batch = next(training_batches(parts, first=0, last=1, dummy_batch=learner.dummy_batch))
    batch = replace(batch, image=batch.image.to(device), target=batch.target.to(device))
    if sizes.compile:
        model.compile()
    loops = {"by hand": by_hand(model, batch, parts), "widefield": ours(learner, batch)}
    check_alike(*(next(loop) for loop in loops.values()))
    times = turns.in_turns(loops, sizes, device, until=until)
    images = sizes.batch * sizes.steps
    walls = {name: [wall for wall, _ in each] for name, each in times.items()}
    for name, each in walls.items():
        yield row_of(f"{name}, ResNet-50", [images / wall for wall in each], "images/s")
    ratios = [theirs / mine for theirs, mine in zip(walls["by hand"], walls["widefield"], strict=True)]
    yield row_of("widefield's images/s over those by hand", ratios, "times", note=in_words(sizes, parts))


def parts_of(sizes: argparse.Namespace, device: torch.device) -> Parts:
    draw = torch.Generator().manual_seed(0)
    images = Noise(torch.randint(256, (sizes.batch, 3, sizes.side, sizes.side), dtype=torch.uint8, generator=draw))
    dataset = Dataset(images, images, [str(n) for n in range(CLASSES)], 3, MEAN, STD, in_memory=True)
    return assemble(config_of(sizes), join(World(), Plan(), device=device), dataset)


def config_of(sizes: argparse.Namespace) -> RunConfig:
    return parse_config(
        f"model: {{name: torchvision/resnet50, compile: {str(sizes.compile).lower()}, channels_last: true}}\n"
        f"data: {{name: digits, batch_size: {sizes.batch}}}\noptimizer: {{lr: 1.0e-3}}\n"
        "schedule: {name: constant, length: 100000step}\nprecision: bfloat16\n"
    )


def by_hand(model: nn.Module, batch: Batch, parts: Parts) -> Iterator[float | None]:
    """One step per `next`, as one would write it; gives the loss of every tenth step."""
    device = parts.mesh.device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    step = 0
    while True:
        image = ((batch.image.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = model(image)
        loss = F.cross_entropy(output.float(), batch.target)
        loss.backward()
        optimizer.step()
        yield loss.item() if step % 10 == 0 else None
        step += 1


def ours(learner: Learner, batch: Batch) -> Iterator[float]:
    while True:
        yield learner.learn([batch], stop=False)[0]


def check_alike(by_hand: float | None, widefield: float | None) -> None:
    """RuntimeError where the two loops do not train the same: then a comparison of their speed says nothing."""
    if by_hand is None or widefield is None or not abs(widefield - by_hand) <= AGREE * abs(by_hand):
        raise RuntimeError(
            f"the first loss is {by_hand} by hand and {widefield} by widefield, more than {AGREE:.0%} apart, so the two train "
            "otherwise; see which weights and images each has"
        )


def in_words(sizes: argparse.Namespace, parts: Parts) -> str:
    how = "torch.compile" if sizes.compile else "not compiled"
    order = "channels_last" if parts.channels_last else "row-major"
    return f"{parts.arithmetic.precision}, {order}, {how}, batch {sizes.batch} of {sizes.side} x {sizes.side} px"
