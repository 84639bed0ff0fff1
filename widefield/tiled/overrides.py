"""Overrides of operators that torch decomposes above autograd, where a rule would come too late.

Rules see the operations that arrive at `__torch_dispatch__`, below autograd.  Some operators are decomposed before, into
operations that on tiles would gather an image or write to an empty tensor.  An override is our kernel at the dispatch key by
which torch first handles a tensor with a `__torch_dispatch__`, above autograd.  It handles tiled tensors and redispatches all
others to torch's kernel.

The dispatcher's table belongs to the whole process.  So overrides are installed with the first tiled tensor or the first
capture, not by an import, and stay until `remove_overrides` is called.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.library import Library

from widefield.private_torch.dispatcher import DispatchKey, destroy_library, dispatch_keyset_full_after

FIRST_MET = DispatchKey.PythonTLSSnapshot
"""The first dispatch key of a tensor with a `__torch_dispatch__`, or under a dispatch mode."""
BELOW = dispatch_keyset_full_after(FIRST_MET)
"""All dispatch keys below it: `operator.redispatch(keys & BELOW, ...)` runs torch's own kernel."""

OVERRIDES: dict[str, Callable] = {}
"""Kernels by the operator's name in aten, with its overload."""


def override(*operators: str) -> Callable:
    """Register the decorated kernel(keys, *args) for operators of aten, as "tensor_split.tensor_indices_or_sections".

    keys: the call's dispatch keys.  AssertionError: an operator has an override already.
    """

    def register(kernel: Callable) -> Callable:
        for operator in operators:
            assert operator not in OVERRIDES, f"aten::{operator} has two overrides"
            OVERRIDES[operator] = kernel
        return kernel

    return register


def install_overrides() -> None:
    """Install the registered overrides, for the whole process, unless they are installed."""
    if not _INSTALLED:
        _INSTALLED.append(Library("aten", "IMPL"))
        for operator, kernel in OVERRIDES.items():
            _INSTALLED[0].impl(operator, kernel, FIRST_MET.name, with_keyset=True)


def remove_overrides() -> None:
    """Restore torch's operators, until the next tiled tensor is made.  Existing tiled tensors must not be used any more."""
    while _INSTALLED:
        destroy_library(_INSTALLED.pop())


_INSTALLED: list[Library] = []
