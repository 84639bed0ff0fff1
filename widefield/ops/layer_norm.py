"""Layer and RMS norm, forward and backward.

Where no normalized dim is cut, as in channels-last blocks, each tile is normalized by itself.  Else layer norm merges the
rows' statistics as batch norm does, with one message forward and one backward, and cuts a weight of the image's size like the
image.  RMS norm, where it is one operation, makes the normalized dims whole first.

Formulas: Ba et al. 2016, arXiv:1607.06450; Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.layout import layout_of
from widefield.kernels import moments
from widefield.ops.normalization import (
    first_tile,
    gives_partial_gradient,
    layout_for,
    pick,
    reads_and_layouts,
    refuse_cut,
    zeros_of,
)
from widefield.private_torch.decompositions import decomposition_table
from widefield.private_torch.dispatcher import AutoDispatchBelowAutograd
from widefield.private_torch.fake_tensors import runs_on_gpu
from widefield.rules import Meta, PartialSum, Reduced, Tile, case, rule
from widefield.tiled.tensor import TiledTensor

aten = torch.ops.aten


class _Rows:
    """The dims that are normalized together, and the layouts of image, weight and statistics."""

    def __init__(self, images: Sequence[Meta], shape: Sequence[int], *, whole: bool = False) -> None:
        image = images[0]
        self.outer, self.count = image.ndim - len(shape), math.prod(shape)
        self.layout = layout_for(images, range(self.outer, image.ndim) if whole else ())
        cuts, grid = self.layout.cuts, self.layout.grid
        self.is_cut = any(cut is not None for cut in cuts[self.outer :])
        self.of_statistics = layout_of(
            (*image.shape[: self.outer], *[1] * len(shape)), (*cuts[: self.outer], *[None] * len(shape)), grid
        )
        self.of_weight = layout_of(tuple(shape), cuts[self.outer :], grid)
        self.statistics = Tile(self.of_statistics.shape, self.of_statistics.cuts)

    def view(self, tile: Tensor) -> Tensor:
        """(1, rows, pixels): what is normalized together is a row; a copy where the tile allows no such view."""
        return tile.reshape(1, tile.shape[: self.outer].numel(), tile.shape[self.outer :].numel())

    def placed(self, part: Tensor) -> Tensor:
        """A tensor of the whole weight's shape: `part` where this tile's pixels are, zero elsewhere."""
        whole = part.new_zeros(self.of_weight.shape)
        whole[tuple(slice(interval.start, interval.stop) for interval in self.of_weight.box)] = part
        return whole


@rule(aten.native_layer_norm.default)
def layer_norm(image: Meta, shape: Sequence[int], weight, bias, eps: float) -> Reduced:
    refuse_cut("layer norm", weight, bias)
    rows = _Rows([image], shape)
    outs = [Tile(image.shape), rows.statistics, rows.statistics]
    reads = reads_and_layouts([image], rows.layout, weight, bias)
    if rows.is_cut:
        reads["layouts"] = [rows.layout, *[rows.of_weight] * (len(reads["layouts"]) - 1)]
        call = _LayerNorm(rows, image, weight, bias, eps)
        functions = {"local": call.local, "attach_grad": call.attach_grad, "merge": moments.merged, "finish": call.finish}
        return Reduced(dims=range(rows.outer, image.ndim), outs=outs, **functions, **reads)

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        return aten.native_layer_norm.default(tensors[image.number], shape, pick(tensors, weight), pick(tensors, bias), eps)

    return Reduced(dims=(), local=first_tile, outs=outs, finish=finish, **reads)


class _LayerNorm:
    """The functions of the rule where a row's pixels are on several ranks; computes in float32 at least."""

    def __init__(self, rows: _Rows, image: Meta, weight, bias, eps: float) -> None:
        self.rows, self.image, self.weight, self.bias, self.eps = rows, image, weight, bias, eps

    def local(self, tile: Tensor, *affine: Tensor) -> Tensor:
        rows = self.rows.view(tile)
        if rows.numel() == 0:
            return moments.packed_empty(rows.shape[1], tile)
        return moments.packed(*moments.moments_of_rows(rows), rows.shape[2])

    def attach_grad(self, part: Tensor, tile: Tensor, *affine: Tensor) -> Tensor:
        return moments.attach_grad(part, self.rows.view(tile))

    def finish(self, total: Tensor, *tensors: Tensor) -> tuple:
        tile = tensors[self.image.number]
        dtype, shape = moments.statistics_dtype(tile.dtype), self.rows.of_statistics.tile_shape
        mean, var = moments.unpacked(total)
        invstd = moments.invstd_of(var, self.eps)
        mean, var, invstd = (value.to(dtype) for value in (mean, var, invstd))
        out = moments.normalized(self.rows.view(tile).to(dtype), mean, var, None, None, self.eps).view(tile.shape)
        if self.weight is not None:
            out.mul_(pick(tensors, self.weight))
        if self.bias is not None:
            out.add_(pick(tensors, self.bias))
        return out.to(tile.dtype), mean.detach().view(shape), invstd.detach().view(shape)


