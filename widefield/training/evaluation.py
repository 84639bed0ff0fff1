"""The result of an evaluation, and the worst of its mistakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from widefield.config.field_types import Labels
from widefield.training.thumbnails import Thumbnail


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: class numbers, the probability of the predicted class, and the loss.

    Where a sample has several classes, or boxes, their numbers; where it has numbers, these, and no probability.
    """

    index: int
    truth: int | tuple[int, ...] | tuple[float, ...]
    prediction: int | tuple[int, ...] | tuple[float, ...]
    probability: float | None
    loss: float
    boxes: tuple[tuple[float, ...], ...] = ()
    """Of objects, to be drawn: x1, y1, x2, y2, and 1 of what was found or 0 of the truth."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, the same on every rank.

    metrics: the task's, in percent where they are shares, then those that the recipe adds, as they compute themselves.
    confusion: counts of images or, where every pixel has a class, of pixels (`unit`); rows are true classes.
    columns: by score, a number per class (`classes`), or per value; NaN where there is none.
    curves: by score, a list per class, from recall 0 to 1 in equal steps; NaN where there is none.
    mistakes: the worst wrong answers by loss, over all ranks; pictures: thumbnails of their images.
    pieces: thumbnails of the first images, where every pixel has a class.
    gathered: the metrics for which ranks gathered all answers; those of all others added up.
    images, of: how many images were evaluated, and how many the split has.
    """

    metrics: dict[str, float]
    confusion: list[list[int]] | None
    loss: float
    images: int
    of: int
    duplicates: int
    skipped: list[str]
    sentence: str
    seconds: float
    mistakes: list[Mistake] = field(default_factory=list, repr=False)
    unit: Literal["images", "pixels"] = "images"
    pieces: list[Thumbnail] = field(default_factory=list, repr=False)
    pictures: list[Thumbnail] = field(default_factory=list, repr=False)
    channels: int = 3
    """The number of channels of the images; a thumbnail shows one or three."""
    labels: Labels = "class"
    classes: list[str] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    curves: dict[str, list[list[float]]] = field(default_factory=dict, repr=False)
    gathered: list[str] = field(default_factory=list)


def mistakes_of(index: Tensor, target: Tensor, answers: Tensor, loss: Tensor, *, labels: Labels, worst: int) -> list[Mistake]:
    """A batch's worst wrong answers by loss.  Numbers are never right, so all of theirs can be among the worst."""
    if labels == "class":
        probability, prediction = answers.max(1)
        wrong = prediction != target
    else:
        wrong = torch.ones_like(loss, dtype=torch.bool) if labels == "values" else ((answers > 0.5) != (target > 0.5)).any(1)
    rows = wrong.nonzero().flatten()
    if len(rows) == 0:
        return []
    top = rows[loss[rows].topk(min(worst, len(rows))).indices]
    if labels == "class":
        columns = [tensor[top.to(tensor.device)].tolist() for tensor in (index, target, prediction, probability, loss)]
        return [Mistake(*row) for row in zip(*columns, strict=True)]
    numbers = _numbers if labels == "values" else _present
    return [
        Mistake(int(index[row]), numbers(target[row]), numbers(answers[row]), None, float(loss[row])) for row in top.tolist()
    ]


def _numbers(row: Tensor) -> tuple[float, ...]:
    return tuple(row.tolist())


def _present(row: Tensor) -> tuple[int, ...]:
    return tuple((row > 0.5).nonzero().flatten().tolist())


def by_loss(mistake: Mistake) -> tuple[float, int]:
    return mistake.loss, -mistake.index
