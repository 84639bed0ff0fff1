"""Runs a run's model on batches of images of one size, and says what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from widefield.data.batch import Batch
from widefield.data.pixel_transforms import OfImagesAlone
from widefield.data.transforms import Transforms
from widefield.detection.selection import FoundBoxes
from widefield.geometry.box import slices
from widefield.losses import widened
from widefield.prediction.restored import pixels_of
from widefield.prediction.transformed import Transformed, ignore_label, transformed, transforms_of
from widefield.tasks import is_per_pixel, labels_of, scale_of
from widefield.tiled.api import tile_of, whole
from widefield.training.assemble import Parts
from widefield.training.batch_sharding import on_tiles
from widefield.training.second_stage import completed


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: classes with their probabilities, the most likely first.

    Several classes per image: the same, each probability by itself.  Values in place of classes: `classes` are their names,
    `values` the numbers, and `probabilities` is empty.
    Where the answer is an image: `labels`, the path of its file, or `pixels`, (K, *pixels) of the images' dtype; no classes.
    Where every pixel has a class: classes with their shares of the pixels, and the class numbers of the pixels: `labels`, the
    path of a file, or `pixels`, (H, W), or (K, H, W) of 0 and 1 where a pixel may have several classes; (D, H, W) and
    (K, D, H, W) of a volume.
    left_out: how many of the pixels data.read_evaluate leaves out, which have the task's ignore label; the shares are of the
    others.
    """

    path: str
    classes: list[str]
    probabilities: list[float]
    labels: str | None = None
    pixels: Tensor | None = None
    values: list[float] | None = None
    probabilities_of_pixels: Tensor | None = None
    """(K, *pixels) float16, where asked for."""
    boxes: list[list[float]] | None = None
    """Of objects, x1, y1, x2, y2 in pixels of the image as it is in its file, best first; `classes` and `probabilities` are
    theirs."""
    left_out: int = 0
    apart: dict[str, float] | None = None
    """Of blended windows, where asked for: at how many `pixels`, and which `share`, labels are not the whole image's."""


def mirrors_of(dims: int, most: int | None = None) -> list[tuple[int, ...]]:
    """Which of an image's last dims are flipped in each pass: none first; all and each with each, or the first `most` of them.

    >>> mirrors_of(2), mirrors_of(3, most=2)
    ([(), (-1,), (-2,), (-2, -1)], [(), (-1,)])
    """
    ways = range(2**dims if most is None else most)
    return [tuple(-1 - dim for dim in reversed(range(dims)) if way >> dim & 1) for way in ways]