@rule(aten.native_layer_norm_backward.default, plain_outputs=(1, 2))
def layer_norm_backward(
    grad: Meta, image: Meta, shape: Sequence[int], mean: Meta, invstd: Meta, weight, bias, mask: Sequence[bool]
) -> Reduced:
    refuse_cut("layer norm", weight, bias)
    rows = _Rows([image, grad], shape)
    # A weight of the image's size may also get cut gradients, from pointwise operations; partial ones do not add to those.
    may_be_partial = not rows.is_cut
    affine = [
        PartialSum(gives_partial_gradient(meta) and may_be_partial, tuple(shape), image.dtype if meta is None else meta.dtype)
        if wanted
        else None
        for meta, wanted in zip((weight, bias), mask[1:], strict=True)
    ]
    outs = [Tile(image.shape), *affine]
    reads = reads_and_layouts([image, grad, mean, invstd], rows.layout, weight)
    reads["layouts"] = [rows.layout] * 2 + [rows.of_statistics] * 2 + [rows.of_weight] * (weight is not None)
    call = _LayerNormBackward(rows, (grad, image, mean, invstd, weight, bias), shape, mask, affine)
    if not rows.is_cut:
        return Reduced(dims=(), local=first_tile, outs=outs, finish=call.on_whole_rows, **reads)
    dims = range(rows.outer, image.ndim)
    return Reduced(
        dims=dims, local=call.local, outs=outs, finish=call.finish, by_parts=False, **reads
    )  # its kernels have no gradient


