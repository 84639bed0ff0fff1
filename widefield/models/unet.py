"""A small U-Net (Ronneberger et al. 2015, arXiv:1505.04597) for images or volumes of any size, with an output per pixel.

Convolutions are padded, so the output has the image's size; for odd sizes, upsampling resizes to the skip's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.models import check_counts
from widefield.models._of_dims import BATCH_NORM, CONV, MAX_POOL, check_dims
from widefield.naming import did_you_mean

GROUPS = 8
"""Groups of GroupNorm; the greatest common divisor with the channels where it does not divide them."""
Factors = Sequence[int | Sequence[int]]

_LINEAR = {2: "bilinear", 3: "trilinear"}


def _norm(kind: str, channels: int, dims: int) -> nn.Module:
    return BATCH_NORM[dims](channels) if kind == "batch" else nn.GroupNorm(math.gcd(GROUPS, channels), channels)


def _double(in_channels: int, channels: int, norm: str, kernel: Sequence[int]) -> nn.Sequential:
    """kernel: odd sizes along each dim."""
    layers: list[nn.Module] = []
    dims, padding = len(kernel), tuple(side // 2 for side in kernel)
    for start in (in_channels, channels):
        conv = CONV[dims](start, channels, tuple(kernel), padding=padding, bias=False)
        layers += [conv, _norm(norm, channels, dims), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int],
        norm: str,
        dims: int,
        shrink: Sequence[Sequence[int]],
        kernels: Sequence[Sequence[int]],
        deep_supervision: bool = False,
    ) -> None:
        super().__init__()
        starts = [in_channels, *widths[:-1]]
        self.down = nn.ModuleList(
            _double(start, width, norm, kernel) for start, width, kernel in zip(starts, widths, kernels, strict=True)
        )
        self.pools = nn.ModuleList(MAX_POOL[dims](tuple(factors)) for factors in shrink)
        deep = list(reversed(widths))
        pairs = list(zip(deep, deep[1:], strict=False))
        self.narrow = nn.ModuleList(CONV[dims](below, here, 1) for below, here in pairs)
        upwards = list(reversed(kernels))[1:]
        self.up = nn.ModuleList(_double(2 * here, here, norm, kernel) for (_, here), kernel in zip(pairs, upwards, strict=True))
        self.head = CONV[dims](widths[0], num_classes, 1)
        coarser = deep[1:-1] if deep_supervision else []
        self.coarser_heads = nn.ModuleList(CONV[dims](width, num_classes, 1) for width in coarser)
        self.mode = _LINEAR[dims]

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """From images (B, C, H, W), or volumes (B, C, D, H, W), to (B, num_classes, *pixels).

        In training with deep supervision, a list of these: of the image's size, of the next level's, and so on.
        """
        first, *further = self.down
        skips = [first(image)]
        for pool, down in zip(self.pools, further, strict=True):
            skips.append(down(pool(skips[-1])))
        x, coarser = skips.pop(), []
        for level, (narrow, up) in enumerate(zip(self.narrow, self.up, strict=True)):
            skip = skips.pop()
            x = F.interpolate(narrow(x), size=skip.shape[2:], mode=self.mode, align_corners=False)
            x = up(torch.cat([skip, x], dim=1))
            if self.training and level < len(self.coarser_heads):
                coarser.append(self.coarser_heads[level](x))
        return [self.head(x), *reversed(coarser)] if coarser else self.head(x)


def build(
    in_channels: int,
    num_classes: int,
    *,
    widths: Sequence[int] = (16, 32, 64, 128),
    norm: str = "batch",
    dims: int = 2,
    shrink: Factors | None = None,
    kernels: Factors | None = None,
    deep_supervision: bool = False,
) -> nn.Module:
    """widths: channels of each level, from the image's size downwards.

    norm: `batch` or `group`; group normalization uses the statistics of each image, so it suits batches of one.
    dims: 2 for images, 3 for volumes; of a recipe without it, those of the data.
    shrink: by what each further level divides the image, a number, or one for each dim, as [[1, 2, 2], 2] for volumes whose
        planes lie far apart; None: by 2.
    kernels: the sizes of each level's convolutions likewise, odd ones, as [[1, 3, 3], 3, 3]; None: 3.
    deep_supervision: set by model.deep_supervision; levels between the first and the deepest have heads of their own.
    """
    check_counts(widths=widths)
    if norm not in ("batch", "group"):
        raise ValueError(
            f"model.options.norm is {norm!r}{did_you_mean(str(norm), ['batch', 'group'])} It can be batch or group"
        )
    check_dims(dims)
    if deep_supervision and len(widths) < 3:
        raise ValueError(
            "model.deep_supervision needs levels between the first and the deepest, and model.options.widths has "
            f"{len(widths)}; give three or more"
        )
    factors = _factors([2] * (len(widths) - 1) if shrink is None else shrink, levels=len(widths) - 1, dims=dims)
    sizes = _kernels([3] * len(widths) if kernels is None else kernels, levels=len(widths), dims=dims)
    return UNet(in_channels, num_classes, widths=widths, norm=norm, dims=dims, shrink=factors, kernels=sizes,
                deep_supervision=deep_supervision)  # fmt: skip


def _kernels(kernels: Factors, *, levels: int, dims: int) -> list[list[int]]:
    """ValueError: not one odd size, or one for each dim, for each level."""
    found = [list(one) if isinstance(one, Sequence) else [one] * dims for one in kernels]
    if len(found) != levels or any(
        len(one) != dims or any(type(k) is not int or k < 1 or k % 2 == 0 for k in one) for one in found
    ):
        raise ValueError(
            f"model.options.kernels is {kernels!r}; for {levels} levels and {dims} dims write {levels} of an odd number, or of "
            f"{dims} of them, as {[[1, *[3] * (dims - 1)]] * levels}"
        )
    return found


def _factors(shrink: Factors, *, levels: int, dims: int) -> list[list[int]]:
    """ValueError: not one factor, or one for each dim, for each further level."""
    found = [list(one) if isinstance(one, Sequence) else [one] * dims for one in shrink]
    if len(found) != levels or any(len(one) != dims or any(type(by) is not int or by < 1 for by in one) for one in found):
        raise ValueError(
            f"model.options.shrink is {shrink!r}; for {levels} further levels and {dims} dims write {levels} of a whole number "
            f"above 0, or of {dims} of them, as {[[1, *[2] * (dims - 1)]] * levels}"
        )
    return found


CASES = [
    ({"widths": [4, 8, 16]}, torch.Size((1, 3, 21, 18)), torch.Size((1, 10, 21, 18))),
    ({"widths": [4, 6, 16], "norm": "group"}, torch.Size((1, 3, 21, 18)), torch.Size((1, 10, 21, 18))),
    ({"widths": [4, 8], "kernels": [[1, 3], 5]}, torch.Size((1, 3, 21, 18)), torch.Size((1, 10, 21, 18))),
    ({"widths": [4, 8, 8], "dims": 3, "shrink": [[1, 2, 2], 2]}, torch.Size((1, 1, 5, 9, 14)), torch.Size((1, 10, 5, 9, 14))),
]
"""(options, image shape, output shape for 10 classes)."""
