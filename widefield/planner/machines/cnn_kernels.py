"""The kernels that CNNs are made of, at the shapes that CNNs have: what a calibration times."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import torch

from widefield.planner.step_record import OpEvent


def cnn_kernels(device: torch.device) -> Iterator[OpEvent]:
    """Events of the operations that CNNs are made of, the most telling first.

    GPUs are asked in half precision too, whose images have their channels last, and for LARGER batches first: what fills a
    core of a CPU takes a GPU no longer than its launch.
    """
    if device.type != "cuda":
        for dtype in ("float32", "float64"):
            yield from _kernels(dtype, CONVOLUTIONS[: 8 if dtype == "float64" else None])
        return
    for times in (LARGER, 1):
        for dtype in ("bfloat16", "float32", "float16"):
            yield from _kernels(dtype, CONVOLUTIONS, times)


def _kernels(dtype: str, convolutions: Iterable[tuple[int, ...]], times: int = 1) -> Iterator[OpEvent]:
    """times: of the batches in the tables below."""
    last = dtype in ("bfloat16", "float16")
    for batch, channels, size, out, kernel, stride in convolutions:
        yield from convolution((times * batch, channels, size, size), out, kernel, stride, dtype, last=last)
    for batch, channels, size, kernel, stride in DEPTHWISE:
        shape = (times * batch, channels, size, size)
        yield from convolution(shape, channels, kernel, stride, dtype, groups=channels, last=last)
    for batch, channels, size, out, kernel in VOLUMES:
        yield from convolution((times * batch, channels, size, size, size), out, kernel, 1, dtype, last=last)
    for rows, inner, columns in ((8, 512, 1000), (512, 512, 512), (64, 2048, 1000)):
        yield product(times * rows, inner, columns, dtype)
    for batch, channels, size in ((8, 64, 32), (8, 64, 64), (4, 256, 16), (2, 32, 256)):
        for is_last in (False, True) if last else (False,):
            yield from pointwise((times * batch, channels, size, size), dtype, last=is_last)
    for numbers in (512, 2**16, 2**20, 2**22):
        yield from optimizer_steps(numbers, dtype)


CONVOLUTIONS = (
    (8, 64, 32, 64, 3, 1), (8, 64, 32, 256, 1, 1), (8, 128, 16, 128, 3, 1), (8, 3, 64, 64, 7, 2), (8, 256, 8, 256, 3, 1),
    (8, 512, 4, 512, 3, 1), (4, 512, 16, 128, 1, 1), (4, 64, 64, 128, 3, 2), (2, 32, 128, 32, 3, 1), (8, 256, 16, 512, 1, 2),
    (32, 64, 16, 64, 3, 1), (2, 16, 256, 16, 3, 1), (4, 16, 64, 16, 3, 1), (4, 32, 64, 32, 3, 1), (8, 3, 64, 16, 3, 1),
    (8, 3, 64, 64, 3, 1), (4, 16, 64, 32, 1, 2), (4, 32, 32, 64, 1, 2), (4, 16, 64, 32, 3, 2), (4, 32, 32, 64, 3, 2),
    (4, 64, 64, 32, 3, 1), (4, 256, 16, 64, 3, 1), (4, 128, 16, 512, 1, 1), (4, 512, 4, 2048, 1, 1), (4, 1024, 8, 256, 1, 1),
    (4, 16, 64, 3, 1, 1), (4, 32, 32, 16, 1, 1), (4, 128, 32, 32, 3, 1), (4, 64, 28, 64, 1, 1), (4, 256, 28, 64, 1, 1),
    (4, 64, 28, 256, 1, 1), (4, 512, 14, 128, 1, 1), (4, 256, 7, 1024, 1, 1), (4, 1024, 7, 256, 1, 1), (4, 256, 7, 256, 3, 1),
    (4, 1024, 7, 2048, 1, 2), (4, 512, 7, 512, 3, 1), (4, 512, 2, 512, 3, 1), (4, 512, 2, 2048, 1, 1), (4, 2048, 2, 512, 1, 1),
)  # fmt: skip
"""Batch, channels, pixels a side, channels out, kernel, stride: of ResNets, DenseNets and U-Nets."""

LARGER = 64
"""Times the batches of the tables, with which kernels of GPUs take 0.1 ms and more."""

DEPTHWISE = ((4, 96, 32, 3, 1), (4, 96, 32, 3, 2), (4, 240, 16, 5, 1), (4, 128, 32, 7, 1))
"""Batch, channels, pixels a side, kernel, stride: of MobileNets, EfficientNets and ConvNeXts."""

VOLUMES = ((1, 16, 32, 32, 3), (2, 8, 32, 16, 3), (1, 32, 16, 32, 3), (2, 8, 32, 3, 1))
"""Batch, channels, voxels a side, channels out, kernel: of U-Nets."""


def spec(shape: tuple[int, ...], dtype: str, *, last: bool = False) -> tuple:
    """A dense tensor in a signature, row-major or with its channels last."""
    order = (0, *range(2, len(shape)), 1) if last else range(len(shape))
    strides, stride = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim], stride = stride, stride * shape[dim]
    return ("tensor", shape, tuple(strides), dtype)


def event(name: str, args: tuple, *, flops: float, read: int, written: int, dtype: str) -> OpEvent:
    """read, written: numbers, whose bytes are those of `dtype`."""
    size = {"float64": 8, "float32": 4}.get(dtype, 2)
    return OpEvent(name, "forward", "", (name, args, ()), flops, read * size, written * size, dtype)


def convolution(
    shape: tuple[int, ...], out: int, kernel: int, stride: int, dtype: str, *, groups: int = 1, last: bool = False
) -> Iterator[OpEvent]:
    """Forward and backward of a convolution that keeps the size, up to its stride.  last: of images with channels last."""
    dims = len(shape) - 2
    weight = (out, shape[1] // groups, *[kernel] * dims)
    image_out = (shape[0], out, *((size - 1) // stride + 1 for size in shape[2:]))
    x, w, y = math.prod(shape), math.prod(weight), math.prod(image_out)
    flops = 2.0 * y * w / out
    rest = ((stride,) * dims, (kernel // 2,) * dims, (1,) * dims, False, (0,) * dims, groups)
    image, kernels, grad = (spec(one, dtype, last=last) for one in (shape, weight, image_out))
    forward = (image, kernels, None, *rest)
    yield event("aten.convolution.default", forward, flops=flops, read=x + w, written=y, dtype=dtype)
    backward = (grad, image, kernels, (0,), *rest, (True, True, False))
    yield event("aten.convolution_backward.default", backward, flops=2 * flops, read=y + x + w, written=x + w, dtype=dtype)


def product(rows: int, inner: int, columns: int, dtype: str) -> OpEvent:
    args = (spec((rows, inner), dtype), spec((inner, columns), dtype))
    read = rows * inner + inner * columns
    return event("aten.mm.default", args, flops=2.0 * rows * inner * columns, read=read, written=rows * columns, dtype=dtype)


def pointwise(shape: tuple[int, ...], dtype: str, *, last: bool = False) -> Iterator[OpEvent]:
    """What is bound by memory: additions, ReLU, batch norm, pooling, copies.  last: of images with channels last."""
    x, channels = math.prod(shape), shape[1]
    image, channel = spec(shape, dtype, last=last), spec((channels,), dtype)
    one = functools.partial(event, flops=0.0, dtype=dtype)
    yield one("aten.add.Tensor", (image, image), read=2 * x, written=x)
    yield one("aten.add_.Tensor", (image, image), read=2 * x, written=x)
    yield one("aten.relu.default", (image,), read=x, written=x)
    yield one("aten.relu_.default", (image,), read=x, written=x)
    yield one("aten.threshold_backward.default", (image, image, 0), read=2 * x, written=x)
    yield one("aten.clone.default", (image,), read=x, written=x)
    norm = (image, channel, channel, channel, channel, True, 0.1, 1e-5)
    yield one("aten.native_batch_norm.default", norm, read=x + 4 * channels, written=x + 2 * channels)
    statistics_of = (channel, channel, channel, channel, channel, True, 1e-5, (True, True, True))
    backward = (image, image, *statistics_of)
    yield one("aten.native_batch_norm_backward.default", backward, read=2 * x + 5 * channels, written=x + 2 * channels)
    yield one("aten.max_pool2d_with_indices.default", (image, (3, 3), (2, 2), (1, 1)), read=x, written=x // 4 * 3)
    yield one("aten.max_pool2d_with_indices.default", (image, (2, 2), (2, 2)), read=x, written=x // 4 * 3)
    yield one("aten.mean.dim", (image, (-1, -2), True), read=x, written=shape[0] * channels)
    yield one("aten.cat.default", ((image, image), 1), read=2 * x, written=2 * x)
    yield from _activations(image, x, one)
    yield from _resized(shape, image, dtype, last=last)


def _activations(image: tuple, x: int, one: Callable[..., OpEvent]) -> Iterator[OpEvent]:
    for name in ("silu", "gelu", "hardswish", "leaky_relu", "sigmoid"):
        yield one(f"aten.{name}.default", (image,), read=x, written=x)
    for name in ("silu_backward", "gelu_backward", "hardswish_backward", "sigmoid_backward"):
        yield one(f"aten.{name}.default", (image, image), read=2 * x, written=x)
    yield one("aten.leaky_relu_backward.default", (image, image, 0.01, False), read=2 * x, written=x)
    yield one("aten.mul.Tensor", (image, image), read=2 * x, written=x)


def _resized(shape: tuple[int, ...], image: tuple, dtype: str, *, last: bool) -> Iterator[OpEvent]:
    """To twice the size, and the gradient back; of images alone."""
    large = (shape[0], shape[1], *(2 * size for size in shape[2:]))
    x, y, wide = math.prod(shape), math.prod(large), spec(large, dtype, last=last)
    one = functools.partial(event, flops=0.0, dtype=dtype)
    yield one("aten.upsample_bilinear2d.default", (image, large[2:], False), read=x, written=y)
    yield one("aten.upsample_bilinear2d_backward.default", (wide, large[2:], shape, False), read=y, written=x)
    yield one("aten.upsample_nearest2d.default", (image, large[2:]), read=x, written=y)
    yield one("aten.upsample_nearest2d_backward.default", (wide, large[2:], shape), read=y, written=x)


def optimizer_steps(numbers: int, dtype: str) -> Iterator[OpEvent]:
    """What optimizers do with each weight."""
    weight, one = spec((numbers,), dtype), functools.partial(event, flops=0.0, dtype=dtype)
    yield one("aten.mul_.Tensor", (weight, 0.9), read=numbers, written=numbers)
    yield one("aten.add_.Tensor", (weight, weight), read=2 * numbers, written=numbers)
    yield one("aten.lerp_.Scalar", (weight, weight, 0.1), read=2 * numbers, written=numbers)
    yield one("aten.addcmul_.default", (weight, weight, weight), read=3 * numbers, written=numbers)
    yield one("aten.addcdiv_.default", (weight, weight, weight), read=3 * numbers, written=numbers)
    yield one("aten.sqrt.default", (weight,), read=numbers, written=numbers)
    yield one("aten._foreach_mul_.Scalar", ((weight,) * 4, 0.9), read=4 * numbers, written=4 * numbers)
    yield one("aten._foreach_add_.List", ((weight,) * 4, (weight,) * 4), read=8 * numbers, written=4 * numbers)