class _LayerNormBackward:
    """The functions of the rule: `on_whole_rows` by torch's kernel where no row is cut, else `local` and `finish`."""

    def __init__(self, rows: _Rows, metas: Sequence[Meta | None], shape: Sequence[int], mask, sums) -> None:
        self.rows, self.metas, self.shape, self.mask, self.sums = rows, metas, shape, mask, sums

    def on_whole_rows(self, total: Tensor, *tensors: Tensor) -> tuple:
        grad, tile, *others = (pick(tensors, meta) for meta in self.metas)
        if tile.numel() == 0:
            return torch.empty_like(tile), *zeros_of(self.sums, tile)
        return aten.native_layer_norm_backward.default(grad, tile, self.shape, *others, self.mask)

    def local(self, tile: Tensor, grad: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None) -> Tensor:
        return moments.gradient_sums(*self._rows_of(tile, grad, weight), mean.view(-1), invstd.view(-1))

    def _rows_of(self, tile: Tensor, grad: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows of the normalized image's gradient, and of the image; float32 at least."""
        dtype = moments.statistics_dtype(tile.dtype)
        grad = grad.to(dtype) if weight is None else grad.to(dtype) * weight
        return self.rows.view(grad).contiguous(), self.rows.view(tile.to(dtype)).contiguous()

    def finish(self, total: Tensor, *tensors: Tensor) -> tuple:
        grad, tile, mean, invstd, weight, _ = (pick(tensors, meta) for meta in self.metas)
        rows = self._rows_of(tile, grad, weight)
        statistics = (mean.view(-1), invstd.view(-1))
        found = None
        if self.mask[0]:
            found = moments.input_gradient(*rows, *statistics, None, total / self.rows.count).view(tile.shape).to(tile.dtype)
        outer, dtype = list(range(self.rows.outer)), tile.dtype if weight is None else weight.dtype
        terms = (lambda: grad * (tile - mean) * invstd, lambda: grad)
        sums = (
            self.rows.placed((term().sum(outer) if outer else term()).to(dtype)) if wanted else None
            for term, wanted in zip(terms, self.mask[1:], strict=True)
        )
        return found, *sums


# ---------------------------------------------------------------------------------------------- RMS norm


@rule(aten._fused_rms_norm.default)
def rms_norm(image: Meta, shape: Sequence[int], weight, eps: float | None) -> Reduced:
    """RMS norm as one operation, as on GPUs; elsewhere it arrives as pointwise operations and a mean."""
    refuse_cut("RMS norm", weight)
    rows = _Rows([image], shape, whole=True)

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile = tensors[image.number]
        if tile.numel() == 0:
            return torch.empty_like(tile), tile.new_empty(rows.of_statistics.tile_shape, dtype=torch.float32)
        return aten._fused_rms_norm.default(tile, shape, pick(tensors, weight), eps)

    outs = [Tile(image.shape), rows.statistics]
    return Reduced(dims=(), local=first_tile, outs=outs, finish=finish, **reads_and_layouts([image], rows.layout, weight))


@rule(aten._fused_rms_norm_backward.default, plain_outputs=(1,))
def rms_norm_backward(grad: Meta, image: Meta, shape: Sequence[int], invstd: Meta, weight, mask: Sequence[bool]) -> Reduced:
    refuse_cut("RMS norm", weight)
    rows = _Rows([image, grad], shape, whole=True)

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile, others = tensors[image.number], (pick(tensors, invstd), pick(tensors, weight))
        if tile.numel() == 0:
            return torch.empty_like(tile), *zeros_of(outs[1:], tile)
        return _rms_backward(tile)(tensors[grad.number], tile, shape, *others, mask)

    dtype = image.dtype if weight is None else weight.dtype
    outs = [Tile(image.shape), PartialSum(gives_partial_gradient(weight), tuple(shape), dtype) if mask[1] else None]
    reads = reads_and_layouts([image, grad, invstd], rows.layout, weight)
    reads["layouts"][2] = rows.of_statistics
    return Reduced(dims=(), local=first_tile, outs=outs, finish=finish, **reads)


def _rms_backward(tile: Tensor) -> Callable[..., tuple]:
    """The backward: the operation on CUDA, torch's decomposition of it elsewhere, where it has no kernel."""
    operation = aten._fused_rms_norm_backward.default
    return operation if runs_on_gpu(tile) else decomposition_table[operation]


class _Fused(torch.autograd.Function):
    """RMS norm by its fused operations, on any device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        with AutoDispatchBelowAutograd():  # above autograd, torch decomposes it on the CPU
            out, invstd = aten._fused_rms_norm.default(x, w.shape, w, 0.1)
        ctx.save_for_backward(x, invstd, w)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, invstd, w = ctx.saved_tensors
        return aten._fused_rms_norm_backward.default(grad, x, w.shape, invstd, w, [True, True])


def _fused(x: Tensor, w: Tensor) -> Tensor:
    on_tiles = TiledTensor in (type(x), type(w))
    return _Fused.apply(x, w) if on_tiles else F.rms_norm(x, w.shape, w, 0.1)


def _penalty(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The first gradient, whose own gradient multiplies weights and tiles pointwise."""
    (grad,) = torch.autograd.grad(F.layer_norm(x, w.shape, w, b).pow(3).sum(), x, create_graph=True)
    return grad


def _after_permute(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), (5,), w, b).movedim(-1, 1)


