"""What normalization computes on one rank: mean and variance, the normalized pixels, and the gradients' sums.

Every function takes tensors (N, C, ...) and treats channels apart, by torch's own batch norm kernels; `rows_of` turns what
other norms treat apart into channels.  Mean, variance and invstd (1 / sqrt(var + eps)) are of `statistics_dtype`.  Nothing is
sent: `packed` and `merged` are both ends of the one message that the statistics of a whole take.

Moments and `normalized` are differentiable, once: the kernels' own gradients take statistics for constants, or are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten

CHUNK = 1 << 18
"""Values that a CPU's cache surely holds, 1 MiB in float32."""
SMALLEST_WEIGHT = 1e-30
"""Stands for a weight of 0 where a kernel divides by it: what that adds to a gradient is below float32's smallest step."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 pixels, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def moments_of(image: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel by torch's own stable kernels; `image` must have pixels.

    Backward: one pass over the pixels.
    """
    return _recorded(_moments_of, image)


def _moments_of(image: Tensor) -> tuple[Tensor, Tensor]:
    if image.is_cuda or image.dtype in (torch.float32, torch.float64):
        return torch.batch_norm_update_stats(image, None, None, 0.0)
    # On the CPU, 16-bit inputs give 16-bit statistics unless float32 buffers are passed; these are thrown away.
    unused = torch.zeros(image.size(1), dtype=torch.float32), torch.ones(image.size(1), dtype=torch.float32)
    return torch.batch_norm_update_stats(image, *unused, 0.0)


def moments_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`moments_of` for (1, rows, pixels) in the way of torch's group norm, as exact as that in float32.

    On the CPU 5 times as fast as the batch norm's kernel, if what it normalizes by the way stays in the cache.
    """
    return _recorded(_moments_of_rows, rows)


def _moments_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.is_cuda or not rows.is_contiguous():
        return _moments_of(rows)
    pixels, dtype = rows.size(2), statistics_dtype(rows.dtype)
    means, invstds = [], []
    for chunk in rows.split(max(1, CHUNK // pixels), dim=1):
        count = chunk.size(1)
        ones = None if chunk.dtype == dtype else torch.ones(count, dtype=dtype)  # float32 weights: float32 statistics
        zeros = None if ones is None else torch.zeros_like(ones)
        _, mean, invstd = aten.native_group_norm.default(chunk, ones, zeros, 1, count, pixels, count, 0.0)
        means.append(mean.view(-1))
        invstds.append(invstd.view(-1))
    return torch.cat(means), torch.cat(invstds).pow(-2)


def _recorded(kernel: Callable[[Tensor], tuple[Tensor, Tensor]], image: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's moments, with a gradient where one is wanted; tiles of the engine, which runs below autograd, want none."""
    if torch.is_grad_enabled() and image.requires_grad:
        return _Moments.apply(image, kernel)
    return kernel(image)


class _Moments(torch.autograd.Function):
    """Mean and biased variance; image (N, C, ...)."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, kernel: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        mean, var = kernel(image)
        ctx.save_for_backward(image, mean)
        return mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, None]:
        """grad_mean / n + grad_var * 2 (image - mean) / n: batch norm of the image with another weight and bias."""
        image, mean = ctx.saved_tensors
        count = image.numel() // image.size(1)
        return normalized(image, mean, torch.ones_like(mean), grad_var * (2 / count), grad_mean / count, 0.0), None


# ---------------------------------------------------------------------------------------------- statistics of a whole


def packed(mean: Tensor, var: Tensor, count: int) -> Tensor:
    """A tile's statistics as one message: mean, squared deviations from it, count; 2C + 1 float64 numbers."""
    mean, var = mean.double(), var.double()
    return torch.cat([mean, var * count, mean.new_full((1,), count)])


def attach_grad(part: Tensor, image: Tensor) -> Tensor:
    """The message of a tile's statistics, which is there, with its gradient: nothing is computed until that is asked for."""
    if image.numel() == 0:
        return part
    dtype = statistics_dtype(image.dtype)
    return packed(
        *_recorded(lambda _: tuple(value.to(dtype) for value in unpacked(part)), image), image.numel() // image.size(1)
    )


def packed_nothing(channels: int, like: Tensor) -> Tensor:
    """The message of a tile without pixels."""
    return like.new_zeros(2 * channels + 1, dtype=torch.float64)


def merged(parts: Tensor) -> Tensor:
    """(ways, 2C + 1) messages to that of the whole, by Chan, Golub and LeVeque 1979: no difference of large squares."""
    channels = parts.shape[1] // 2
    means, squares, counts = parts.split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return torch.cat([mean, (squares + counts * (means - mean).square()).sum(0), count])


