"""What a transform of torchvision's does to the pixels of an image of some size, drawn from torchvision's own distributions.

Each function takes the transform, what torchvision drew for it, the size (H, W) of the image that it would be given, and a
seed, and returns a SpatialMove.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from widefield.data.spatial.coordinate_map import Array, SpatialMove
from widefield.data.spatial.elastic import elastic_of

Size = tuple[int, int]


def drawn(transform: Any, size: Size, seed: int) -> SpatialMove | None:
    """The move of a transform of a class in MOVES; None where it leaves the image as it is.

    Torch's generator is to be seeded.  seed: of displacements.
    """
    if hasattr(transform, "p") and torch.rand(1).item() >= transform.p:
        return None
    parameters = transform.make_params([torch.empty((1, *size), device="meta")])
    return MOVES[type(transform).__name__](transform, parameters, size, seed)


def _horizontal_flip(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    return SpatialMove(size, np.array([[1, 0, 0], [0, -1, size[1] - 1], [0, 0, 1]], dtype=np.float64))


def _vertical_flip(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    return SpatialMove(size, np.array([[-1, 0, size[0] - 1], [0, 1, 0], [0, 0, 1]], dtype=np.float64))


def _rotate90(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    """As torch.rot90: one turn takes rows from columns, counted from the right."""
    matrix = np.eye(3)
    for _ in range(parameters["turns"]):
        matrix = matrix @ np.array([[0, 1, 0], [-1, 0, size[1] - 1], [0, 0, 1]], dtype=np.float64)
        size = size[1], size[0]
    return SpatialMove(size, matrix)


def _rotation(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    angle, output = parameters["angle"], size
    if transform.expand:
        output = _expanded(size, angle)
    center = None if transform.expand else transform.center
    return SpatialMove(output, _affine(size, output, angle=-angle, center=center))


def _random_affine(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    return SpatialMove(size, _affine(size, size, center=transform.center, **parameters))


def _perspective(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    a, b, c, d, e, f, g, h = parameters["coefficients"]  # of edges, in (x, y)
    edges = np.array([[e, d, f], [b, a, c], [h, g, 1]], dtype=np.float64)
    return SpatialMove(size, _shift(0.5, 0.5) @ edges @ _shift(-0.5, -0.5))


def _elastic(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    (alpha_x, alpha_y), (sigma_x, sigma_y) = (_pair(value) for value in (transform.alpha, transform.sigma))
    return SpatialMove(size, elastic_of(seed, alpha=(alpha_y, alpha_x), sigma=(sigma_y, sigma_x)))


def _crop(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    left, top, right, bottom = parameters["padding"]
    padded = (size[0] + top + bottom, size[1] + left + right)
    if not parameters["needs_crop"]:
        return SpatialMove(padded, _shift(top, left))
    return SpatialMove((parameters["height"], parameters["width"]), _shift(top - parameters["top"], left - parameters["left"]))


def _center_crop(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    """As torchvision: an image that is smaller is padded first, the odd pixel at its end."""
    start = [
        -((side - extent) // 2) if side > extent else round((extent - side) / 2.0)
        for side, extent in zip(transform.size, size, strict=True)
    ]
    return SpatialMove((transform.size[0], transform.size[1]), _shift(-start[0], -start[1]))


def _resized_crop(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    cut = (parameters["height"], parameters["width"])
    resized = _resize(cut, (transform.size[0], transform.size[1]))
    return SpatialMove(resized.size, _shift(-parameters["top"], -parameters["left"]) @ resized.element)


def _resize_to(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    """Resize, RandomResize, RandomShortestSize, ScaleJitter: to parameters["size"] or to the size of the transform."""

    def resized(box: Tensor) -> Tensor:
        return transform(box) if "size" not in parameters else v2.functional.resize(box, parameters["size"])

    return _resize(size, _size_after(resized, size))


def _padded(transform: Any, parameters: dict[str, Any], size: Size, seed: int) -> SpatialMove:
    """Pad and RandomZoomOut."""
    given = parameters.get("padding", getattr(transform, "padding", 0))
    left, top, right, bottom = _sides([given] if isinstance(given, int) else given)
    return SpatialMove((size[0] + top + bottom, size[1] + left + right), _shift(top, left))


MOVES: dict[str, Callable[[Any, dict[str, Any], Size, int], SpatialMove]] = {
    "RandomHorizontalFlip": _horizontal_flip,
    "RandomVerticalFlip": _vertical_flip,
    "RandomRotate90": _rotate90,
    "RandomRotation": _rotation,
    "RandomAffine": _random_affine,
    "RandomPerspective": _perspective,
    "ElasticTransform": _elastic,
    "RandomCrop": _crop,
    "CenterCrop": _center_crop,
    "RandomResizedCrop": _resized_crop,
    "Resize": _resize_to,
    "RandomResize": _resize_to,
    "RandomShortestSize": _resize_to,
    "ScaleJitter": _resize_to,
    "Pad": _padded,
    "RandomZoomOut": _padded,
}
"""The transforms that move pixels and their labels as one, by name."""


def crop_at(top: int, left: int, size: Size) -> SpatialMove:
    """The pixels from row `top` and column `left` on; negative ones are outside."""
    return SpatialMove(size, _shift(-top, -left))


def _shift(down: float, across: float) -> Array:
    """The matrix of an image that is moved down and to the right: output pixel q is source pixel q - (down, across)."""
    return np.array([[1, 0, -down], [0, 1, -across], [0, 0, 1]], dtype=np.float64)


def _resize(size: Size, output: Size) -> SpatialMove:
    (down, across) = (extent / new for extent, new in zip(size, output, strict=True))
    return SpatialMove(output, np.array([[down, 0, 0.5 * down - 0.5], [0, across, 0.5 * across - 0.5], [0, 0, 1]]))


def _affine(
    size: Size,
    output: Size,
    *,
    angle: float,
    translate: tuple[float, float] = (0, 0),
    scale: float = 1.0,
    shear: tuple[float, float] = (0.0, 0.0),
    center: list[float] | None = None,
) -> Array:
    """As torchvision's functional.affine: degrees clockwise about `center` (x, y), in edges; moved by `translate` (x, y)."""
    turn, shear_x, shear_y = (math.radians(value) for value in (angle, *shear))
    a = math.cos(turn - shear_y) / math.cos(shear_y)
    b = -a * math.tan(shear_x) - math.sin(turn)
    c = math.sin(turn - shear_y) / math.cos(shear_y)
    d = -c * math.tan(shear_x) + math.cos(turn)
    backward = np.array([[a, -c, 0], [-b, d, 0], [0, 0, scale]]) / scale  # of (y, x); (a, b, c, d) has the determinant 1
    middle = ((size[0] - 1) / 2, (size[1] - 1) / 2) if center is None else (center[1] - 0.5, center[0] - 0.5)
    seen = ((output[0] - 1) / 2, (output[1] - 1) / 2) if center is None else middle
    return _shift(-middle[0], -middle[1]) @ backward @ _shift(seen[0] + translate[1], seen[1] + translate[0])


