"""Memory and views of tensors, and wrapper subclasses."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""Makes a tensor of a subclass with a shape, strides and a dtype, and no memory: a TiledTensor, or a gradient's part."""

disabled_torch_function_impl: Any = torch._C._disabled_torch_function_impl
"""As `__torch_function__` it lets a subclass's operations go straight to the dispatcher, without a detour by Python."""

is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Whether autograd knows a tensor as a view of another, so that a write to it is one to the other."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a view shows, None of a tensor that is no view: a write to a view changes that one."""

version_counter: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor and its views were written to in place: a result that was is no more what it was."""

is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Whether two tensors show the same memory, so that a view needs no copy of its pixels sent home."""

storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors show a storage, given by `cdata`: a gradient bucket whose gradients somebody else holds is not reused."""

cdata: Callable[[Any], int] = attrgetter("_cdata")
"""Which C++ object a storage or a generator is: torch makes several Python objects for one."""

foreach_norm: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
"""The norms of many tensors in one kernel, for whether all gradients are finite."""

foreach_mul_: Callable[..., None] = torch._foreach_mul_
"""Scales many tensors in place in one kernel: gradients, where fewer samples counted than were given."""

standard_gamma: Callable[[Tensor], Tensor] = torch._standard_gamma
"""Draws Gamma variates around pixels, as torch.distributions does: a case of a draw that reads values."""

weight_norm: Callable[[Tensor, Tensor, int], Tensor] = torch._weight_norm
"""A weight of a direction and a length, as `torch.nn.utils.weight_norm` makes it: a case of a norm of weights."""


def mark_static(tensor: Any) -> None:
    """Have torch.compile take all sizes of a tensor, or of a class of tensors, for constants; `torch._dynamo` marks them so.

    Which rank sends what depends on a tiled tensor's sizes, so each size of image has a graph of its own.
    """
    tensor._dynamo_static_indices = set(range(64))  # as many dims as a tensor can have
