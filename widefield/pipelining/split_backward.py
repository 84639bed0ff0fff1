"""Torch's stages with gradients that weights own, and with a backward in two halves that gives all weights theirs.

The first half is what the stage before waits for, the second the gradients of the weights.  Torch's halves go from a stage's
inputs up and from its weights up, until they meet.  Weights that meet no way to an input that learns, as behind a `detach`, got
no gradient, in silence; a gradient that repeats one number could not be added to; and weights that meet several ways could be
taken twice, as the order of a set fell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from widefield.private_torch.pipelining import stage_backward


class OwningStage(PipelineStage):
    """A stage whose weights own the memory of their gradients.

    Autograd gives a weight that is turned, joined to a token or added to an image a view of the gradient that came from the
    next stage, into which the next pass receives, or of the one that goes to the stage before, which may be under way while
    the next micro-batch adds to it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: set[int] = set()
        """Where gradients lie that were received or sent in this pass."""

    def end_pass(self) -> None:
        self._sent.clear()

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        without = [weight for weight in self.submod.parameters() if weight.grad is None]
        found = self._backward(backward_type, bwd_kwargs, last_backward)
        for gradient in (*(bwd_kwargs.get("output_grads") or ()), *(found[0] or ())):
            self._sent |= set() if gradient is None else _memory_of(gradient)
        for weight in without:
            if weight.grad is not None and not self._sent.isdisjoint(_memory_of(weight.grad)):
                weight.grad = weight.grad.clone()
        return found

    def _backward(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool) -> Any:
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class SplitStage(OwningStage):
    """A stage whose backward is split where that gives all weights their gradients; elsewhere its first half is all of it."""

    _is_split: bool | None = None
    """Known from the first micro-batch on, since all run the same operations."""

    def _backward(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool) -> Any:
        if backward_type == "input":
            outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            if self._is_split is None:
                self._is_split = _all_lead_to(outputs, inputs)
            if not self._is_split:
                grads = bwd_kwargs["output_grads"]
                return stage_backward(outputs[0] if grads is None else outputs, grads, inputs), []  # one loss, or outputs
        found = super()._backward(backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            return found[0], united(found[1] or [])
        if backward_type == "weight":
            for weight in self.submod.parameters():
                if weight.grad is not None and 0 in weight.grad.stride():
                    weight.grad = weight.grad.clone(memory_format=torch.contiguous_format)
        return found


def _memory_of(tensor: Tensor) -> set[int]:
    """Where its numbers lie; of a tensor of ours, those of what it holds."""
    if type(tensor) is Tensor:
        return {tensor.untyped_storage().data_ptr()}
    return set().union(*(_memory_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]))


def united(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of weights that share a weight or a place where they meet a way to an input, as one each.

    params: of a group.  intermediates: the places.  grads: what each place got, in the same order.
    """
    apart: list[tuple[set, dict[Node, Any]]] = []
    for group in groups:
        params, met = set(group["params"]), dict(zip(group["intermediates"], group["grads"], strict=True))
        for other in [other for other in apart if not (params.isdisjoint(other[0]) and met.keys().isdisjoint(other[1]))]:
            apart.remove(other)
            params, met = other[0] | params, other[1] | met
        apart.append((params, met))
    return [{"params": params, "intermediates": [*met], "grads": [*met.values()]} for params, met in apart]


def _all_lead_to(outputs: Iterable[Any], inputs: Iterable[Any]) -> bool:
    """Whether the gradient of each output reaches an input."""
    targets = {_node_of(tensor) for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad}
    return all(_leads_to(_node_of(output), targets) for output in outputs if _learns(output))


def _learns(output: Any) -> bool:
    return isinstance(output, GradientEdge) or isinstance(output, Tensor) and output.requires_grad


def _node_of(tensor: Any) -> Node:
    return tensor.node if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor).node


def _leads_to(start: Node, targets: set[Node]) -> bool:
    seen, left = {start}, [start]
    while left:
        node = left.pop()
        if node in targets:
            return True
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        left += new
    return False