def _expanded(size: Size, angle: float) -> Size:
    """The size that holds a whole image turned by `angle` degrees about its center, as torchvision computes it."""
    across, down = abs(math.cos(math.radians(angle))), abs(math.sin(math.radians(angle)))
    halves = (size[0] * across + size[1] * down) / 2, (size[1] * across + size[0] * down) / 2
    ends = [
        [math.trunc((extent / 2 + side) / 1e-3) * 1e-3 for side in (half, -half)]
        for half, extent in zip(halves, size, strict=True)
    ]
    rows, columns = (math.ceil(last) - math.floor(first) for last, first in ends)
    return rows, columns


def _size_after(change: Callable[[Tensor], Tensor], size: Size) -> Size:
    """The size that torchvision gives an image of `size`, found out by boxes, which have no pixels."""
    boxes = tv_tensors.BoundingBoxes(torch.zeros((1, 4)), format=tv_tensors.BoundingBoxFormat.XYXY, canvas_size=size)
    return change(boxes).canvas_size


def _pair(value: Any) -> tuple[float, float]:
    values = [float(one) for one in value]
    return values[0], values[-1]


def _sides(padding: Any) -> tuple[int, int, int, int]:
    """Left, top, right, bottom, of one, two or four numbers."""
    left, top, *further = [*padding, *padding] if len(padding) == 1 else padding
    right, bottom = further or (left, top)
    return left, top, right, bottom