CASES = [
    case("channels, as a ConvNeXt block does", _after_permute, (2, 5, 17, 11), (5,), (5,)),
    case("channels 3-D", _after_permute, (2, 5, 9, 7, 4), (5,), (5,)),
    case("tokens", lambda x, w, b: F.layer_norm(x.flatten(2).mT, (5,), w, b), (2, 5, 17, 11), (5,), (5,)),
    case("rows without affine", lambda x: F.layer_norm(x, (4,)), (2, 3, 17, 5, 4)),
    case("rows, weight alone", lambda x, w: F.layer_norm(x, (4,), w, None, 0.1), (2, 3, 17, 5, 4), (4,)),
    case("rows, bias alone", lambda x, b: F.layer_norm(x, (4,), None, b), (2, 3, 17, 5, 4), (4,)),
    case("rows, image without gradient", lambda x, w: F.layer_norm(x.detach(), (4,), w), (2, 3, 17, 5, 4), (4,)),
    case("rows, weights from the image", lambda x, b: F.layer_norm(x, (4,), x.mean((0, 1, 2, 3)), b), (2, 3, 17, 5, 4), (4,)),
    case("whole image", lambda x, w, b: F.layer_norm(x, (3, 17, 11), w, b), (2, 3, 17, 11), (3, 17, 11), (3, 17, 11)),
    case("whole image 1-D", lambda x, w, b: F.layer_norm(x, (3, 29), w, b, 0.1), (2, 3, 29), (3, 29), (3, 29)),
    case("whole image without affine", lambda x: F.layer_norm(x, (3, 17, 11)), (2, 3, 17, 11)),
    case("whole image, bias alone", lambda x, b: F.layer_norm(x, (17, 11), None, b), (2, 3, 17, 11), (17, 11)),
    case("whole image far from zero", lambda x, w: F.layer_norm(x * 0.01 + 100, (17, 11), w), (2, 3, 17, 11), (17, 11)),
    case("whole image, no batch", lambda x, w: F.layer_norm(x, (3, 17, 11), w), (3, 17, 11), (3, 17, 11)),
    case("whole image, without gradient", lambda x, w: F.layer_norm(x.detach(), (17, 11), w), (2, 3, 17, 11), (17, 11)),
    case(
        "whole image, weights from it",
        lambda x: F.layer_norm(x, (9, 5), x.mean((0, 1)), x.amax((0, 1))),
        (2, 3, 9, 5),
        refuses="weight, bias or statistics are cut",
    ),
    case("whole image, gradient penalty", _penalty, (2, 3, 17, 11), (17, 11), (17, 11)),
    case("some dims cut, some normalized", lambda x, w, b: F.layer_norm(x, (7, 4), w, b), (2, 3, 9, 7, 4), (7, 4), (7, 4)),
    case("RMS of rows", lambda x, w: F.rms_norm(x, (4,), w), (2, 3, 17, 5, 4), (4,)),
    case("RMS of the image", lambda x, w: F.rms_norm(x, (17, 11), w, 0.1), (2, 3, 17, 11), (17, 11)),
    case("RMS in one kernel, rows", _fused, (2, 3, 17, 5, 4), (4,)),
    case("RMS in one kernel, image", _fused, (2, 3, 17, 11), (17, 11)),
    case(
        "RMS in one kernel, weight cut",
        lambda w, x: _fused(x, w),
        (9,),
        (2, 3, 9),
        refuses="weight, bias or statistics are cut",
    ),
    case("unit length over channels", lambda x: F.normalize(x), (2, 3, 17, 11)),
    case("unit length over pixels", lambda x: F.normalize(x, dim=2), (2, 3, 17, 11)),
]
