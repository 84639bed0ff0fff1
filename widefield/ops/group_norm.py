"""Group norm, forward and backward, in any number of dims.

Where ranks have whole samples, each normalizes its own.  Else it works like batch norm: one message with statistics forward,
and one with two sums per channel and sample backward, of which every rank computes the gradients of weight and bias, too.

Formulas: Wu & He 2018, arXiv:1803.08494.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.layout import Layout, layout_of
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
from widefield.rules import Meta, PartialSum, Reduced, Tile, case, rule
from widefield.tiled.redistribute import first_cut

aten = torch.ops.aten


@rule(aten.native_group_norm.default)
def group_norm(image: Meta, weight, bias, samples: int, channels: int, pixels: int, groups: int, eps: float) -> Reduced:
    """Normalizes each group of channels of each sample; the rows in here are the channels of all samples."""
    refuse_cut("group norm", weight, bias)
    if _is_by_samples([image]):
        return _of_samples(image, weight, bias, channels, pixels, groups, eps)
    layout, members = layout_for([image], [0, 1]), channels // groups

    def local(tile: Tensor, *affine: Tensor) -> Tensor:
        if tile.numel() == 0:
            return moments.packed_empty(samples * groups, tile)
        found = moments.each(moments.moments_of_rows, [moments.rows_of(moments.dense(tile))], [])
        mean, var = (torch.cat(values).double().view(-1, members) for values in zip(*found, strict=True))
        middle = mean.mean(1)
        spread = (var + (mean - middle[:, None]).square()).mean(1)
        return moments.packed(middle, spread, tile.numel() // (samples * groups))

    def attach_grad(part: Tensor, tile: Tensor, *affine: Tensor) -> Tensor:
        rows = samples * groups
        return moments.attach_grad(part, moments.dense(tile).reshape(1, rows, tile.numel() // rows))

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile = moments.dense(tensors[image.number])
        mean, var = moments.unpacked(total)
        invstd, dtype = moments.invstd_of(var, eps), moments.statistics_dtype(tile.dtype)
        vectors = [value.to(dtype).repeat_interleave(members) for value in (mean, var)]
        vectors += [None if meta is None else pick(tensors, meta).repeat(samples) for meta in (weight, bias)]  # type: ignore
        rows = moments.each(lambda *given: moments.normalized(*given, eps), [moments.rows_of(tile)], vectors)
        return moments.image_of(rows, tile), *(value.to(dtype).view(samples, groups) for value in (mean, invstd))

    outs, dims = [Tile(image.shape), None, None], range(2, image.ndim)
    reads = reads_and_layouts([image], layout, weight, bias)
    return Reduced(dims=dims, local=local, attach_grad=attach_grad, outs=outs, merge=moments.merged, finish=finish, **reads)


@rule(aten.native_group_norm_backward.default, plain_outputs=(1, 2))
def group_norm_backward(
    grad: Meta, image: Meta, mean: Meta, invstd: Meta, weight, samples: int, channels: int, pixels: int, groups: int, mask
) -> Reduced:
    if _is_by_samples([image, grad]):
        return _of_samples_backward(grad, image, mean, invstd, weight, channels, pixels, groups, mask)
    refuse_cut("group norm", weight, mean, invstd)
    layout, members = layout_for([image, grad], [0, 1]), channels // groups
    count, dtype = members * math.prod(image.shape[2:]), moments.statistics_dtype(image.dtype)

    def statistics(*tensors: Tensor) -> list[Tensor]:
        return [value.to(dtype).view(-1).repeat_interleave(members) for value in tensors]

    def local(tile: Tensor, grad_tile: Tensor, mean: Tensor, invstd: Tensor, *weight: Tensor) -> Tensor:
        return torch.cat(moments.each(moments.gradient_sums, _both(grad_tile, tile), statistics(mean, invstd)), dim=1)

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile, scale = tensors[image.number], pick(tensors, weight)
        out = tile.dtype if scale is None else scale.dtype
        sums = [total[n].view(samples, channels).sum(0).to(out) if mask[1 + n] else None for n in (0, 1)]
        if not mask[0]:
            return None, *sums
        scale = None if scale is None else scale.to(total.dtype).repeat(samples)
        means = (total if scale is None else total * scale).view(2, -1, members).sum(2) / count
        vectors = [
            *statistics(pick(tensors, mean), pick(tensors, invstd)),
            scale,
            means.repeat_interleave(members, dim=1),
        ]
        rows = moments.each(moments.input_gradient, _both(tensors[grad.number], tile), vectors)
        return moments.image_of(rows, tile), *sums

    outs, dims = [Tile(image.shape), None, None], range(2, image.ndim)
    reads = reads_and_layouts([image, grad], layout, mean, invstd, weight)
    return Reduced(dims=dims, local=local, outs=outs, finish=finish, by_parts=False, **reads)  # its kernels have no gradient


# ---------------------------------------------------------------------------------------------- whole samples


def _is_by_samples(images: Sequence[Meta]) -> bool:
    """Whether only the batch is cut, so that torch's kernel can run on every tile as it is."""
    layout = first_cut(images).layout
    return layout is not None and layout.cuts[0] is not None and not any(layout.cuts[1:])


