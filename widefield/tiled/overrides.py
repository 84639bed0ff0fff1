"""Operators of torch that are caught before torch takes them apart: for these a rule would come too late.

Rules see what arrives at `__torch_dispatch__`, below autograd.  Torch makes some operators of others above autograd, which on
tiles would gather an image, or write to an empty tensor.  An override is a kernel of ours where torch first meets a tensor
that has a `__torch_dispatch__`, above autograd.  It takes tiled tensors, and hands everything else on to torch's own.

The dispatcher has one table for the whole process, so kernels are put there with the first tiled tensor or the first capture,
and not by an import.  They stay from then on, for only by counting each tensor would one know that the last is gone; whoever
knows may call `remove_overrides`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.library import Library

from widefield.private_torch.dispatcher import DispatchKey, destroy_library, dispatch_keyset_full_after

FIRST_MET = DispatchKey.PythonTLSSnapshot
"""The layer of the dispatcher above all others that a tensor with a `__torch_dispatch__`, or a mode, has."""
BELOW = dispatch_keyset_full_after(FIRST_MET)
"""All layers below it: `operator.redispatch(keys & BELOW, ...)` is what torch itself would do."""

OVERRIDES: dict[str, Callable] = {}
"""Kernels by the operator's name in aten, with its overload."""


def override(*operators: str) -> Callable:
    """Register `kernel(keys, *args)` for operators of aten, as "tensor_split.tensor_indices_or_sections".

    keys: the layers of the call.  AssertionError: one of them has a kernel already.
    """

    def register(kernel: Callable) -> Callable:
        for operator in operators:
            assert operator not in OVERRIDES, f"aten::{operator} has two overrides"
            OVERRIDES[operator] = kernel
        return kernel

    return register


def install_overrides() -> None:
    """Put what is registered before torch's own kernels, for the whole process, unless it is there."""
    if not _INSTALLED:
        _INSTALLED.append(Library("aten", "IMPL"))
        for operator, kernel in OVERRIDES.items():
            _INSTALLED[0].impl(operator, kernel, FIRST_MET.name, with_keyset=True)


def remove_overrides() -> None:
    """Leave torch's operators as they were, until the next tiled tensor is made; tensors that are there are not to be used."""
    while _INSTALLED:
        destroy_library(_INSTALLED.pop())


_INSTALLED: list[Library] = []
