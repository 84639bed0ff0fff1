"""A GPU's autocast for a step that is emulated with tensors of a CPU, whose own autocast casts other operations.

Which operations each casts is what torch has registered for it (`aten::layer_norm` has a kernel for AutocastCUDA and none for
AutocastCPU); see also https://docs.pytorch.org/docs/stable/amp.html, "CUDA ops that autocast to float32".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from widefield.private_torch.pytree import tree_map

FLOAT32 = frozenset(
    "layer_norm group_norm rms_norm logsumexp softplus exp expm1 log log10 log1p log2 pow __pow__ reciprocal rsqrt "
    "sinh cosh tan acos asin erfinv cosine_similarity norm linalg_vector_norm linalg_matrix_norm dist renorm "
    "interpolate".split()
)
"""A GPU casts their arguments to float32."""
DTYPE = frozenset(["softmax", "log_softmax", "sum", "cumsum", "cumprod"])
"""A GPU has them compute in float32, without a copy of their argument."""
AS_THEY_ARE = frozenset(
    "avg_pool3d adaptive_avg_pool3d max_pool3d adaptive_max_pool3d max_unpool2d max_unpool3d pad fft_fft2 fft_rfft2".split()
)
"""A CPU casts to float32, a GPU does not."""
LOW = (torch.bfloat16, torch.float16)


class GpuAutocast(TorchFunctionMode):
    """Inside, where autocast is on, operations have the dtypes that a GPU would give them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if name in AS_THEY_ARE:
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        if name in DTYPE and kwargs.get("dtype") is None and _is_low(args[0] if args else kwargs.get("input")):
            return func(*args, **(kwargs | {"dtype": torch.float32}))
        if name in FLOAT32 and kwargs.get("mode") != "area":
            args, kwargs = tree_map(_float32, (args, kwargs))
        return func(*args, **kwargs)


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW


def _float32(value: Any) -> Any:
    return value.float() if _is_low(value) else value
