"""The arithmetic of batch norm over ranks: statistics, output, gradient and second gradient.

sync_batch_norm.py uses it, and says what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from widefield.geometry.layout import Layout
from widefield.kernels import moments
from widefield.private_torch.fake_tensors import is_emulated, runs_on_gpu
from widefield.private_torch.process_groups import resolve_process_group
from widefield.tiled.partial_gradient import full_value, partial_of
from widefield.tiled.redistribute import move_cuts, to_layout, whole_of
from widefield.tiled.tensor import TiledTensor, wrap

ARE_ROWS: ContextVar[bool] = ContextVar("ARE_ROWS", default=False)
"""Whether the replicas now share one batch, cut by samples; a plain input is then the same on all of them."""


@dataclass(frozen=True)
class StatisticsShare:
    """What this rank contributes to the statistics of the whole batch.

    layout: of a tiled input, with its channels uncut; None for a plain one.
    replicas: how many ranks have the same pixels; each counts them as 1 / replicas.
    tiles: the number of tiles of the input.
    is_inactive: the input is a dummy batch, which contributes nothing.
    """

    layout: Layout | None
    replicas: int
    tiles: int
    is_inactive: bool

    def tile_of(self, tensor: Tensor) -> Tensor:
        """This rank's tile of the input, or of a gradient of the input's shape."""
        return tensor if self.layout is None else to_layout(tensor, self.layout)

    def wrapped(self, tile: Tensor) -> Tensor:
        """The tensor whose tile on this rank is `tile`; tiled if the input is."""
        return tile if self.layout is None else wrap(tile, self.layout)

    def partial(self, sums: Tensor) -> Tensor:
        """Sums over this rank's pixels as a gradient: partial for a tiled input; for a plain one they stay plain."""
        return sums if self.layout is None else partial_of(sums * self.tiles, self.layout.grid)


def share_of(image: Tensor, replicas: int, group: dist.ProcessGroup, *, is_inactive: bool) -> StatisticsShare:
    if type(image) is not TiledTensor:
        return StatisticsShare(None, group.size() if ARE_ROWS.get() else replicas, 1, is_inactive)
    layout = move_cuts(image.tile_layout, [1])
    return StatisticsShare(layout, layout.grid.size // layout.num_shards, layout.num_shards, is_inactive)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one batch, per channel, on the device.  count: the number of values per channel."""

    mean: Tensor
    var: Tensor
    unbiased: Tensor
    count: Tensor


def merged(
    image: Tensor, share: StatisticsShare, running_mean: Tensor | None, group: dist.ProcessGroup, *, number: int = 0
) -> Statistics:
    """The statistics over all ranks' inputs: one message.

    number: the layer's number in its model.
    On the CPU, and on every rank: ValueError for at most one value per channel, RuntimeError if ranks are at different layers.
    On a GPU neither is checked, for that would wait for the device.
    """
    # A NaN in the running mean must not reach the output: plain BatchNorm never reads it in training.
    origin = None if running_mean is None else running_mean.nan_to_num(0, 0, 0)
    tile = share.tile_of(image)
    sums = _sums_about(origin, tile, share, number)
    dist.all_reduce(sums, group=group)
    channels = tile.size(1)
    count = sums[2 * channels]
    if runs_on_gpu(sums):
        divisor: Tensor | float = count.clamp(min=1)
        correction: Tensor | float = divisor / (count - 1).clamp(min=1)
    else:
        divisor, total, squares = (2.0, 0.0, 0.0) if is_emulated(sums) else sums[2 * channels :].tolist()
        _check_numbers(total, squares, number, group)
        if divisor <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {int(divisor)} over all {group.size()} ranks "
                f"(this rank's input: {tuple(image.shape)}); use a larger batch or larger images"
            )
        correction = divisor / (divisor - 1)
    found = _finish(sums[: 2 * channels].view(2, channels), origin, divisor, correction)
    mean, var, unbiased = found.to(moments.statistics_dtype(image.dtype)).unbind()
    return Statistics(mean, var, unbiased, count)


