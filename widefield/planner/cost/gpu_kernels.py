"""What torch's kernels of CNNs reach on a GPU, however large its peaks are.

A product of many channels reaches a share of the peak, and a sum of two images a share of the bandwidth.  A convolution of few
channels, a normalization or a pooling does not: its threads wait for each other, or there are too few of them, and a GPU with
twice the peak runs it no faster.  So such kernels have rates of their own here, in operations or bytes per second, and
count as slow as the slower of their rate and their share.

The rates were measured on an H100 and an H200 (132 multiprocessors each, torch 2.11, cuDNN 9.19, bfloat16): convolutions and
images with their channels first by a calibration, the rest from the profiles of six models.  benchmarks/results/gpu_ops.json
has these, with four more models that no rate was taken from.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

MULTIPROCESSORS = 132
"""Of the GPUs that were measured: so many channels of an image with its channels first are normalized at a time."""
NORMALIZED = {"native_batch_norm": 1.13e9, "native_batch_norm_backward": 0.59e9}
"""Numbers per second and channel, where channels come first: torch gives each channel one block of threads."""

PRODUCTS = 742e12
"""Operations per second of a convolution of many channels in half precision."""
CHANNELS_OUT, CHANNELS_IN = 95.0, 32.0
"""Of PRODUCTS, 1 - exp(-channels out / 95) is reached, times channels in / 32 where they are fewer."""
CHANNELS_FIRST = 0.75
"""The part of it that is reached in volumes whose channels come first."""
DEPTHWISE = {False: 8.8e12, True: 4.4e12}
"""Bytes per second of a convolution of each channel by itself, over the side of its kernel to 1.4; forward, and backward."""
SUMMED = 0.8e12
"""Bytes per second in half precision of the sum that is a bias's gradient, and of others."""

PER_CHANNEL = {
    "native_batch_norm": (0.0112e12, 0.9e12),
    "native_batch_norm_backward": (0.024e12, 1.6e12),
    "native_layer_norm": (0.0026e12, 0.75e12),
}
"""Bytes per second and channel where channels come last, and the most, in half precision."""
HALF = {
    "native_layer_norm_backward": 0.45e12,
    "upsample_bilinear2d": 0.28e12,
    "upsample_bilinear2d_backward": 0.25e12,
    "upsample_trilinear3d": 0.28e12,
    "upsample_trilinear3d_backward": 0.13e12,
    "upsample_nearest2d": 1.07e12,
    "upsample_nearest2d_backward": 1.1e12,
    "avg_pool2d_backward": 0.25e12,
    "sum": SUMMED,
}
"""Bytes per second in half precision; twice as many in float32, for the numbers are what takes time."""
BIASED = 2.7e12
"""Bytes per second, read and written, of adding a bias."""
POOLED = {"max_pool2d_with_indices": 3.2e12, "max_pool2d_with_indices_backward": 2.4e12}
"""Bytes per second, times the side of the window."""
STEPPED = 2.2e12
"""Bytes per second of a fused step of an optimizer."""
JOINED_LAST = 1.24e12
"""Bytes per second of joining images with their channels last."""
SHORTEST_SECONDS = 3e-6
"""Of any kernel."""


def least_seconds(name: str, signature: Hashable, size: int, dtype: str) -> float:
    """The time that a kernel takes by its own rate; SHORTEST_SECONDS where it has none.

    name: of torch's operation, as in `aten.sum.default`.  size: bytes, read and written.
    """
    kind, tensors = _kind(name), list(tensors_of(signature))
    if not tensors or not size:
        return SHORTEST_SECONDS
    _, shape, strides, of_image = tensors[0]
    if is_one_pass(name, signature):
        kind = {"batch_norm_update_stats": "native_batch_norm", "native_batch_norm": "batch_norm_elemt"}.get(kind, kind)
        dtype = of_image  # that of the result may be the statistics'
    wide = 1 if dtype in ("bfloat16", "float16") else 2
    if "convolution" in kind:
        seconds = _convolution(kind, signature, size, wide)
    elif kind in NORMALIZED and _has_channels_first(shape, strides):
        each = math.prod(shape) / shape[1] / NORMALIZED[kind]
        seconds = each * math.ceil(shape[1] / MULTIPROCESSORS)
    elif kind in PER_CHANNEL:
        by_channel, most = PER_CHANNEL[kind]
        channels = shape[-1] if "layer" in kind else shape[1]
        seconds = size / (wide * min(by_channel * channels, most))
    elif kind in POOLED:
        assert isinstance(signature, tuple)
        window = next(one for one in signature[1] if isinstance(one, tuple) and one and isinstance(one[0], int))
        seconds = size * max(window) / POOLED[kind]
    elif kind == "cat":
        is_last = len(shape) > 3 and not _has_channels_first(shape, strides)
        seconds = size / JOINED_LAST if is_last else 0.0
    elif kind.startswith("_fused"):
        seconds = size / STEPPED
    else:
        seconds = size / (wide * HALF.get(kind, math.inf))
    return max(seconds, SHORTEST_SECONDS)


