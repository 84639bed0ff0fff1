"""Gradients where autograd differs from what the operations say: after writes that it does not see, and for random numbers.

Each `with_...` function returns its first argument unchanged, with a backward of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from widefield.private_torch.pytree import tree_leaves

aten = torch.ops.aten


def with_gradient_of(written: Tensor, before: Tensor) -> Tensor:
    """The new numbers of a tensor that was written to under no_grad; the gradient goes to the tensor before the write."""
    return _GradientOf.apply(written.detach(), before)


def with_zero_gradient(made: Tensor, *reads: Tensor) -> Tensor:
    """`made`, which does not depend on `reads`; they get gradients of zeros, as torch gives for random numbers."""
    return _ZeroGradient.apply(made, *reads) if any(read.requires_grad for read in reads) else made


def with_gradient_of_gamma(drawn: Tensor, alpha: Tensor) -> Tensor:
    """Numbers of Gamma(alpha, 1) with torch's implicit derivative (Figurnov et al., 2018)."""
    return _GradientOfGamma.apply(drawn.detach(), alpha)


POINTWISE = {with_gradient_of, with_zero_gradient, with_gradient_of_gamma}


class _GradientOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, written: Tensor, before: Tensor) -> Tensor:
        return written.view_as(written)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, *reads: Tensor) -> Tensor:
        ctx.reads = [(read.shape, read.dtype) for read in reads]
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *[grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.reads]


class _GradientOfGamma(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, drawn: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, drawn)
        return drawn.view_as(drawn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad * aten._standard_gamma_grad.default(*ctx.saved_tensors)


# ---------------------------------------------------------------------------------------------- what autograd says


def has_grad_fn(tensor: Tensor) -> bool:
    """Whether a tensor that is no leaf has a grad_fn.

    A view that was made under no_grad requires a gradient but has no grad_fn; once its memory was written to, torch raises when
    it is asked.
    """
    try:
        return tensor.requires_grad and tensor.grad_fn is not None
    except RuntimeError:
        return False


def reaches(grad_fn: Any, leaves: Sequence[Tensor]) -> bool:
    """Whether a backward from `grad_fn` reaches one of `leaves`."""
    wanted = {id(leaf) for leaf in leaves}
    return any(id(getattr(node, "variable", None)) in wanted for node in _graph_of([grad_fn]))


def refuse_python_gradients(out: Any) -> None:
    """NotImplementedError if a torch.autograd.Function is in the graph of `out`: its backward is not recorded."""
    for node in _graph_of([leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]):
        is_known = type(node).__name__.startswith("GeneratedBackwardFor_")  # of a custom op, which knows its own backward
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not is_known:
            name = type(node).__name__.removesuffix("Backward")
            raise NotImplementedError(
                f"{name} is a torch.autograd.Function, whose backward a stream does not see; write it with torch's operations, "
                "or as a torch.library.custom_op with register_autograd, or stream the parts before and after it"
            )


def _graph_of(grad_fns: list[Any]) -> Iterator[Any]:
    """All autograd nodes that a backward from these reaches."""
    stack, seen = [*grad_fns], {*grad_fns}
    while stack:
        node = stack.pop()
        yield node
        following = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(following)
        stack += following
