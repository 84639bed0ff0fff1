"""The local arithmetic of normalization: mean and variance, normalized pixels, and the sums that gradients need.

Functions take tensors (N, C, ...) and compute per channel, by torch's batch norm kernels.  `rows_of` gives the groups of other
norms the form of channels.  Mean, variance and invstd, which is 1 / sqrt(var + eps), have `statistics_dtype`.  Nothing is sent:
a rank sends what `packed` returns, and `merged` combines what it receives.

`moments_of`, `moments_of_rows` and `normalized` are differentiable, and their gradients once more.  Torch's kernels have no
such gradient: theirs is missing, or takes the statistics for constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.private_torch.fake_tensors import runs_on_gpu

aten = torch.ops.aten

CHUNK = 1 << 18
"""Values that fit into a CPU's cache: 1 MiB in float32."""
SMALLEST_WEIGHT = 1e-30
"""Replaces a weight of 0 where a kernel divides by the weight; what that adds to a gradient is below float32's resolution."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 pixels, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def moments_of(image: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, by torch's numerically stable kernel; `image` must not be empty.

    Backward: one pass over the pixels.
    """
    return _recorded(_moments_of, image)


def _moments_of(image: Tensor) -> tuple[Tensor, Tensor]:
    if runs_on_gpu(image) or image.dtype in (torch.float32, torch.float64):
        return torch.batch_norm_update_stats(image, None, None, 0.0)
    # On the CPU, 16-bit inputs give 16-bit statistics unless float32 buffers are passed; these are thrown away.
    unused = torch.zeros(image.size(1), dtype=torch.float32), torch.ones(image.size(1), dtype=torch.float32)
    return torch.batch_norm_update_stats(image, *unused, 0.0)


def moments_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`moments_of` for (1, rows, pixels), by torch's group norm kernel and as exact as that in float32.

    On the CPU it is 5 times as fast as batch norm's kernel, as long as its normalized output, which is discarded, stays in
    the cache.
    """
    return _recorded(_moments_of_rows, rows)


def _moments_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    if runs_on_gpu(rows) or not rows.is_contiguous():
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
    """The kernel's moments, with a gradient where autograd records; below autograd, as on a TiledTensor's tile, without."""
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
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Tensor, None]:
        """grad_mean / n + grad_var * 2 (image - mean) / n, as a batch norm of the image with that weight and bias."""
        image, mean = ctx.saved_tensors
        count = image.numel() // image.size(1)
        if torch.is_grad_enabled():  # the gradient is differentiated itself
            centered = image - _per_channel(mean, image)
            grad = _per_channel(grad_var * (2 / count), image) * centered + _per_channel(grad_mean / count, image)
            return grad.to(image.dtype), None
        return normalized(image, mean, torch.ones_like(mean), grad_var * (2 / count), grad_mean / count, 0.0), None


# ---------------------------------------------------------------------------------------------- statistics of a whole


def packed(mean: Tensor, var: Tensor, count: int) -> Tensor:
    """A tile's statistics as one message: mean, sum of squared deviations from it, count; 2C + 1 float64 numbers."""
    mean, var = mean.double(), var.double()
    return torch.cat([mean, var * count, mean.new_full((1,), count)])


def attach_grad(part: Tensor, image: Tensor) -> Tensor:
    """A saved message `part` of the tile `image`, with the gradient of computing it; only the backward computes anything."""
    if image.numel() == 0:
        return part
    dtype = statistics_dtype(image.dtype)
    return packed(
        *_recorded(lambda _: tuple(value.to(dtype) for value in unpacked(part)), image), image.numel() // image.size(1)
    )


def packed_empty(channels: int, like: Tensor) -> Tensor:
    """The message of an empty tile."""
    return like.new_zeros(2 * channels + 1, dtype=torch.float64)


def merged(parts: Tensor) -> Tensor:
    """The message of the whole, from the (num_shards, 2C + 1) messages of tiles.

    Source: Chan, Golub and LeVeque 1979; no large squares are subtracted.
    """
    channels = parts.shape[1] // 2
    means, squares, counts = parts.split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return torch.cat([mean, (squares + counts * (means - mean).square()).sum(0), count])


