"""How much of a hand-written DDP loop's speed does `widefield train` give?  ResNet-18, 2 ranks, the same images.

Both loops train the same network on the same images, in the same processes, in turns (turns.py).

  by hand         DistributedDataParallel as PyTorch's tutorial has it, gradient_as_bucket_view, fused SGD, a DataLoader
                  over the uint8 images, loss.item() every 10 steps
  widefield       the loop of run.py: the order of samples, global loss every step, the NaN check, the record on disk
  synchronized    the same with BatchNorm synchronized, which the loop by hand does not do: the price of exactness

    python benchmarks/data_parallel.py [--ranks 2] [--batch 32] [--side 64] [--steps 4] [--pairs 8]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
import turns
from sklearn.datasets import load_sample_images
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from widefield.comm.mesh import join, leave
from widefield.config import parse_config
from widefield.data import Dataset
from widefield.launchers import world_from
from widefield.plans import plan_of
from widefield.training.abandon import Abandonable
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.checkpoint import Checkpoints
from widefield.training.guarding import Guarding
from widefield.training.interrupt import Interrupt
from widefield.training.passes import Passes
from widefield.training.record import Record
from widefield.training.trainer import Trainer

RESULT = Path(__file__).parent / "results" / "data_parallel.json"
CLASSES = 10
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass(frozen=True)
class Pieces:
    """Squares cut out of scikit-learn's two photographs, in memory."""

    images: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % CLASSES

    def name_of(self, index: int) -> str:
        return f"piece {index}"


def pieces(count: int, side: int) -> Pieces:
    photo = torch.from_numpy(load_sample_images().images[0].copy()).permute(2, 0, 1)
    draw = torch.Generator().manual_seed(0)
    corners = torch.randint(0, min(photo.shape[1:]) - side, (count, 2), generator=draw).tolist()
    return Pieces(torch.stack([photo[:, top : top + side, left : left + side] for top, left in corners]))


def by_hand(images: Pieces, options: argparse.Namespace, device: torch.device) -> Iterator[None]:
    """One step per `next`, as one would write it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torchvision.models.resnet18(num_classes=CLASSES).to(device), gradient_as_bucket_view=True, static_graph=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    targets = torch.arange(len(images)) % CLASSES
    own = slice(rank, None, ranks)
    dataset = TensorDataset(images.images[own], targets[own])
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    step = 0
    while True:
        for image, target in DataLoader(dataset, batch_size=options.batch, shuffle=True, drop_last=True):
            image = (image.to(device).float() / 255 - mean) / std
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(image), target.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                loss.item()
            yield


def ours(images: Pieces, options: argparse.Namespace, mesh, folder: Path, batch_norm: str) -> Iterator[None]:
    """One step per `next`, by widefield's own loop."""
    config = parse_config(
        f"model: {{name: torchvision/resnet18}}\ndata: {{name: digits, batch_size: {options.batch * mesh.size}}}\n"
        f"optimizer: {{lr: 1.0e-3}}\nschedule: {{name: constant, length: 100000step}}\nprecision: float32\n"
        f"batch_norm: {batch_norm}\nlog: {{tensorboard: true}}\n"
    )
    mesh = type(mesh)(**(vars(mesh) | {"plan": plan_of(config, mesh.size)}))
    dataset = Dataset(images, images, [str(i) for i in range(CLASSES)], 3, MEAN, STD, in_memory=True)
    parts = assemble(config, mesh, dataset)
    learner, _ = learner_of(parts)
    passes = Passes(training_batches(parts, first=0, last=100000), 1)
    record = None
    if mesh.is_main:
        record = Record.open(folder / batch_norm, log=config.log, stream=open(os.devnull, "w"))
        record.start(plan="", reasons=[], ranks=mesh.size, steps=100000, samples_per_epoch=len(images), parameters=0)
    checkpoints = Checkpoints(folder / "checkpoints", mesh, keep_last=1, keep_best=0, warn=print)
    batches_from = partial(training_batches, parts, last=100000)
    guarding = Guarding(learner, folder, checkpoints, record, images, lambda step: batches_from(first=step))
    trainer = Trainer(config, folder, parts, learner, checkpoints, record, 100000, [], guarding)
    trainer.abandonable = Abandonable(learner, Interrupt(watch_parent=False), passes=1)
    while True:
        trainer.step(passes, stop=False)
        yield


def on_rank(options: argparse.Namespace) -> None:
    world = world_from(os.environ)
    config = parse_config("model: {name: resnet}\ndata: {name: digits}\nbatch_norm: broadcast\n")
    mesh = join(world, plan_of(config, world.size))
    images = pieces(64 * options.batch, options.side)
    with tempfile.TemporaryDirectory() as place:
        loops = {
            "by hand": by_hand(images, options, mesh.device),
            "widefield": ours(images, options, mesh, Path(place), "broadcast"),
            "synchronized": ours(images, options, mesh, Path(place), "synchronized"),
        }
        times = turns.in_turns(loops, options, mesh.device)
    if mesh.is_main:
        about = turns.conditions(mesh, options, model="torchvision resnet18", **{"batch per rank": options.batch})
        result = {"question": "seconds of a step of widefield's loop over a hand-written DDP loop's", "conditions": about}
        for name in ("widefield", "synchronized"):
            result[name] = turns.compared(times, name, "by hand", options.steps)
        turns.tell(result, RESULT, options)
    leave(mesh)


if __name__ == "__main__":
    sys.exit(turns.command(on_rank, RESULT, about=__doc__, ranks=2, batch=32, side=64, steps=4, pairs=8))