@dataclass(frozen=True)
class Asker:
    """A function from images to answers.  Every rank of a copy of the model calls it with the same images.

    top: how many classes to name.  flips: answer with the mean of the probabilities over mirror images.
    probabilities: give those of every pixel too.
    """

    parts: Parts
    top: int
    flips: bool = False
    probabilities: bool = False

    @cached_property
    def transforms(self) -> Transforms | OfImagesAlone:
        return transforms_of(self.parts)

    def transformed(self, image_CHW: Tensor) -> Transformed:
        """The image after data.read_evaluate.  ValueError: see `transformed.transformed`."""
        return transformed(image_CHW, self.transforms, self.parts)

    @property
    def pixels(self) -> bool:
        return is_per_pixel(self.parts.task)

    @cached_property
    def mirrors(self) -> list[tuple[int, ...]]:
        """Dims that are flipped, per pass: left and right; of labels of pixels all dims, and each with each."""
        dims = self.parts.dataset.dims
        return mirrors_of(dims, most=2**dims if self.pixels else 2) if self.flips else [()]

    @torch.no_grad()
    def __call__(self, images: Sequence[Transformed], paths: Sequence[str]) -> list[Answer]:
        """The answers for images that are of one size after the transforms."""
        batch = self._batch(images)
        prepared, _ = self.parts.preparation(train=False)(batch)
        image = on_tiles(prepared, batch, self.parts.mesh)
        if labels_of(self.parts.task) == "boxes":
            return [self._boxed(*one) for one in zip(paths, images, self._found(image, batch), strict=True)]
        if not self.pixels:
            found = torch.stack([self._of_image(self._output(image, dims)) for dims in self.mirrors]).mean(0)
            return [self._named(path, row) for path, row in zip(paths, found, strict=True)]
        if labels_of(self.parts.task) == "image":
            restored = zip(paths, self._restored(image, batch), strict=True)
            return [Answer(path, [], [], pixels=pixels) for path, pixels in restored]
        labels, likely = self._of_pixels(image, batch)
        likelies = [None] * len(labels) if likely is None else list(likely.cpu())
        return [self._counted(*one) for one in zip(paths, images, labels.cpu(), likelies, strict=True)]

    def _batch(self, given: Sequence[Transformed]) -> Batch:
        """This rank's windows of the images."""
        images, moments = torch.stack([one.image for one in given]), [one.moments for one in given if one.moments is not None]
        nothing = torch.zeros(len(images), dtype=torch.int64)
        batch = Batch(images, nothing, nothing, samples=len(images), moments=torch.stack(moments) if moments else None)
        if self.parts.window is None:
            return batch
        shape = tuple(images.shape[1:])
        window = self.parts.window(shape[1:])
        return replace(batch, image=images[..., *slices(window)].contiguous(), whole_shape=shape, window=window)

    def _output(self, image: Tensor, dims: tuple[int, ...]) -> Tensor:
        """What the model gives for the mirror image, turned back, in float32 or wider."""
        with self.parts.arithmetic.autocast():
            output = self.parts.model(image.flip(dims) if dims else image)
        output = output.flip(dims) if dims and self.pixels else output
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _found(self, image: Tensor, batch: Batch) -> list[FoundBoxes]:
        with self.parts.arithmetic.autocast():
            output = whole(self.parts.model(image))
        task, sizes = self.parts.task, [batch.shape[1:]] * len(image)
        autocast = self.parts.arithmetic.autocast
        output = completed(task, self.parts.model, widened(output), sizes, autocast=autocast)
        return task.found(output, sizes)  # type: ignore[attr-defined]

    def _boxed(self, path: str, image: Transformed, found: FoundBoxes) -> Answer:
        boxes, kept = image.boxes_on_original(found.boxes.double().cpu())
        labels, scores = found.labels.cpu()[kept].tolist(), found.scores.double().cpu()[kept].tolist()
        return Answer(path, [self.parts.dataset.classes[label] for label in labels], scores, boxes=boxes.tolist())

    def _of_image(self, output: Any) -> Tensor:
        return self.parts.task.answers(whole(output).double())

    def _of_pixels(self, image: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Labels (B, *pixels), or layers (B, K, *pixels), of whole images, and their probabilities where asked for."""
        mesh, task = self.parts.mesh, self.parts.task
        outputs = (tile_of(self._output(image, dims), mesh) for dims in self.mirrors)
        if not self.flips and not self.probabilities:
            return self._joined(self._small(task.answers(next(outputs))), batch), None
        layers = labels_of(task) == "layers"
        total = sum((output.sigmoid() if layers else output.softmax(1)) for output in outputs)
        mean = total / len(self.mirrors)
        labels = (mean > 0.5).to(torch.uint8) if layers else mean.argmax(1)
        likely = self._joined(mean.half(), batch) if self.probabilities else None
        return self._joined(self._small(labels), batch), likely

    def _restored(self, image: Tensor, batch: Batch) -> Tensor:
        """(B, K, *pixels) of whole images, of the dataset's dtype; of several passes, the mean."""
        mesh, scale = self.parts.mesh, scale_of(self.parts.task)
        outputs = [tile_of(self._output(image, dims), mesh, scale=scale) for dims in self.mirrors]
        mean = self._joined(self.parts.task.answers(torch.stack(outputs).mean(0)), batch, scale=scale)
        return pixels_of(mean, self.parts.preparation(train=False).range_of(batch.image.dtype), batch.image.dtype).cpu()

    def _small(self, labels: Tensor) -> Tensor:
        """Labels as uint8 where all classes fit, an eighth of the bytes of int64."""
        return labels.to(torch.uint8) if len(self.parts.dataset.classes) <= 256 else labels

    def _joined(self, tile: Tensor, batch: Batch, *, scale: int = 1) -> Tensor:
        """Whole images of the ranks' tiles.  scale: how many of their pixels an image's pixel is, along each dim."""
        size = tuple(map(len, batch.window)) if batch.window else tuple(batch.shape[1:])
        answered = tuple(tile.shape[-len(batch.shape[1:]) :])
        if answered != tuple(scale * extent for extent in size):
            raise ValueError(
                f"the model answers for {answered} pixels of an image {batch.shape[1:]}; take a model that keeps the image's "
                f"size{f', and enlarges it {scale} times' if scale > 1 else ''}"
            )
        return whole(on_tiles(tile, batch, self.parts.mesh, scale=scale))

    def _named(self, path: str, row: Tensor) -> Answer:
        classes = self.parts.dataset.classes
        if labels_of(self.parts.task) == "values":
            return Answer(path, list(classes), [], values=row.tolist())
        best = row.topk(min(self.top, len(classes)))
        return Answer(path, [classes[index] for index in best.indices], best.values.tolist())

    def _counted(self, path: str, image: Transformed, labels: Tensor, likely: Tensor | None) -> Answer:
        """The answer for an image with labels of pixels, on its own pixels: each class's share of those that have one."""
        classes = self.parts.dataset.classes
        if labels_of(self.parts.task) == "layers":
            labels = image.on_original(labels)
            shares = labels.flatten(1).double().mean(1)
        else:
            labels = image.on_original(labels[None], fill=ignore_label(self.parts) or 0)[0]
            counted = labels.flatten() if image.outside is None else labels[~image.outside]
            shares = torch.bincount(counted.long(), minlength=len(classes)).double() / max(1, len(counted))
        best = shares.topk(min(self.top, len(classes)))
        names, left_out = [classes[index] for index in best.indices], 0 if image.outside is None else int(image.outside.sum())
        likely = None if likely is None else image.on_original(likely)
        found = Answer(path, names, best.values.tolist(), pixels=labels, probabilities_of_pixels=likely)
        return replace(found, left_out=left_out)