def unpacked(message: Tensor, *, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and variance from a message; float64."""
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
    """`normalized` with a gradient of mean and variance, for the kernel's takes them for constants."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        ctx.save_for_backward(image, mean, var, weight)
        ctx.eps = eps
        return aten.native_batch_norm.default(image, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        image, mean, var, weight = ctx.saved_tensors
        weight = torch.ones_like(mean) if weight is None else weight  # its dtype is that of the sums
        if torch.is_grad_enabled():
            return *_gradients_by_operations(grad, image, mean, var, weight, ctx.eps, ctx.needs_input_grad), None
        to_image, to_mean, to_var, to_weight, to_bias, _ = ctx.needs_input_grad
        mask = [to_image, to_weight or to_var, to_bias or to_mean]
        saved = (mean.new_empty(0),) * 2  # as the forward in evaluation saves; a GPU's kernel does not take None
        found, along_normalized, along_mean = aten.native_batch_norm_backward.default(
            in_format_of(image, grad), image, weight, mean, var, *saved, False, ctx.eps, mask
        )
        # The two sums are the gradients of weight and bias; those of mean and variance follow from them.
        grad_mean = -along_mean * weight * invstd_of(var, ctx.eps) if to_mean else None
        grad_var = along_normalized * weight / (-2 * (var + ctx.eps)) if to_var else None
        return found, grad_mean, grad_var, along_normalized if to_weight else None, along_mean if to_bias else None, None


def _gradients_by_operations(
    grad: Tensor, image: Tensor, mean: Tensor, var: Tensor, weight: Tensor, eps: float, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of image, mean, var, weight and bias in `normalized`, by differentiable operations."""
    grad, invstd = grad.to(mean.dtype), invstd_of(var, eps)
    dims = [dim for dim in range(image.dim()) if dim != 1]
    along_normalized = (grad * (image - _per_channel(mean, image)) * _per_channel(invstd, image)).sum(dims)
    along_mean = grad.sum(dims)
    found = (
        (grad * _per_channel(weight * invstd, image)).to(image.dtype), -along_mean * weight * invstd,
        along_normalized * weight / (-2 * (var + eps)), along_normalized, along_mean,
    )  # fmt: skip
    return tuple(value if wanted else None for value, wanted in zip(found, needed, strict=False))


def _per_channel(vector: Tensor, image: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (image.dim() - 2))


# ---------------------------------------------------------------------------------------------- backward


def in_format_of(image: Tensor, grad: Tensor) -> Tensor:
    """`grad` in the memory format of `image`: some of torch's kernels are slow, or wrong, where the two differ."""
    for memory_format, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if image.dim() == dims and image.is_contiguous(memory_format=memory_format):
            return grad.contiguous(memory_format=memory_format)
    return grad.contiguous()


def gradient_sums(grad: Tensor, image: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """(2, C) in the statistics' dtype: per channel the sum of grad * normalized image, and the sum of grad."""
    if image.numel() == 0:
        return mean.new_zeros(2, mean.numel())
    # These sums are the kernel's gradients of weight and bias; the weight's dtype is theirs.
    _, along_normalized, along_mean = aten.native_batch_norm_backward.default(
        grad, image, torch.ones_like(mean), None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return torch.stack([along_normalized, along_mean])


def input_gradient(grad: Tensor, image: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, means: Tensor) -> Tensor:
    """invstd * (weight * grad - means[1] - normalized image * means[0]), in the dtype of `image`.

    means: (2, C), the means over all pixels of the whole that share statistics of weight * grad * normalized image, and of
        weight * grad.
    """
    if image.numel() == 0:
        return torch.empty_like(image)
    weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    if runs_on_gpu(grad):  # torch's SyncBatchNorm has one kernel for all three terms, which multiplies by weight last
        weight = torch.where(weight.abs() < SMALLEST_WEIGHT, SMALLEST_WEIGHT, weight)
        along_centred, along_mean = means[0] / weight / invstd, means[1] / weight
        one = torch.ones(1, dtype=torch.int32, device=grad.device)  # the count: these are means already
        return torch.batch_norm_backward_elemt(grad, image, mean, invstd, weight, along_mean, along_centred, one)
    # The two small terms are a batch norm of the image with another weight and bias, one pass; then the large one is added.
    # 16-bit numbers are widened first, so that results are rounded once; with mixed dtypes torch would copy here anyway.
    wide, wide_grad = image.to(mean.dtype), grad.to(mean.dtype)
    scale, offset = -means[0] * invstd * invstd, -means[1] * invstd
    gradient = aten.native_batch_norm.default(wide, scale, offset, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return gradient.addcmul_(wide_grad, (weight * invstd).view(-1, *[1] * (image.dim() - 2))).to(image.dtype)


# ---------------------------------------------------------------------------------------------- rows


def rows_of(image: Tensor) -> tuple[Tensor, ...]:
    """Views (1, rows, ...) of an image (N, C, ...), N * C rows in all: one view, or one per sample where not contiguous."""
    if image.is_contiguous():
        rows = image.shape[0] * image.shape[1]
        return (image.view(1, rows, image.shape[2:].numel()),)
    return image.split(1)


def dense(image: Tensor) -> Tensor:
    """`image` itself where it is contiguous or channels_last, else a contiguous copy."""
    return in_format_of(image, image)


def image_of(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """The image (N, C, ...) whose `rows_of` these are.

    A single channels-last sample gets the sample's size as its first stride.  Torch's kernels take it for a stride between
    channels, and with the stride of a view grouped convolutions had wrong gradients.
    """
    if len(rows) > 1:
        return torch.cat(list(rows))
    image = rows[0].view(like.shape)
    return image if image.is_contiguous() else image.as_strided(image.shape, (image.numel(), *image.stride()[1:]))


def each(run: Callable[..., Any], images: Sequence[Sequence[Tensor]], vectors: Sequence[Tensor | None]) -> list[Any]:
    """The results of `run` on each view of `rows_of`, of all `images` together, with its rows of the `vectors` (..., N * C)."""
    done, start = [], 0
    for parts in zip(*images, strict=True):
        stop = start + parts[0].shape[1]
        done.append(run(*parts, *(None if vector is None else vector[..., start:stop] for vector in vectors)))
        start = stop
    return done