def is_one_pass(name: str, signature: Hashable) -> bool:
    """Whether a kernel of batch norm moves what it reads and writes once: its statistics are given, or all that it takes."""
    kind = _kind(name)
    if kind in ("batch_norm_update_stats", "batch_norm_backward_elemt"):
        return True
    if kind not in ("native_batch_norm", "native_batch_norm_backward") or not isinstance(signature, tuple):
        return False
    args = signature[1]
    return not args[5] if kind == "native_batch_norm" else not args[9][0]


def _kind(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def _convolution(kind: str, signature: Hashable, size: int, wide: int) -> float:
    assert isinstance(signature, tuple)
    is_backward = "backward" in kind
    args = signature[1][1:] if is_backward else signature[1]
    image, weight, groups = args[0], args[1], args[-2 if is_backward else -1]
    if not all(isinstance(one, tuple) and one[:1] == ("tensor",) for one in (image, weight)):
        return 0.0
    if groups > 1 and weight[1][1] == 1:
        seconds = size * weight[1][-1] ** 1.4 / DEPTHWISE[is_backward]
    elif wide > 1:
        return 0.0
    else:
        first = len(image[1]) > 4 and _has_channels_first(image[1], image[2])
        channels = weight[1][0] // groups, weight[1][1]  # of a transposed one those into it come first
        rate = PRODUCTS * channels_reach(*channels[:: -1 if args[6] else 1]) * (CHANNELS_FIRST if first else 1.0)
        seconds = convolution_flops(kind, signature) / rate
    return seconds + _bias(is_backward, signature)


def _bias(is_backward: bool, signature: tuple) -> float:
    """A bias is added in a kernel of its own, and its gradient is a sum in another."""
    if is_backward:
        return 2 * math.prod(signature[1][0][1]) / SUMMED if signature[1][-1][2] else 0.0
    flops, weight = convolution_flops("convolution", signature), signature[1][1][1]
    return 0.0 if signature[1][2] is None else 2 * flops / math.prod(weight[1:]) / BIASED


def channels_reach(out: int, into: int) -> float:
    """The part of what many channels reach that a convolution reaches of so many channels, out of a group and into it."""
    return (1 - math.exp(-out / CHANNELS_OUT)) * min(1.0, into / CHANNELS_IN)


def convolution_flops(kind: str, signature: Hashable) -> float:
    """Operations of a convolution, by its groups; torch's FlopCounterMode counts a grouped one's backward as if it had none."""
    assert isinstance(signature, tuple)
    args = signature[1]
    if "backward" in kind:
        grad, image, weight, is_transposed, mask = args[0][1], args[1][1], args[2][1], args[7], args[-1]
        return 2.0 * math.prod(image if is_transposed else grad) * math.prod(weight[1:]) * sum(mask[:2])
    image, weight, (strides, pads, dilations, is_transposed) = args[0][1], args[1][1], args[3:7]
    if is_transposed:
        return 2.0 * math.prod(image) * math.prod(weight[1:])
    sides = [
        (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for side, pad, dilation, kernel, stride in zip(image[2:], pads, dilations, weight[2:], strides, strict=False)
    ]
    return 2.0 * image[0] * weight[0] * math.prod(sides) * math.prod(weight[1:])


def tensors_of(signature: Hashable) -> Iterator[tuple]:
    """("tensor", shape, strides, dtype) of each tensor in a signature, lists of tensors with them."""
    if isinstance(signature, tuple):
        if signature and signature[0] == "tensor" and len(signature) == 4:
            yield signature
        else:
            for one in signature:
                yield from tensors_of(one)


def _has_channels_first(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return len(shape) > 2 and shape[1] > 1 and strides[1] != 1 and max(shape[2:]) > 1
