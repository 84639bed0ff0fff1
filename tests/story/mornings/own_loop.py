"""A first morning with a loop of one's own: samples, checkpoints and an exact evaluation, on the ranks that it is started on.

    torchrun --nproc-per-node 2 own_loop.py PLACE STEPS

It goes on from the newest checkpoint in PLACE, and rank 0 prints a line of JSON at the end.
"""

import json
import sys

import torch
from own_parts import Scans, build
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MulticlassAccuracy

import widefield as wf

BATCH, STEPS = 60, 60


def as_numbers(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = default_collate(samples)
    return images.double() / 255, labels


def main(place: str, last: int) -> None:
    mesh = wf.build_mesh()  # every rank is a copy of the model
    train, test = Scans(1, 2), Scans(0, 2)
    model = wf.parallelize(build().double(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    begun = wf.load(place, model=model, optimizer=optimizer, mesh=mesh)
    step, losses = (begun.step, begun.extra["losses"]) if begun else (0, [])
    batches = wf.sampler(train, mesh, batch_size=BATCH, seed=0)
    epoch_steps = batches.steps.per_epoch
    while step < last:
        batches.set_epoch(step // epoch_steps, start=step % epoch_steps)
        for images, labels in DataLoader(train, batch_sampler=batches, collate_fn=as_numbers):
            loss = F.cross_entropy(model(images), labels, reduction="sum") * batches.scale(step % epoch_steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses = [*losses, mesh.mean_(loss.detach().clone()).item()]
            step += 1
            if step == last:
                break
    wf.save(place, model=model, optimizer=optimizer, step=step, mesh=mesh, extra={"losses": losses})
    accuracy = MulticlassAccuracy(10, average="micro")
    found = wf.evaluate_exactly(model, test, {"accuracy": accuracy}, mesh, collate=as_numbers)
    if mesh.is_main:
        told = {"losses": losses, "accuracy": found.values["accuracy"], "images": found.images, "again": found.duplicates}
        print(json.dumps(told | {"mesh": str(mesh)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
