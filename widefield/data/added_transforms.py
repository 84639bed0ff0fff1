"""Transforms that torchvision lacks, by name in recipes as torchvision's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from widefield.data.spatial.volume_moves import RandomDepthFlip


class RandomRotate90(v2.Transform):
    """Turns by 0, 90, 180 or 270 degrees, each as likely."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        return {"turns": int(torch.randint(4, ()))}

    def transform(self, inpt: Tensor, params: dict[str, int]) -> Tensor:
        return torch.rot90(inpt, params["turns"], (-2, -1))


@dataclass(frozen=True)
class ClassBalancedCrop:
    """A crop of `size` (one number or one per dim); a share of the crops is centred on a pixel of a drawn class.

    The class is drawn from those of `classes` that the image has, each as likely; its pixel from all of that class, each as
    likely.  At the image's border the crop is moved inside.  All other crops are anywhere, as RandomCrop's.  An image that is
    smaller than the crop is padded.  classes: None for all but class 0, or for all where pixels may have several classes.
    """

    size: int | Sequence[int]
    share: float = 0.33
    classes: Sequence[int] | None = None
    fill: float | Sequence[float] = 0
    padding_mode: str = "constant"

    def __post_init__(self) -> None:
        sides = self.size if isinstance(self.size, Sequence) else [self.size]
        if len(sides) not in (1, 2, 3) or any(type(side) is not int or side < 1 for side in sides):
            raise ValueError(
                f"size={self.size!r}: a whole number above 0 is wanted, or a height and a width, or a depth and these"
            )
        if not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share!r}: a number from 0 to 1 is wanted")

    def __call__(self, image: Tensor) -> Tensor:
        """NotImplementedError: an image alone, as for prediction, has no classes to crop around."""
        raise NotImplementedError("ClassBalancedCrop needs the labels of the image's pixels, and here is none; leave it out")

    def sides(self, dims: int) -> tuple[int, ...]:
        """The size along each of so many dims.  ValueError: it has another number of them."""
        sides = tuple(self.size) if isinstance(self.size, Sequence) else (self.size,)
        if len(sides) not in (1, dims):
            raise ValueError(
                f"size={self.size!r} has {len(sides)} numbers and pixels have {dims} dims; give one number per dim"
            )
        return sides * dims if len(sides) == 1 else sides


ADDED: dict[str, type] = {
    "RandomRotate90": RandomRotate90, "ClassBalancedCrop": ClassBalancedCrop, "RandomDepthFlip": RandomDepthFlip,
}  # fmt: skip
