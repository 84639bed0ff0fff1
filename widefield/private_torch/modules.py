"""What an nn.Module holds, and base classes of torch's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.utils import parametrize

BatchNorm = batchnorm._BatchNorm
"""The class of every batch norm."""

NormBase = batchnorm._NormBase
"""The class of every norm with running statistics: batch and instance norms."""

InstanceNorm = instancenorm._InstanceNorm
"""The class of every instance norm."""

DropoutNd = dropout._DropoutNd
"""The class of every dropout."""

parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""A module's own parameters by name: the very dict, in which others may stand while the module runs."""

buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""A module's own buffers by name: the very dict, as with parameters."""

modules_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""A module's own children by name: the very dict."""

MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module holds these."""

forward_pre_hooks_of: Callable[[nn.Module], Mapping[int, Any]] = attrgetter("_forward_pre_hooks")
"""What runs before a module's forward: weight and spectral norms make the weight anew there."""

forward_hooks_of: Callable[[nn.Module], Mapping[int, Any]] = attrgetter("_forward_hooks")
"""What runs after a module's forward, with its output."""

backward_hooks_of: Callable[[Tensor], Mapping[int, Any] | None] = attrgetter("_backward_hooks")
"""The hooks of a tensor, None of one that never had any: those of a sharded parameter would never run."""

RNN_MEMBERS = ("_flat_weights", "_flat_weight_refs")
"""The attributes in which a recurrent layer lists its own weights again, in every forward."""

call_impl_of: Callable[[Any], Callable] = attrgetter("_call_impl")
"""A module's call with its hooks, uncompiled; of `super()`, that of the next class."""

compiled_call_impl_of: Callable[[nn.Module], Callable | None] = attrgetter("_compiled_call_impl")
"""What `module.compile()` has made of a module's call, else None."""


def weight_made_by(hook: Any) -> str:
    """The attribute that a hook of torch.nn.utils sets: weight and spectral norm say it by `name`, pruning otherwise."""
    return getattr(hook, "name", getattr(hook, "_tensor_name", ""))


def parametrize_cache() -> tuple[int, dict]:
    """How many `torch.nn.utils.parametrize.cached()` are open, and the weights that they keep."""
    return parametrize._cache_enabled, parametrize._cache  # type: ignore[return-value]


def set_parametrize_cache(cached: tuple[int, dict]) -> None:
    """Put another cache in its place: weights that a capture makes of fake tensors must not be kept for real calls."""
    parametrize._cache_enabled, parametrize._cache = cached
