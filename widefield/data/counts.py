"""How often is each class in a split?  For class weights and for balanced sampling.

Targets come from `target_of` of the images where they have it, which reads no image, else from `read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from widefield.data import BadImageError, Images
from widefield.geometry.box import full_box
from widefield.geometry.interval import Interval, pieces_of

BAND = 1024
"""Rows, or planes, of labels that are counted at a time where their file is read by window."""
_MOST_BINS = 1 << 20


def target_of(images: Images, index: int) -> Any:
    """The target of an image: an int, or a tensor.  BadImageError: it cannot be read."""
    of = getattr(images, "target_of", None)
    return images.read(index)[1] if of is None else of(index)


def label_counts(target: int | Tensor, labels: str) -> dict[int, int]:
    """How often each label stands in one target: once, or in so many pixels, also of those that do not count.

    labels: the kind of targets; "values" and "image" have no labels.
    """
    if labels in ("values", "image"):
        return {}
    target = torch.as_tensor(target)
    if labels == "boxes":
        target = target[:, 4]
        if not len(target):
            return {}
    if labels in ("classes", "layers"):
        return dict(enumerate((target > 0).view(len(target), -1).sum(1).tolist()))
    least, most = (int(end) for end in target.aminmax())
    if most - least > _MOST_BINS:
        values, counts = target.unique(return_counts=True)  # sorts them: 90 times as slow for 4096 x 4096 pixels
        return dict(zip(values.tolist(), counts.tolist(), strict=True))
    counts = torch.bincount(target.flatten().long() - least)
    return {least + int(place): int(counts[place]) for place in counts.nonzero()}


def class_counts(
    images: Images, indices: Iterable[int], *, labels: str, classes: int, ignore: int | None = None, skip: bool = False
) -> Tensor:
    """(classes + 1,) int64: the samples of each class among `indices`, or pixels where these have classes; last, of all.

    labels: the kind of targets, not "values".  ignore: the label of pixels that do not count.  skip: leave out what cannot be
    read.
    """
    total = torch.zeros(classes + 1, dtype=torch.int64)
    for index in indices:
        try:
            parts = [_with_number(target, labels, classes, ignore) for target in _in_bands(images, index, labels)]
        except BadImageError:
            if not skip:
                raise
            continue
        total += torch.stack(parts).sum(0)
    return total


def _with_number(target: Any, labels: str, classes: int, ignore: int | None) -> Tensor:
    """(classes + 1,) of a target, or of a part of it: those of each class, and how many there are to have a class."""
    found = _counts(target, labels, classes, ignore)
    number = found.sum() if labels in ("class", "pixels") else torch.tensor(torch.as_tensor(target).numel() // classes)
    return torch.cat([found, number.view(1)])


def _in_bands(images: Images, index: int, labels: str) -> Iterator[Any]:
    """The target of an image, or the labels of its pixels in bands of rows where their file is read by window."""
    labels_in = getattr(images, "labels_in", None)
    if labels_in is None or labels not in ("pixels", "layers"):
        yield target_of(images, index)
        return
    height, *others = images.shape(index)[1:]  # type: ignore[attr-defined]
    for rows in pieces_of(Interval(0, height), BAND):
        part = labels_in(index, (rows, *full_box(others)))
        if part is None:  # the file is read whole
            yield target_of(images, index)
            return
        yield part


def classes_of(images: Images, indices: Iterable[int], *, labels: str, classes: int, skip: bool = False) -> Tensor:
    """(samples, classes) of 0 and 1: which classes each of these samples has; none where `skip` leaves one out."""
    rows = []
    for index in indices:
        target = _readable(images, index, skip=skip)
        nothing = torch.zeros(classes, dtype=torch.uint8)
        rows.append(nothing if target is None else _counts(target, labels, classes).to(torch.uint8))
    return torch.stack(rows) if rows else torch.zeros(0, classes, dtype=torch.uint8)


def _readable(images: Images, index: int, *, skip: bool) -> Any:
    try:
        return target_of(images, index)
    except BadImageError:
        if not skip:
            raise
        return None


def _counts(target: int | Tensor, labels: str, classes: int, ignore: int | None = None) -> Tensor:
    """(classes,) of one sample."""
    found = label_counts(target, labels)
    return torch.tensor([0 if number == ignore else found.get(number, 0) for number in range(classes)])