def _check_numbers(total: float, squares: float, number: int, group: dist.ProcessGroup) -> None:
    """RuntimeError unless all ranks sent the same number, as they did if the mean of squares is the square of the mean."""
    if group.size() * squares != total * total:
        raise RuntimeError(
            f"the {group.size()} ranks that share statistics are at different BatchNorms, this one at number {number}, "
            "so their statistics would be mixed up: the forward goes another way on each, by its samples or by chance; let it "
            "call the same layers in the same order on every rank, or set batch_norm=averaged"
        )


def batch_norm_over(
    image: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, group_name: str, replicas: int, is_inactive: bool,
) -> list[Tensor]:  # fmt: skip
    """What the operator `widefield::batch_norm_over` stands for, differentiable: the output and the new running statistics."""
    group = resolve_process_group(group_name)
    share = share_of(image, replicas, group, is_inactive=is_inactive)
    with torch.no_grad():
        whole = merged(image.detach(), share, running_mean, group)
        pairs = ((running_mean, whole.mean), (running_var, whole.unbiased))
        new = [running.lerp(batch.to(running.dtype), momentum) for running, batch in pairs if running is not None]
    return [Normalize.apply(image, weight, bias, whole, eps, group, share), *new]


def _sums_about(origin: Tensor | None, tile: Tensor, share: StatisticsShare, number: int) -> Tensor:
    """This rank's message of 2C + 1 float64 numbers: n * (mean - origin), squared deviations from the origin, and n.

    On the CPU the layer's number and its square follow, by which ranks compare where they are.
    """
    channels = tile.size(1)
    count = 0.0
    if share.is_inactive or tile.numel() == 0:
        pair = tile.new_zeros((2, channels), dtype=torch.float64)
    else:
        count = tile.numel() // channels / share.replicas
        pair = torch.stack(moments.moments_of(tile)).double()
        shift, squares = pair[0], pair[1]
        if origin is not None:
            shift -= origin
        squares.addcmul_(shift, shift)
        pair *= count
    if runs_on_gpu(tile):  # numbers of the host would wait for all that the GPU has to do
        return torch.cat([pair.view(-1), pair.new_full((1,), count)])
    return torch.cat([pair.view(-1), pair.new_tensor([count, number, number * number])])


def _finish(sums: Tensor, origin: Tensor | None, count: Tensor | float, correction: Tensor | float) -> Tensor:
    """Mean, variance and unbiased variance of the whole batch, (3, C), from the sums over all ranks, (2, C).

    count: of the values per channel.  correction: count / (count - 1).
    """
    shift, squares = (sums / count).unbind()
    var = squares.addcmul(shift, shift, value=-1).clamp_(min=0)
    return torch.stack([shift if origin is None else shift + origin, var, var * correction])