def unpacked(message: Tensor, *, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance of a message; float64."""
    channels = len(message) // 2
    mean, squares, count = message.split([channels, channels, 1])
    return mean, squares / (count - 1 if unbiased else count)


def invstd_of(var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps)."""
    return torch.rsqrt(var + eps)


# ---------------------------------------------------------------------------------------------- forward


def normalized(image: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(image - mean) / sqrt(var + eps) * weight + bias, in the dtype and memory format of `image`; one pass.

    Backward: to all five tensors, by the kernel of batch norm's backward; two passes.
    """
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    if image.numel() == 0:
        return torch.empty_like(image)
    if torch.is_grad_enabled() and (mean.requires_grad or var.requires_grad):
        return _Normalized.apply(image, mean, var, weight, bias, eps)
    return aten.native_batch_norm.default(image, weight, bias, mean, var, False, 0.0, eps)[0]


class _Normalized(torch.autograd.Function):
    """`normalized`, whose own gradient takes mean and variance for constants."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        ctx.save_for_backward(image, mean, var, weight)
        ctx.eps = eps
        return aten.native_batch_norm.default(image, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        image, mean, var, weight = ctx.saved_tensors
        weight = torch.ones_like(mean) if weight is None else weight  # of the statistics' dtype, as are the sums then
        to_image, to_mean, to_var, to_weight, to_bias, _ = ctx.needs_input_grad
        mask = [to_image, to_weight or to_var, to_bias or to_mean]
        found, along_normalized, along_mean = aten.native_batch_norm_backward.default(
            laid_out_as(image, grad), image, weight, mean, var, None, None, False, ctx.eps, mask
        )
        # The sums are the gradients of weight and bias; mean and variance act on every pixel as these two do.
        grad_mean = -along_mean * weight * invstd_of(var, ctx.eps) if to_mean else None
        grad_var = along_normalized * weight / (-2 * (var + ctx.eps)) if to_var else None
        return found, grad_mean, grad_var, along_normalized if to_weight else None, along_mean if to_bias else None, None


# ---------------------------------------------------------------------------------------------- backward


def laid_out_as(image: Tensor, grad: Tensor) -> Tensor:
    """`grad` in the memory format of `image`: torch's kernels are fast, or right at all, only where the two agree."""
    for memory_format, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if image.dim() == dims and image.is_contiguous(memory_format=memory_format):
            return grad.contiguous(memory_format=memory_format)
    return grad.contiguous()


def gradient_sums(grad: Tensor, image: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """Per channel, the sums of grad * normalized image, and of grad; (2, C) in the statistics' dtype."""
    if image.numel() == 0:
        return mean.new_zeros(2, mean.numel())
    # The kernel's gradients of weight and bias are these sums; a weight of the statistics' dtype makes them of that dtype.
    _, along_normalized, along_mean = aten.native_batch_norm_backward.default(
        grad, image, torch.ones_like(mean), None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack([along_normalized, along_mean])


def input_gradient(grad: Tensor, image: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, means: Tensor) -> Tensor:
    """invstd * (weight * grad - means[1] - normalized image * means[0]), in the dtype of `image`.

    means: (2, C) means over the whole of what is normalized together: of weight * grad * normalized image, of weight * grad.
    """
    if image.numel() == 0:
        return torch.empty_like(image)
    weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    if grad.is_cuda:  # one kernel for all three terms, the one in torch's own SyncBatchNorm; it multiplies by weight last
        weight = torch.where(weight.abs() < SMALLEST_WEIGHT, SMALLEST_WEIGHT, weight)
        along_centred, along_mean = means[0] / weight / invstd, means[1] / weight
        one = torch.ones(1, dtype=torch.int32, device=grad.device)  # the count: these are means already
        return torch.batch_norm_backward_elemt(grad, image, mean, invstd, weight, along_mean, along_centred, one)
    # The two small terms are BatchNorm of the image with another weight and bias, one pass; then the large one is added.
    # 16-bit numbers are widened before, so that each is rounded once; mixed arguments would be copied here anyway.
    wide, wide_grad = image.to(mean.dtype), grad.to(mean.dtype)
    slope, offset = -means[0] * invstd * invstd, -means[1] * invstd
    gradient = aten.native_batch_norm.default(wide, slope, offset, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return gradient.addcmul_(wide_grad, (weight * invstd).view(-1, *[1] * (image.dim() - 2))).to(image.dtype)


# ---------------------------------------------------------------------------------------------- rows


def rows_of(image: Tensor) -> tuple[Tensor, ...]:
    """(N, C, ...) as tensors (1, rows, ...) that share its memory, N * C rows in all: one, or one per channels_last sample."""
    if image.is_contiguous():
        rows = image.shape[0] * image.shape[1]
        return (image.view(1, rows, image.shape[2:].numel()),)
    return image.split(1)


def dense(image: Tensor) -> Tensor:
    """`image` itself where it is contiguous or channels_last, else a contiguous copy."""
    return laid_out_as(image, image)


def image_of(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """The (N, C, ...) that `rows_of` made these of.

    Of a single sample with channels last a kernel takes the first stride for one between channels; convolutions in groups then
    have wrong gradients.  So that stride is a sample's.
    """
    if len(rows) > 1:
        return torch.cat(list(rows))
    image = rows[0].view(like.shape)
    return image if image.is_contiguous() else image.as_strided(image.shape, (image.numel(), *image.stride()[1:]))


def each(run: Callable[..., Any], images: Sequence[Sequence[Tensor]], vectors: Sequence[Tensor | None]) -> list[Any]:
    """`run` on each tensor of `rows_of` of all `images` together, with its rows of the `vectors` (..., N * C)."""
    done, start = [], 0
    for parts in zip(*images, strict=True):
        stop = start + parts[0].shape[1]
        done.append(run(*parts, *(None if vector is None else vector[..., start:stop] for vector in vectors)))
        start = stop
    return done
