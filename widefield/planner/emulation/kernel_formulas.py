"""What kernels of the CPU allocate for themselves, where their source tells it in a line.

Of ATen's native CPU kernels (aten/src/ATen/native, torch 2.14).  What is not here is run once and read; see kernel_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from widefield.private_torch.dispatcher import schema_of
from widefield.private_torch.pytree import tree_leaves

_WITHOUT = {
    "_foreach_copy_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_local_scalar_dense", "_to_copy", "arange",
    "as_strided_", "cat", "clone", "copy_", "device", "empty", "empty_like", "empty_permuted", "empty_strided", "fill_",
    "full", "full_like", "lift_fresh", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "record_stream", "resize_", "scalar_tensor", "set_", "stack", "zero_", "zeros", "zeros_like",
}  # fmt: skip
"""Kernels that only write their results."""
_DOUBLE = 8


def formula_bytes(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], threads: int) -> int | None:
    """The bytes that an operation holds beside its arguments and results; None: no formula is known here.

    name: with its overload.  threads: of the process that runs it.
    """
    base = name.split(".")[1] if "." in name else name
    if getattr(func, "is_view", False) or base in _WITHOUT or name.startswith("profiler."):
        return 0
    if base in _FORMULAS:
        return _FORMULAS[base](args, threads)
    if torch.Tag.pointwise in getattr(func, "tags", ()):
        return _pointwise(func, args, kwargs)
    return None


def _pointwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Nothing, but for a number in a tensor's place: a double and its copy in the tensor's type (wrapped_scalar_tensor).

    None: of types that differ, which are cast to a common one first (TensorIterator), and of lists of tensors.
    """
    tensors = [leaf for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]
    if not tensors or len({tensor.dtype for tensor in tensors}) > 1 or not tensors[0].is_floating_point():
        return None
    wrapped = [
        value
        for value, argument in zip(args, schema_of(func).arguments, strict=False)
        if isinstance(value, Number) and str(argument.type) == "Tensor"
    ]
    if not wrapped:
        return 0 if schema_of(func).overload_name == "Tensor" or not _numbers(args) else None
    return _DOUBLE + (tensors[0].element_size() if tensors[0].dtype != torch.float64 else 0)


def _numbers(args: Sequence[Any]) -> bool:
    return any(isinstance(value, Number) for value in args)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _batch_norm(args: Sequence[Any], threads: int) -> int | None:
    """Two sums of each channel (Normalization.cpp, batch_norm_cpu_update_stats_template), for row-major images."""
    image, weight, training = args[0], args[1], args[5]
    if not _row_major(image) or not training or not _same_type(image, weight):
        return None
    return 2 * image.shape[1] * image.element_size()


def _batch_norm_backward(args: Sequence[Any], threads: int) -> int | None:
    """One more image (batch_norm_backward_cpu_template), for row-major images."""
    gradient, image, weight, training = args[0], args[1], args[2], args[7]
    if not (_row_major(image) and _row_major(gradient)) or not training or not _same_type(image, weight):
        return None
    return _bytes_of(image)


def _row_major(image: Tensor) -> bool:
    """An image of several pixels as rows of rows: of one pixel the kernels take it for channels last."""
    pixels = image.shape[2:].numel()
    return image.ndim > 2 and pixels > 1 and image.shape[1] > 1 and image.is_contiguous()


def _same_type(image: Tensor, weight: Tensor | None) -> bool:
    return image.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == image.dtype)


def _layer_norm(args: Sequence[Any], threads: int) -> int:
    """A contiguous copy, where the argument is none (layer_norm_cpu)."""
    return 0 if args[0].is_contiguous() else _bytes_of(args[0])


def _layer_norm_backward(args: Sequence[Any], threads: int) -> int:
    """Contiguous copies, and the sums of weight and bias of each thread (layer_norm_kernel.cpp)."""
    gradient, image, normalized = args[0], args[1], args[2]
    copies = sum(_bytes_of(tensor) for tensor in (gradient, image) if not tensor.is_contiguous())
    size = 1
    for extent in normalized:
        size *= extent
    return copies + 2 * threads * size * image.element_size()


def blocked_bytes(args: Sequence[Any], place: int) -> int:
    """Of a convolution of row-major images that oneDNN runs on blocks of 16 channels (AVX-512), without its scratch.

    args: of aten.convolution (place 0) or of its backward (place 1).  Copies in blocks are made of the image, the weight and
    the result; the result's is freed when it is back in rows.
    """
    image, weight = args[place : place + 2]
    result = args[0] if place else None
    of_weight = _bytes_of(weight)
    if result is None:
        return _in_blocks(image) + of_weight
    both = _in_blocks(image) + of_weight + _in_blocks(result)
    data = max(both, _in_blocks(image) + _bytes_of(image)) if args[10][0] else 0
    kept = (_bytes_of(image) if args[10][0] else 0) + of_weight
    return max(data, kept - of_weight + both) - kept


def _in_blocks(image: Tensor) -> int:
    return _bytes_of(image) // max(1, image.shape[1]) * (-(-image.shape[1] // 16) * 16)


def _products(args: Sequence[Any], threads: int) -> int | None:
    """Nothing, for matrices whose rows or columns lie one after the other, as BLAS takes them.  None: of other ones."""
    matrices = [tensor for tensor in args if isinstance(tensor, Tensor) and tensor.ndim > 1]
    return 0 if all(1 in tensor.stride()[-2:] and tensor.dtype == torch.float32 for tensor in matrices) else None


_FORMULAS: dict[str, Callable[[Sequence[Any], int], int | None]] = {
    "addmm": _products,
    "mm": _products,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}
