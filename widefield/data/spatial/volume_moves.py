"""What a transform does to the voxels of a volume of some size: flips along an axis, and crops.

Names and distributions are torchvision's; sizes are three: depth, height and width, or one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.data.spatial.axis_warp import AxisMap
from widefield.data.spatial.border import BORDERS, Border

Size = tuple[int, ...]
AXES = ("depth", "height", "width")


@dataclass(frozen=True)
class RandomDepthFlip:
    """Turns the order of a volume's planes with the probability p."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"p={self.p!r}: a number from 0 to 1 is wanted")

    def __call__(self, image: Tensor) -> Tensor:
        """NotImplementedError: an image has no planes."""
        raise NotImplementedError("RandomDepthFlip is for volumes (C, D, H, W), and here is an image; leave it out")


@dataclass(frozen=True)
class VolumeCrop:
    """A crop of `size` (one number or [depth, height, width]).  random: anywhere, as RandomCrop; else as CenterCrop.

    A volume that is smaller is padded: where `pad_if_needed` it lies anywhere in a random crop; in CenterCrop it lies in the
    middle, the odd voxel at the end.
    """

    size: int | Sequence[int]
    random: bool = True
    pad_if_needed: bool = False
    fill: float | Sequence[float] = 0
    padding_mode: Border = "constant"

    def __post_init__(self) -> None:
        sides = self.size if isinstance(self.size, Sequence) and not isinstance(self.size, str) else [self.size]
        if len(sides) not in (1, 3) or any(type(side) is not int or side < 1 for side in sides):
            raise ValueError(f"size={self.size!r}: a whole number above 0, or {', '.join(AXES)}, as [16, 64, 64], is wanted")
        if self.padding_mode not in BORDERS:
            raise ValueError(f"padding_mode={self.padding_mode!r}: one of {', '.join(BORDERS)} is wanted")

    def __call__(self, image: Tensor) -> Tensor:
        """NotImplementedError: an image has two sizes."""
        raise NotImplementedError("a crop of three sizes is for volumes (C, D, H, W), and here is an image; give two sizes")

    @property
    def sides(self) -> Size:
        return tuple(self.size) if isinstance(self.size, Sequence) else (self.size,) * 3

    def drawn(self, size: Size) -> AxisMap:
        """ValueError: the volume is smaller than the crop, and may not be padded."""
        starts = []
        for name, extent, side in zip(AXES, size, self.sides, strict=True):
            if extent < side and self.random and not self.pad_if_needed:
                raise ValueError(
                    f"the crop's {name} {side} is larger than {extent}; give a smaller one, or pad_if_needed: true"
                )
            if self.random:
                least, most = sorted((0, extent - side))
                starts.append(int(torch.randint(least, most + 1, ())))
            else:
                starts.append(-((side - extent) // 2) if extent < side else round((extent - side) / 2.0))
        return AxisMap(size, self.sides, (1, 1, 1), tuple(starts))


def random_crop(
    size: Any, *, pad_if_needed: bool = False, fill: float | Sequence[float] = 0, padding_mode: Border = "constant"
) -> VolumeCrop:
    """RandomCrop of volumes."""
    return VolumeCrop(size, True, pad_if_needed, fill, padding_mode)


def center_crop(size: Any) -> VolumeCrop:
    """CenterCrop of volumes."""
    return VolumeCrop(size, False, True)


CROPS: dict[str, Callable[..., VolumeCrop]] = {"RandomCrop": random_crop, "CenterCrop": center_crop}
"""By the name of the transform, what makes its crop from the arguments that a recipe gives."""
FLIPS = {"RandomDepthFlip": 0, "RandomVerticalFlip": 1, "RandomHorizontalFlip": 2}
"""By the name of the transform, the axis that it turns."""
VOLUME_MOVES = (*FLIPS, *CROPS)


def crop_of(name: str, run: Any, arguments: dict[str, Any]) -> VolumeCrop:
    """The crop of a step that is listed for volumes.  ValueError: it does not take the arguments."""
    if isinstance(run, VolumeCrop):
        return run
    try:
        return CROPS[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} on volumes does not take {arguments}: {error}") from None


def drawn_flip(name: str, run: Any, size: Size) -> AxisMap:
    """A flip of a volume of `size`, or nothing.  Torch's generator is to be seeded."""
    same, axis = AxisMap.identity(size), FLIPS[name]
    if torch.rand(1).item() >= run.p:
        return same
    sign = tuple(-1 if number == axis else 1 for number in range(3))
    return AxisMap(size, size, sign, tuple(extent - 1 if number == axis else 0 for number, extent in enumerate(size)))
