"""Convolution and transposed convolution, forward and backward, in 1 to 3 dims.

Forward: an output pixel reads its window.  Backward: the image stays where it is, and every pixel of the output's gradient,
local or received, adds its terms to the gradients of image and weight.  One exchange serves both, and no halo is saved by the
forward.  An image that needs no gradient is different: the weight's gradient then reads the image's halo, which the forward
saved.

Formulas: Dumoulin & Visin 2016, arXiv:1603.07285.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import is_empty, size_of
from widefield.geometry.interval import Interval
from widefield.geometry.window import Spread, Window, per_dim, window_count
from widefield.rules import Additive, LocalBoxes, Meta, NeedsRedistribute, PartialSum, Read, Tile, Windowed, case, rule

aten = torch.ops.aten


def windows_of(
    extents: Sequence[int], counts: Sequence[int], size: Sequence[int], stride, padding, dilation, transposed: bool
) -> list[Window]:
    """One Window per image dim: of the convolution, or of the convolution whose adjoint a transposed one is.

    extents, counts: pixels per dim of the operation's input and output.
    """
    if transposed:
        extents, counts = counts, extents
    numbers = (per_dim(values, len(size)) for values in (stride, dilation, padding))
    return [Window(*of_dim) for of_dim in zip(size, *numbers, extents, counts, strict=True)]


def _output_extents(extents, size, stride, padding, dilation, transposed, output_padding) -> list[int]:
    counts = []
    numbers = (per_dim(values, len(size)) for values in (stride, padding, dilation, output_padding))
    for extent, k, s, p, d, more in zip(extents, size, *numbers, strict=True):
        if transposed:
            counts.append((extent - 1) * s - 2 * p + d * (k - 1) + more + 1)
        else:
            counts.append(window_count(extent, size=k, stride=s, padding=p, dilation=d))
        if counts[-1] < 1:
            raise ValueError(
                f"a window reaching {d * (k - 1) + 1} px (size {k}, dilation {d}) does not fit {extent} px padded "
                f"to {extent + 2 * p} px; use a larger image, a smaller window, or more padding"
            )
    return counts


@rule(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(
    image: Meta, weight: Meta, bias: Meta | None, stride, padding, dilation, transposed: bool, output_padding, groups: int
) -> Windowed | Additive | NeedsRedistribute:
    if image.ndim != weight.ndim:
        raise NotImplementedError(f"a convolution on tiles wants a batch dim: the image has {image.ndim} dims; add image[None]")
    correlates = weight.is_cut and bias is None and not transposed and groups == 1
    wholes = [(image, (0, 1) if correlates else (1,)), (weight, (0, 1) if correlates else range(weight.ndim))]
    wholes += [] if bias is None else [(bias, (0,))]
    mixed = [(meta, dims) for meta, dims in wholes if any(meta.cuts[dim] for dim in dims)]
    if mixed:
        return NeedsRedistribute(mixed)
    if weight.is_cut:
        return _correlation(image, weight, stride, padding, dilation)
    extents, size = image.shape[2:], weight.shape[2:]
    counts = _output_extents(extents, size, stride, padding, dilation, transposed, output_padding)
    windows = windows_of(extents, counts, size, stride, padding, dilation, transposed)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    stride, dilation = per_dim(stride, len(size)), per_dim(dilation, len(size))

    def prepare(part: LocalBoxes):
        if is_empty(part.reads[0]):
            return partial(_bias_only, size=(*size_of(part.write)[:1], channels, *size_of(part.write)[2:]))
        sides = [_sides(w, part.reads[0][2 + n], part.write[2 + n], transposed) for n, w in enumerate(windows)]
        local = (
            _Transposed(sides, stride, dilation, groups) if transposed else _PlainConvolution(sides, stride, dilation, groups)
        )
        return local

    reach = {2 + n: Spread(w) if transposed else w for n, w in enumerate(windows)}
    return Windowed([Read(image, reach)], [Tile((image.shape[0], channels, *counts))], prepare, splits=True)


def _correlation(image: Meta, weight: Meta, stride, padding, dilation) -> Additive:
    """A convolution whose weight is a cut image: how a double backward writes the weight's gradient.

    The weight's tiles stay where they are; each tile meets the pixels of the image that it multiplies, and the tiles' results
    are added up.
    """
    dims = image.ndim - 2
    stride, dilation, padding = per_dim(stride, dims), per_dim(dilation, dims), per_dim(padding, dims)
    counts = _output_extents(image.shape[2:], weight.shape[2:], stride, padding, dilation, False, [0] * dims)
    windows = [
        Window(counts[n], dilation[n], stride[n], padding[n], image.shape[2 + n], weight.shape[2 + n]) for n in range(dims)
    ]

    def prepare(part: LocalBoxes):
        sides = [_sides(w, part.reads[0][2 + n], part.write[2 + n], False) for n, w in enumerate(windows)]
        extra = _pad_argument(sides)

        def run(image: Tensor, weight: Tensor) -> tuple[Tensor]:
            image = image if extra is None else F.pad(image, extra)
            return (aten.convolution.default(image, weight, None, stride, [0] * dims, dilation, False, [0] * dims, 1),)

        return run

    total = PartialSum(False, (image.shape[0], weight.shape[0], *counts), image.dtype)
    read = Read(image, {2 + n: w for n, w in enumerate(windows)})
    return Additive(read, weight, [total], prepare)


def _bias_only(tile: Tensor, weight: Tensor, bias: Tensor | None = None, *, size: tuple[int, ...]) -> Tensor:
    """Outputs whose windows read no input pixel, as at the end of a transposed convolution with a stride above its size."""
    out = tile.new_zeros(size)
    return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * (out.ndim - 2))


def _sides(window: Window, read: Interval, write: Interval, transposed: bool) -> tuple[int, int]:
    """Pixels to pad before and after, negative to crop: a convolution's input, but to crop a transposed one's output."""
    if transposed:  # all that `read` writes, against what is wanted
        full = window.input_read_by(read)
        return write.start - full.start, full.stop - write.stop
    needed = window.input_read_by(write)
    return read.start - needed.start, needed.stop - read.stop


class _PlainConvolution:
    """A convolution of a box that is zero outside; uses torch's padding argument where that gives the wanted outputs."""

    def __init__(self, sides, stride, dilation, groups) -> None:
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.padding, extra = [], []
        for (before, after), s in zip(sides, stride, strict=True):
            fits = before >= 0 and 0 <= before - after < s  # padding as much after as before gives no further window
            self.padding.append(before if fits else 0)
            extra.append((0, 0) if fits else (before, after))
        self.extra = _pad_argument(extra)

    def __call__(self, tile: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.extra is not None:
            tile = F.pad(tile, self.extra)
        return aten.convolution.default(tile, weight, bias, *self.options)

    @property
    def options(self) -> tuple:
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups

    def attach_grad(self, out: Tensor, tile: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A saved result `out` of a call, with the gradient of that call; only the backward computes anything."""
        if self.extra is not None:
            tile = F.pad(tile, self.extra)
        return _SavedConvolution.apply(out, tile, weight, bias, self.options)


class _SavedConvolution(torch.autograd.Function):
    """A convolution whose result is given."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, tile: Tensor, weight: Tensor, bias: Tensor | None, options: tuple) -> Tensor:
        ctx.save_for_backward(tile, weight)
        ctx.bias, ctx.options = bias, options
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        tile, weight = ctx.saved_tensors
        sizes = None if ctx.bias is None else list(ctx.bias.shape)
        mask = list(ctx.needs_input_grad[1:4])
        return None, *aten.convolution_backward.default(grad, tile, weight, sizes, *ctx.options, mask), None


class _Transposed:
    """A transposed convolution of a box, cropped or padded to the wanted outputs."""

    def __init__(self, sides, stride, dilation, groups) -> None:
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.padding, self.output_padding, extra = [], [], []
        for (before, after), s, d in zip(sides, stride, dilation, strict=True):
            crop = max(0, before)
            more = crop - after
            fits = before >= 0 and 0 <= more < max(s, d)
            self.padding.append(crop if fits else max(0, min(before, after)))
            self.output_padding.append(more if fits else 0)
            extra.append((0, 0) if fits else (self.padding[-1] - before, self.padding[-1] - after))
        self.extra = _pad_argument(extra)

    def __call__(self, tile: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = aten.convolution.default(
            tile,
            weight,
            None if self.extra else bias,
            self.stride,
            self.padding,
            self.dilation,
            True,
            self.output_padding,
            self.groups,
        )
        if self.extra is None:
            return out
        out = F.pad(out, self.extra)
        return out if bias is None else out + bias.view(-1, *[1] * (out.ndim - 2))


def _pad_argument(extra: Sequence[tuple[int, int]]) -> list[int] | None:
    """F.pad's argument, last dim first; None for no padding."""
    if all(pair == (0, 0) for pair in extra):
        return None
    return [number for pair in reversed(extra) for number in pair]


# ---------------------------------------------------------------------------------------------- backward


@rule(aten.convolution_backward.default, aten.convolution_backward_overrideable.default, plain_outputs=(1, 2))
def convolution_backward(
    grad: Meta, image: Meta, weight: Meta, bias_sizes, stride, padding, dilation, transposed: bool, output_padding, groups, mask
) -> Additive | NeedsRedistribute:
    wholes = ((grad, (1,)), (image, (1,)), (weight, range(weight.ndim)))
    mixed = [(meta, dims) for meta, dims in wholes if any(meta.cuts[dim] for dim in dims)]
    is_partial_gradient = weight.layout is None
    if (
        not mixed
        and mask[2]
        and not is_partial_gradient
        and grad.is_cut
        and image.is_cut
        and grad.layout.axes != image.layout.axes
    ):
        mixed = [(grad, range(grad.ndim))]  # a sum over other axes than the image's can only be a partial gradient
    if mixed:
        return NeedsRedistribute(mixed)
    size = weight.shape[2:]
    windows = windows_of(image.shape[2:], grad.shape[2:], size, stride, padding, dilation, transposed)
    forward = {2 + n: Spread(w) if transposed else w for n, w in enumerate(windows)}
    backward = {2 + n: w if transposed else Spread(w) for n, w in enumerate(windows)}
    sums = [
        PartialSum(is_partial_gradient, weight.shape, weight.dtype),
        PartialSum(is_partial_gradient, (grad.shape[1],), weight.dtype),
    ]
    totals = [total if wanted else None for total, wanted in zip(sums, mask[1:], strict=True)]
    call = _ConvolutionBackward(windows, per_dim(stride, len(size)), per_dim(dilation, len(size)), transposed, groups)
    if mask[0]:
        read, over, outs = Read(grad, backward), image, [Tile(image.shape), *totals]
    else:
        read, over, outs = Read(image, forward), grad, [None, *totals]

    def prepare(part: LocalBoxes):
        boxes = (part.reads[0], part.write) if mask[0] else (part.write, part.reads[0])
        return call.prepared(*boxes, mask, with_bias=part.with_own_sum, image_first=not mask[0])

    return Additive(read, over, outs, prepare, own_sum=(grad, (2, _bias_gradient)) if mask[2] else None)


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.sum([0, *range(2, grad.ndim)])


class _ConvolutionBackward:
    """A convolution's backward for a box of the output's gradient and a box of the image."""

    def __init__(self, windows: list[Window], stride, dilation, transposed: bool, groups: int) -> None:
        self.windows, self.stride, self.dilation = windows, stride, dilation
        self.transposed, self.groups = transposed, groups

    def prepared(self, grad_box, image_box, mask: Sequence[bool], *, with_bias: bool, image_first: bool):
        """The local operation: from (grad, image, weight), or with `image_first` (image, grad, weight), the three gradients."""
        pairs = zip(self.windows, image_box[2:], grad_box[2:], strict=True)
        sides = [_sides(w, image, grad, self.transposed) for w, image, grad in pairs]
        local = (_Transposed if self.transposed else _PlainConvolution)(sides, self.stride, self.dilation, self.groups)
        extra, output_padding = local.extra, getattr(local, "output_padding", [0] * len(sides))
        if extra is not None:
            local.padding, output_padding = [0] * len(sides), [0] * len(sides)
            extra = _pad_argument(sides)
        wanted = [mask[0] and not image_first, mask[1], mask[2] and with_bias]
        back = None if extra is None else [-number for number in extra]
        crops = wanted[2] and self.transposed and extra is not None and min(extra) < 0
        wanted[2] = wanted[2] and not crops

        def run(grad: Tensor, image: Tensor, weight: Tensor) -> tuple:
            of_bias = _bias_gradient(grad) if crops else None  # also of output pixels that no input writes: F.pad crops those
            if extra is not None and self.transposed:
                grad = F.pad(grad, extra)
            elif extra is not None:
                image = F.pad(image, extra)
            got = aten.convolution_backward.default(
                grad, image, weight, [weight.shape[1] * self.groups if self.transposed else weight.shape[0]], self.stride,
                local.padding, self.dilation, self.transposed, output_padding, self.groups, wanted,
            )  # fmt: skip
            if back is not None and not self.transposed and got[0] is not None:
                return F.pad(got[0], back), *got[1:]
            return got if of_bias is None else (*got[:2], of_bias)

        return (lambda image, grad, weight: run(grad, image, weight)) if image_first else run


def _twice(image: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """Two convolutions with different halos: some ranks exchange for one of them only, yet all must agree on what is saved."""
    return [F.conv2d(image, b, padding=1), F.conv2d(image, a, stride=2)]


CASES = [
    case("3x3", lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 18, 13), (4, 3, 3, 3), (4,)),
    case("stem", lambda x, w: F.conv2d(x, w, stride=2, padding=3), (2, 3, 37, 23), (4, 3, 7, 7)),
    case("even kernel", lambda x, w, b: F.conv2d(x, w, b), (1, 2, 17, 14), (3, 2, 4, 2), (3,)),
    case("same, even kernel", lambda x, w: F.conv2d(x, w, padding="same"), (1, 2, 17, 14), (3, 2, 4, 3)),
    case("kernel longer than a tile", lambda x, w: F.conv2d(x, w, padding=4), (1, 2, 11, 9), (2, 2, 9, 9)),
    case("stride 3, padding 2, kernel 5", lambda x, w, b: F.conv2d(x, w, b, 3, 2), (2, 2, 31, 17), (3, 2, 5, 5), (3,)),
    case("stride above kernel", lambda x, w: F.conv2d(x, w, stride=3), (1, 2, 19, 16), (3, 2, 2, 1)),
    case("dilation", lambda x, w: F.conv2d(x, w, padding=6, dilation=6), (1, 2, 21, 17), (3, 2, 3, 3)),
    case("dilation and stride", lambda x, w: F.conv2d(x, w, None, 2, 3, 2), (1, 2, 22, 17), (3, 2, 3, 4)),
    case("groups", lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 2), (2, 4, 15, 12), (6, 2, 3, 3), (6,)),
    case("depthwise", lambda x, w: F.conv2d(x, w, None, 2, 2, 1, 4), (2, 4, 15, 12), (4, 1, 5, 5)),
    case("1x1 stride 2", lambda x, w: F.conv2d(x, w, None, 2), (2, 4, 15, 12), (3, 4, 1, 1)),
    case("patches", lambda x, w, b: F.conv2d(x, w, b, 4), (2, 3, 33, 18), (5, 3, 4, 4), (5,)),
    case("rows become few", lambda x, w: F.conv2d(x, w, stride=8, padding=1), (1, 2, 17, 30), (3, 2, 3, 3)),
    case("1-D", lambda x, w: F.conv1d(x, w, None, 2, 2), (2, 3, 29), (4, 3, 5)),
    case("3-D", lambda x, w, b: F.conv3d(x, w, b, (1, 2, 1), 1), (1, 2, 9, 8, 7), (3, 2, 3, 3, 3), (3,)),
    case("transposed 2x2", lambda x, w, b: F.conv_transpose2d(x, w, b, 2), (2, 4, 9, 7), (4, 3, 2, 2), (3,)),
    case("transposed 4x4", lambda x, w: F.conv_transpose2d(x, w, None, 2, 1), (2, 4, 9, 7), (4, 3, 4, 4)),
    case("transposed, stride above kernel", lambda x, w, b: F.conv_transpose2d(x, w, b, 3), (1, 2, 9, 8), (2, 3, 1, 2), (3,)),
    case("transposed, crop above kernel", lambda x, w: F.conv_transpose2d(x, w, None, 2, 2, 1), (1, 3, 9, 11), (3, 2, 1, 1)),
    case(
        "transposed, stride above kernel, frozen image",
        lambda x, w, b: F.conv_transpose2d(x.detach(), w, b, 3) * x.mean(),
        (1, 2, 9, 8), (2, 3, 1, 2), (3,),
    ),  # fmt: skip
    case("transposed, output padding", lambda x, w, b: F.conv_transpose2d(x, w, b, 3, 1, 2), (1, 4, 9, 7), (4, 3, 3, 3), (3,)),
    case("transposed, dilated", lambda x, w: F.conv_transpose2d(x, w, None, 2, 2, 1, 1, 2), (1, 4, 9, 8), (4, 3, 3, 3)),
    case("transposed, groups", lambda x, w: F.conv_transpose2d(x, w, None, 1, 1, 0, 2), (1, 4, 9, 8), (4, 3, 3, 3)),
    case("transposed from one pixel", lambda x, w: F.conv_transpose2d(x, w), (2, 4, 1, 1), (4, 3, 4, 4)),
    case("transposed 3-D", lambda x, w, b: F.conv_transpose3d(x, w, b, 2), (1, 2, 5, 4, 3), (2, 3, 2, 2, 2), (3,)),
    case("image without gradient", lambda x, w, b: F.conv2d(x.detach(), w, b, 2, 1), (2, 3, 21, 16), (4, 3, 3, 3), (4,)),
    case(
        "window does not fit", lambda x, w: F.conv2d(x, w), (1, 2, 4, 4), (2, 2, 7, 7), refuses="(?i)kernel size|does not fit"
    ),
    case("weight is an image", lambda x, w: F.conv2d(x, w, None, 2, 3), (3, 2, 9, 8), (3, 2, 9, 8), tiled=(0, 1)),
    case("bias is an image", lambda x, w, b: F.conv2d(x, w, b), (1, 2, 9, 9), (5, 2, 3, 2), (5,), tiled=(0, 2)),
    case("weight and bias are images", lambda x, w, b: F.conv2d(x, w, b), (1, 2, 9, 9), (4, 2, 7, 7), (4,), tiled=(0, 1, 2)),
    case(
        "grouped weight is an image", lambda x, w: F.conv2d(x, w, None, (2, 1), 2, 1, 3), (1, 3, 9, 8), (3, 1, 5, 4),
        tiled=(0, 1),
    ),
    case(
        "transposed, weight is an image", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1), (1, 3, 9, 8), (3, 2, 5, 4), (2,),
        tiled=(0, 1),
    ),
    case(
        "one image without gradient, two halos",
        lambda x, a, b: _twice(x.detach(), a, b),
        (1, 2, 29, 9),
        (3, 2, 2, 2),
        (3, 2, 3, 3),
    ),
]  # fmt: skip