def _statistics_of(layout: Layout, groups: int) -> Layout:
    return layout_of((layout.shape[0], groups), (layout.cuts[0], None), layout.grid)


def _of_samples(image: Meta, weight, bias, channels: int, pixels: int, groups: int, eps: float) -> Reduced:
    layout = layout_for([image], ())
    statistics = _statistics_of(layout, groups)

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile = moments.dense(tensors[image.number])
        affine = pick(tensors, weight), pick(tensors, bias)
        return aten.native_group_norm.default(tile, *affine, len(tile), channels, pixels, groups, eps)

    statistic = Tile(statistics.shape, statistics.cuts)
    reads = reads_and_layouts([image], layout, weight, bias)
    return Reduced(dims=(), local=first_tile, outs=[Tile(image.shape), statistic, statistic], finish=finish, **reads)


def _of_samples_backward(
    grad: Meta, image: Meta, mean: Meta, invstd: Meta, weight, channels: int, pixels: int, groups: int, mask: Sequence[bool]
) -> Reduced:
    refuse_cut("group norm", weight)
    layout = layout_for([image, grad], ())

    def finish(total: Tensor, *tensors: Tensor) -> tuple:
        tile = moments.dense(tensors[image.number])
        if tile.numel() == 0:
            return torch.empty_like(tile) if mask[0] else None, *zeros_of(affine, tile)
        given = moments.in_format_of(tile, tensors[grad.number]), tile, tensors[mean.number], tensors[invstd.number]
        return aten.native_group_norm_backward.default(*given, pick(tensors, weight), len(tile), channels, pixels, groups, mask)

    dtype = image.dtype if weight is None else weight.dtype
    affine = [PartialSum(gives_partial_gradient(weight), (channels,), dtype) if wanted else None for wanted in mask[1:]]
    reads = reads_and_layouts([image, grad, mean, invstd], layout, weight)
    reads["layouts"][2:4] = [_statistics_of(layout, groups)] * 2
    return Reduced(dims=(), local=first_tile, outs=[Tile(image.shape), *affine], finish=finish, **reads)


# ---------------------------------------------------------------------------------------------- rows


def _both(grad: Tensor, image: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of a gradient and of its image, in the memory format of the image."""
    image = moments.dense(image)
    return [moments.rows_of(moments.in_format_of(image, grad)), moments.rows_of(image)]


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _penalty(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The first gradient, which the case differentiates again."""
    (grad,) = torch.autograd.grad(F.group_norm(x, 2, w, b).pow(3).sum(), x, create_graph=True)
    return grad


CASES = [
    case("group", lambda x, w, b: F.group_norm(x, 2, w, b), (2, 6, 17, 11), (6,), (6,)),
    case("group, gradient penalty", _penalty, (2, 6, 17, 11), (6,), (6,)),
    case("group 1-D", lambda x, w, b: F.group_norm(x, 3, w, b, 0.1), (2, 6, 29), (6,), (6,)),
    case("group 3-D", lambda x, w, b: F.group_norm(x, 3, w, b), (2, 6, 9, 5, 4), (6,), (6,)),
    case("group without affine", lambda x: F.group_norm(x, 3), (2, 6, 17, 11)),
    case("group, weight alone", lambda x, w: F.group_norm(x, 6, w), (2, 6, 17, 11), (6,)),
    case(
        "group, one weight zero",
        lambda x, w: F.group_norm(x, 2, w * torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])),
        (2, 6, 17, 11),
        (6,),
    ),
    case("group, channels last", lambda x, w, b: F.group_norm(_channels_last(x), 2, w, b), (2, 6, 17, 11), (6,), (6,)),
    case("group far from zero", lambda x, w, b: F.group_norm(x * 0.01 + 100, 2, w, b), (2, 6, 17, 11), (6,), (6,)),
    case("group of (N, C), cut in C", lambda x, w, b: F.group_norm(x, 2, w, b), (9, 6), (6,), (6,)),
    case("group, image without gradient", lambda x, w, b: F.group_norm(x.detach(), 2, w, b), (2, 6, 17, 11), (6,), (6,)),
    case("group, weights from the image", lambda x, b: F.group_norm(x, 2, x.mean((0, 2, 3)), b), (2, 6, 17, 11), (6,)),
    case(
        "group, weight cut", lambda w, x: F.group_norm(x, 3, w), (9,), (2, 9, 5), refuses="weight, bias or statistics are cut"
    ),
]
