"""What a GPU runs where it is not the operation that was recorded.

Steps are emulated with tensors of a CPU.  A GPU has a kernel of its own for attention, and its batch norm keeps float32
statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def gpu_function(name: str, args: tuple) -> tuple[Callable[..., Any], tuple] | None:
    """The function and its arguments for an operation, as `aten.native_batch_norm_backward.default`; None: the recorded one."""
    kind = name.split(".")[1]
    make = _MADE.get(kind)
    return None if make is None else make(args)


def _batch_norm_backward(args: tuple) -> tuple[Callable[..., Any], tuple]:
    """grad, input, weight, running mean, running var, saved mean, saved 1/std, train, eps, mask."""
    statistics = (None if one is None else one.float() for one in args[2:7])
    return torch.ops.aten.native_batch_norm_backward.default, (*args[:2], *statistics, *args[7:])


def _attention(args: tuple) -> tuple[Callable[..., Any], tuple]:
    """query, key, value, then perhaps the share that is dropped, and whether it is causal."""
    causal = bool(args[4]) if len(args) > 4 else False
    return (lambda *heads: F.scaled_dot_product_attention(*heads, is_causal=causal)), args[:3]


def _attention_backward(args: tuple) -> tuple[Callable[..., Any], tuple]:
    """grad, query, key, value, output, sums, share that is dropped, whether it is causal."""
    grad, causal = args[0], bool(args[7])
    heads = tuple(one.detach().requires_grad_() for one in args[1:4])
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(*heads, is_causal=causal)
    return (lambda out, grad: torch.autograd.grad(out, heads, grad, retain_graph=True)), (out, grad)


_MADE: dict[str, Callable[[tuple], tuple[Callable[..., Any], tuple]]] = {
    "native_batch_norm_backward": _batch_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
