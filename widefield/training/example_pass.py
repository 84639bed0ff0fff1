"""A pass before there is one: a step that is tried, shapes for a capture, inputs for a stream's first program."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from widefield.fallback import Fallback
from widefield.tasks import is_per_pixel, labels_of, scale_of
from widefield.training.loop import Learner
from widefield.training.running_means import RunningMeans
from widefield.training.turns import Turn, learning, loss_of_turn


def trial_step(learner: Learner, model: nn.Module | None = None, *, member: str = "") -> Tensor:
    """The mean loss on a batch of one image twice: the `trial_step` of `parallelize`.  model: in place of the learner's.

    member: of a model whose modules learn by turns, the one whose loss it is.
    """
    image, target = (torch.cat([one, one]) for one in learner.prepared(learner.dummy_batch))
    model, twice = learner.model if model is None else model, replace(learner.dummy_batch, seeds=learner.dummy_batch.seeds * 2)
    if member:
        with learner.arithmetic.autocast(), learning(model, member, learner.replica.plan):
            turn = Turn(member, (), 0, learner.scaler_of(member), RunningMeans(learner.task, model))
            return loss_of_turn(learner.task, turn, model, image, target, twice) / 2
    with learner.arithmetic.autocast():
        output = model(image)
    return learner.loss_of(output, target, seeds=twice.seeds, model=model) / len(target)


def inputs_of_a_pass(learner: Learner, member: str = "") -> tuple[Tensor, ...]:
    """What the model is called with in this rank's first pass, of the dummy image; tiled where the mesh cuts images.

    member: of a model whose modules learn by turns, the one whose inputs they are.
    """
    rows = _rows(learner)
    image, target = (one if rows == 1 else torch.cat([one] * rows) for one in learner.prepared(learner.dummy_batch))
    return learner.task.example(member, image, target) if member else (image,)  # type: ignore[attr-defined]


def meta_pass(learner: Learner) -> tuple[Tensor, Tensor]:
    """Meta tensors like the images and targets of this rank's first pass, whole ones even where the mesh cuts them."""
    image, target = learner.prepare(learner.dummy_batch)
    rows, whole = _rows(learner), learner.dummy_batch.whole_shape
    pixels_of_input = whole if whole is not None and labels_of(learner.task) != "noise" else image.shape[1:]
    shape, wanted = (image.shape[1], *pixels_of_input[-(image.ndim - 2) :]), tuple(target.shape[1:])
    if whole is not None and is_per_pixel(learner.task):
        pixels = [scale_of(learner.task) * extent for extent in whole[1:]]
        wanted = (*wanted[: len(wanted) - len(pixels)], *pixels)
    images = torch.empty((rows, *shape), dtype=image.dtype, device="meta")
    targets = torch.empty((rows, *wanted), dtype=target.dtype, device="meta")
    return images.to(memory_format=learner.prepare.format_of(images)), targets


def gathered_maps(learner: Learner) -> list[Fallback]:
    """The maps of a detector, which every rank has whole for anchors, matching and losses where the plan cuts images."""
    mesh, (sample, _) = learner.mesh, meta_pass(learner)
    if labels_of(learner.task) != "boxes" or not (mesh.grid.size > 1 or mesh.plan.stream is not None):
        return []
    size, itemsize = tuple(sample.shape[2:]), max(4, sample.dtype.itemsize)
    held = learner.task.gathered_bytes(size, images=len(sample), itemsize=itemsize)  # type: ignore[attr-defined]
    return [Fallback("gathered", "", "maps of all levels", held, "anchors of all places are matched with the boxes")]


def _rows(learner: Learner) -> int:
    return -(-len(learner.steps.positions(0)) // (learner.mesh.copies * learner.config.gradient.accumulate))
