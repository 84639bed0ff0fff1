"""Metrics of each image (case) by itself, of which the mean over cases is taken: overlap, and distances of surfaces.

Each has a table with a row per image of the split, which adds up over ranks and tiles: a rank fills the rows of its images.  So
the means are the same on any number of ranks.  A mean over classes is of the means of each class over its cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
SpacingOf = Callable[[int], Sequence[float] | None]
"""The lengths of a pixel along each dim of an image, by its number; None where they are not known."""


@dataclass(frozen=True)
class CaseSizes:
    """What a metric of cases has to know.

    ignore: the label that does not count.  layered: a pixel may have several classes.  spacing_of: None where no image has one.
    """

    classes: int
    cases: int
    ignore: int | None
    layered: bool
    spacing_of: SpacingOf | None = None


class CaseMetric(Protocol):
    """table: (cases, ...), all 0 at the start.  wants_whole: whether `update` gets whole images, and not windows of them.

    of_classes: whether `columns` have a number for each class, and not one number.
    """

    table: Tensor
    wants_whole: bool
    of_classes: bool

    def update(self, index: Tensor, answers: Tensor, target: Tensor) -> None:
        """Add images number `index`: (B, *pixels) class numbers, or (B, classes, *pixels) of 0 and 1, or images."""

    def columns(self) -> dict[str, Tensor]:
        """(classes,) of each score: the mean over its cases; NaN where there is none; and how many there are; or one number."""


class CaseOverlap:
    """Dice or IoU of each image.

    An image with a class in neither truth nor answer is no case of the class; one with it in only one of them has a score of 0.
    """

    wants_whole, of_classes = False, True

    def __init__(self, score: Literal["dice", "iou"], sizes: CaseSizes, *, background: bool = True) -> None:
        """background: whether class 0 counts in the mean."""
        self.score, self.sizes, self.background = score, sizes, background
        cases, classes = sizes.cases, sizes.classes
        self.table = torch.zeros(cases, classes, 3, dtype=torch.int64)
        """Of each image and class the pixels that are right, answered and true."""

    def update(self, index: Tensor, answers: Tensor, target: Tensor) -> None:
        for row, answer, truth in zip(index.tolist(), answers, target, strict=True):
            self.table[row] += self._counts(answer, truth).cpu()

    def _counts(self, answer: Tensor, truth: Tensor) -> Tensor:
        """(classes, 3) of one image."""
        if self.sizes.layered:
            layers, masks = answer.flatten(1) > 0, truth.flatten(1) > 0
            return torch.stack([(layers & masks).sum(1), layers.sum(1), masks.sum(1)], dim=1)
        counted = slice(None) if self.sizes.ignore is None else truth != self.sizes.ignore
        answer, truth = answer[counted].flatten(), truth[counted].flatten()
        counts = [torch.bincount(numbers, minlength=self.sizes.classes) for numbers in (answer[answer == truth], answer, truth)]
        return torch.stack(counts, dim=1)

    def columns(self) -> dict[str, Tensor]:
        right, answered, truth = self.table.double().unbind(2)
        either = answered + truth - right
        score, case = right / either if self.score == "iou" else 2 * right / (answered + truth), either > 0
        case[:, : 0 if self.background else 1] = False
        return {f"{self.score}_cases": _means(score, case), "cases": case.sum(0)}


class SurfaceDistance:
    """Distances between the surfaces of each class in truth and answer, in the units of `spacing`, or in pixels.

    The surface: pixels of the class that have a neighbour along a dim that is not of it; beyond the image nothing is.  hd95:
    the larger of the two 95th percentiles, from either side (as MONAI); asd: the mean over the pixels of both surfaces (the
    symmetric one); nsd: the share of both surfaces within `tolerance` of the other.  A class in only one of them has the
    image's diagonal as hd95 and asd, and an nsd of 0: to leave such images out would reward missing a class.  `one_sided` says
    in how many cases that was so.  A class in neither is no case.
    """

    wants_whole, of_classes = True, True

    def __init__(
        self, sizes: CaseSizes, *, spacing: Sequence[float] | None = None, tolerance: float = 1.0, background: bool = False
    ) -> None:
        """spacing: the length of a pixel along each dim; None: that of each image, or 1 where it has none.

        background: whether class 0 has a surface.
        """
        self.sizes, self.spacing, self.tolerance = sizes, spacing, tolerance
        self.numbers = range(0 if background or sizes.layered else 1, sizes.classes)
        self.table = torch.zeros(sizes.cases, sizes.classes, 5, dtype=torch.float64)
        """Of each image and class whether it is a case, hd95, asd, nsd, and whether one side is empty."""

    def update(self, index: Tensor, answers: Tensor, target: Tensor) -> None:
        for row, answer, truth in zip(index.tolist(), answers.cpu().numpy(), target.cpu().numpy(), strict=True):
            spacing = np.asarray(self._spacing(row, truth.ndim - self.sizes.layered))
            for number in self.numbers:
                found = self._distances(*self._masks(answer, truth, number), spacing)
                if found is not None:
                    self.table[row, number] += torch.tensor([1.0, *found], dtype=torch.float64)

    def _masks(self, answer: Array, truth: Array, number: int) -> tuple[Array, Array]:
        if self.sizes.layered:
            return answer[number] > 0, truth[number] > 0
        return (answer == number) & (truth != self.sizes.ignore), truth == number

    def _distances(self, answer: Array, truth: Array, spacing: Array) -> tuple[float, float, float, float] | None:
        """hd95, asd, nsd, and 1 where one of the masks is empty; None where both are."""
        from scipy.spatial import cKDTree  # some 0.2 s to import

        one, other = (np.argwhere(surface(mask)) * spacing for mask in (answer, truth))
        if not len(one) and not len(other):
            return None
        if not len(one) or not len(other):
            diagonal = math.hypot(*(np.asarray(answer.shape) * spacing))
            return diagonal, diagonal, 0.0, 1.0
        there, back = cKDTree(other).query(one)[0], cKDTree(one).query(other)[0]
        both = np.concatenate([there, back])
        hd95 = max(float(np.percentile(side, 95)) for side in (there, back))
        return hd95, float(both.mean()), float((both <= self.tolerance).mean()), 0.0

    def _spacing(self, index: int, dims: int) -> list[float]:
        """Of an image with so many dims."""
        own = None if self.sizes.spacing_of is None or self.spacing is not None else self.sizes.spacing_of(index)
        spacing = [float(length) for length in own or self.spacing or [1.0] * dims]
        if len(spacing) != dims or min(spacing) <= 0:
            raise ValueError(
                f"task.metrics: surface has spacing={spacing} and images have {dims} dims; give a length above 0 for each"
            )
        return spacing

    def columns(self) -> dict[str, Tensor]:
        case, *scores, one_sided = self.table.unbind(2)
        means = {name: _means(score, case > 0) for name, score in zip(("hd95", "asd", "nsd"), scores, strict=True)}
        return {**means, "surface_cases": case.sum(0).long(), "one_sided": one_sided.sum(0).long()}


def surface(mask: Array) -> Array:
    """The pixels of a mask that have a neighbour along a dim that is not of it; beyond the border nothing is of it."""
    padded = np.pad(mask, 1)
    inside = padded.copy()
    for dim in range(mask.ndim):
        inside &= np.roll(padded, 1, dim) & np.roll(padded, -1, dim)
    return mask & ~inside[(slice(1, -1),) * mask.ndim]


def _means(scores: Tensor, of: Tensor) -> Tensor:
    """(classes,) the means over the cases where `of`; NaN where there is none."""
    return torch.where(of, scores, 0.0).sum(0) / of.sum(0)