class Normalize(torch.autograd.Function):
    """(image - mean) / sqrt(var + eps) * weight + bias, with the gradient through the whole batch's statistics.

    An inactive rank adds nothing to the sums of the backward, and its input gets a gradient of zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        whole: Statistics,
        eps: float,
        group: dist.ProcessGroup,
        share: StatisticsShare,
    ) -> Tensor:
        ctx.save_for_backward(image, weight, whole.mean, whole.var, whole.count)
        ctx.eps, ctx.group, ctx.share = eps, group, share
        return share.wrapped(moments.normalized(share.tile_of(image), whole.mean, whole.var, weight, bias, eps))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _NormalizeBackward.apply(grad, *ctx.saved_tensors, ctx.eps, ctx.group, ctx.share, ctx.needs_input_grad)
        return *found, *[None] * 4


class _NormalizeBackward(torch.autograd.Function):
    """The gradients of image, weight and bias; one message at most.  Its own backward takes its sums over ranks, too."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, image: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, count: Tensor,
        eps: float, group: dist.ProcessGroup, share: StatisticsShare, needed: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.save_for_backward(grad, image, weight, count)
        ctx.eps, ctx.group, ctx.share = eps, group, share
        invstd = moments.invstd_of(var, eps)
        tile = share.tile_of(image)
        grad = moments.in_format_of(tile, share.tile_of(full_value(grad)))
        sums = mean.new_zeros(2, mean.numel()) if share.is_inactive else moments.gradient_sums(grad, tile, mean, invstd)
        grad_input = None
        if needed[0]:
            whole = sums / share.replicas  # weight and bias get this rank's sums, the image's gradient needs those of all ranks
            dist.all_reduce(whole, group=group)
            means = (whole if weight is None else whole * weight.to(whole.dtype)) / count.to(whole.dtype)
            arguments = (grad, tile, mean, invstd, weight, means)
            grad_input = share.wrapped(torch.zeros_like(tile) if share.is_inactive else moments.input_gradient(*arguments))
        dtype = sums.dtype if weight is None else weight.dtype
        return grad_input, *(share.partial(sums[n]).to(dtype) if needed[1 + n] else None for n in (0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, image, weight, count = ctx.saved_tensors
        share = ctx.share
        dtype = moments.statistics_dtype(image.dtype)
        with torch.enable_grad():
            tile, grad = (share.tile_of(full_value(t)).detach().to(dtype).requires_grad_() for t in (image, grad))
            factor = None if weight is None else weight.detach().to(dtype).requires_grad_()
            made = _gradients(tile, grad, factor, count.to(dtype), ctx.eps, partial(_SumOverRanks.apply, ctx.group, share))
            values = [
                None if cotangent is None else _whole_or_tile(cotangent, share, n).to(dtype)
                for n, cotangent in enumerate(cotangents)
            ]
            scores = [(part * cotangent).sum() for part, cotangent in zip(made, values, strict=True) if cotangent is not None]
            score = sum(scores, start=tile.new_zeros(()))
            wanted = [tile, grad, *([] if factor is None else [factor])]
            of_tile, of_grad, *of_factor = torch.autograd.grad(score, wanted, allow_unused=True, materialize_grads=True)
        if share.is_inactive:
            of_tile, of_grad, of_factor = of_tile * 0, of_grad * 0, [part * 0 for part in of_factor]
        wrapped = [share.wrapped(part.to(image.dtype)) for part in (of_grad, of_tile)]
        of_weight = share.partial(of_factor[0]).to(weight.dtype) if of_factor else None
        return *wrapped, of_weight, *[None] * 7


def _gradients(tile: Tensor, grad: Tensor, weight: Tensor | None, count: Tensor, eps: float, total: Callable) -> list[Tensor]:
    """The gradients of image, weight and bias, by differentiable operations; the latter two are sums over this rank's pixels.

    total: sums a tensor over ranks.  Source: Ioffe and Szegedy 2015, section 3.
    """
    dims, shape = [dim for dim in range(tile.ndim) if dim != 1], [-1 if dim == 1 else 1 for dim in range(tile.ndim)]
    centered = tile - (total(tile.sum(dims)) / count).view(shape)
    invstd = (total(centered.square().sum(dims)) / count + eps).rsqrt().view(shape)
    normalized = centered * invstd
    of_weight, of_bias = (grad * normalized).sum(dims), grad.sum(dims)
    means = [(total(sums) / count).view(shape) for sums in (of_bias, of_weight)]
    of_input = invstd * (grad - means[0] - normalized * means[1])
    return [of_input if weight is None else of_input * weight.view(shape), of_weight, of_bias]


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks of each rank's sum over pixels.  The backward is the same sum, since every rank uses the result."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, share: StatisticsShare, part: Tensor) -> Tensor:
        ctx.group, ctx.share = group, share
        whole = part * (0 if share.is_inactive else 1 / share.replicas)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, _SumOverRanks.forward(ctx, ctx.group, ctx.share, grad)


def _whole_or_tile(cotangent: Tensor, share: StatisticsShare, place: int) -> Tensor:
    """The gradient of output `place`: this rank's tile of it for the image's, all of it for those of weight and bias."""
    cotangent = full_value(cotangent)
    if place == 0:
        return share.tile_of(cotangent)
    return whole_of(cotangent) if type(cotangent) is TiledTensor else cotangent
