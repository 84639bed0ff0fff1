"""An image as the model gets it, after data.read_evaluate, and the way back from its pixels to those of the image itself.

Each pixel of the image has the label, and the probabilities, of the pixel nearest to it of those that the model answered for.
So a label image has the size of the image, and the most probable class of a pixel is its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from widefield.data.intensity import moments_of
from widefield.data.pixel_transforms import OfImagesAlone, PixelTransforms
from widefield.data.spatial.axis_warp import AxisMap, AxisWarp
from widefield.data.spatial.boxes import moved_boxes
from widefield.data.spatial.coordinate_map import Array, CoordinateMap, undone
from widefield.data.spatial.warp import Warp
from widefield.data.transforms import Transforms
from widefield.geometry.box import full_box
from widefield.tasks import is_per_pixel, labels_of
from widefield.training.assemble import Parts

_TIE_PX = 1e-10
"""Where two pixels are equally near, the later one is: by this, far above the rounding of positions and far below a pixel."""


@dataclass(frozen=True)
class Transformed:
    """image: (C, *pixels) after the transforms.  original: as it was read.  moments: see Batch; of the original.

    back: nearest pixels, to be taken one after the other.  outside: bool, the pixels of the original that the transforms left
    out; None where they are all there.
    """

    image: Tensor
    original: Tensor
    moments: Tensor | None = None
    back: tuple[Warp | AxisWarp, ...] = ()
    outside: Tensor | None = None
    maps: tuple[CoordinateMap | AxisMap, ...] = ()
    """What moved the pixels, where objects have boxes."""

    def boxes_on_original(self, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """(M, 4) boxes (N, 4) of the transformed image in the original, cut to it, and which of them are in it at all."""
        numbers = torch.arange(len(boxes))
        for map in reversed(self.maps):
            if isinstance(map, CoordinateMap) and not map.is_identity:
                moved, kept = (torch.from_numpy(one) for one in moved_boxes(undone(map), boxes.numpy()))
                boxes, numbers = moved, numbers[kept]
        return boxes, numbers

    def on_original(self, values: Tensor, *, fill: int = 0) -> Tensor:
        """Values (K, *pixels) of the transformed image's pixels on those of the original; `fill` where that was left out."""
        values = _taken(self.back, values)
        if self.outside is None:
            return values
        dtype = torch.promote_types(values.dtype, torch.int64) if fill < 0 else values.dtype
        return values.to(dtype).masked_fill(self.outside, fill)


def transforms_of(parts: Parts) -> Transforms | OfImagesAlone:
    """data.read_evaluate for images without labels.

    NotImplementedError: pixels have labels, and a transform has no inverse.
    """
    listed, pixels = Transforms(parts.config.data.read_evaluate, field="data.read_evaluate"), _has_labels(parts)
    if (pixels or labels_of(parts.task) == "boxes") and any(step.name == "ElasticTransform" for step in listed.steps):
        raise NotImplementedError(
            "data.read_evaluate has ElasticTransform, whose displacements have no inverse in closed form, so labels and boxes "
            "cannot be brought back to the pixels of the image; leave it out: data.read_evaluate=[]"
        )
    if not parts.dataset.moves_as_one:
        return listed
    none = Transforms([], field="data.augment")
    about = {"num_classes": len(parts.dataset.classes), "ignore": 0, "labelled": pixels, "dims": parts.dataset.dims}
    return OfImagesAlone(PixelTransforms(listed, none, **about))


def transformed(image_CHW: Tensor, transforms: Transforms | OfImagesAlone, parts: Parts) -> Transformed:
    """ValueError: labels could not be brought back, since an own transform changes the size, or no label says "left out"."""
    area = parts.dataset.intensity.each_image
    moments = None if area is None else moments_of(image_CHW, area)
    if isinstance(transforms, Transforms):
        return Transformed(transforms(image_CHW, 0), image_CHW, moments)
    view = transforms(image_CHW, 0)
    if not _has_labels(parts):
        maps = view.maps if labels_of(parts.task) == "boxes" else ()
        return Transformed(view.image, image_CHW, moments, maps=maps)
    back = _back(view.maps, _size(view.image))
    outside = None
    if back:
        seen = _taken(back, torch.ones((1, *_size(view.image)), dtype=torch.uint8))[0]
        outside = None if seen.all() else seen == 0
    if outside is not None:
        _check_label(outside, parts)
    return Transformed(view.image, image_CHW, moments, back, outside)


def _has_labels(parts: Parts) -> bool:
    """Whether pixels have labels, which are brought back to the image's own pixels; answers that are images are not."""
    return is_per_pixel(parts.task) and labels_of(parts.task) != "image"


def blank(parts: Parts) -> Transformed:
    """A black image of the size that evaluation had: for a call of the model whose answer nobody wants."""
    shape, area = parts.dataset.evaluate.shape, parts.dataset.intensity.each_image  # type: ignore[attr-defined]
    image = torch.zeros(shape, dtype=parts.dataset.dtype)
    return Transformed(image, image, None if area is None else moments_of(image, area))


def ignore_label(parts: Parts) -> int | None:
    """The label of pixels that data.read_evaluate leaves out; None where none can say so."""
    ignore = getattr(parts.task, "ignore_index", None)
    wraps = ignore is not None and ignore < 0 and len(parts.dataset.classes) > 255  # in a label image it would be class 255
    return None if wraps or labels_of(parts.task) == "layers" else ignore


def _check_label(outside: Tensor, parts: Parts) -> None:
    if ignore_label(parts) is None:
        raise ValueError(
            f"data.read_evaluate leaves out {int(outside.sum()):,} of the image's {outside.numel():,} pixels, and the task has "
            "no label for pixels without an answer; leave out what crops or turns images, as data.read_evaluate=[]"
        )


def _back(maps: Sequence[CoordinateMap | AxisMap], size: tuple[int, ...]) -> tuple[Warp | AxisWarp, ...]:
    """The inverses, in their order.  ValueError: a user's own transform changes the size between them, or at the end."""
    for map, after in zip(maps, [*(one.source for one in maps[1:]), size], strict=True):
        if map.output != after:
            raise ValueError(
                f"a transform of your own in data.read_evaluate makes an image of {after} of one of {map.output} pixels, and "
                "labels cannot be brought back from there; keep the size, or use Resize, CenterCrop or Pad, which can be undone"
            )
    return tuple(_nearest(map) for map in reversed(maps) if not map.is_identity)


def _nearest(map: CoordinateMap | AxisMap) -> Warp | AxisWarp:
    """The way back from the pixels of the output to those of the source."""
    if isinstance(map, AxisMap):
        return AxisWarp(map.undone())
    map = undone(map)
    later: Array = np.array([[1, 0, _TIE_PX], [0, 1, _TIE_PX], [0, 0, 1]])
    matrix = reduce(np.matmul, (one for one in map.chain if isinstance(one, np.ndarray)), later)
    return Warp(CoordinateMap(map.source, map.output, (matrix,)), interpolation="nearest")


def _taken(back: Sequence[Warp | AxisWarp], values: Tensor) -> Tensor:
    for warp in back:
        whole = full_box(warp.map.output)
        values, _ = warp.view(values, None, full_box(warp.map.source), whole, outside=None)
    return values


def _size(image: Tensor) -> tuple[int, ...]:
    return tuple(image.shape[1:])
