"""torch's pipeline stages with three faults of their gradients mended.

The zero-bubble schedule splits a backward in two halves: first the gradients of the stage's inputs, for which the stage before
waits, then those of its weights.  torch finds the halves by walking the autograd graph from the inputs and from the weights
until both walks meet.  Weights that meet no path to an input with a gradient, as behind a `detach`, silently got none.  Weights
that meet several paths could be counted twice, depending on the order of a set.  A gradient with stride 0 could not be
accumulated into.  In all schedules, a weight's gradient could share memory with a message; see OwningStage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from widefield.private_torch.autograd import node_number_of
from widefield.private_torch.pipelining import stage_backward
from widefield.private_torch.tensors import cdata


class OwningStage(PipelineStage):
    """A stage whose weights' gradients share no memory with messages.

    Where a weight is permuted, concatenated or added to an image, autograd's gradient for it may be a view of a message: of the
    gradient received from the next stage, whose buffer the next pass overwrites, or of the one sent to the stage before, which
    may be under way while the next micro-batch is added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent: set[int] = set()
        """Storage addresses of the gradients that were received or sent in this pass."""

    def end_pass(self) -> None:
        """Forget the messages of the pass; call it after each."""
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
    """A stage whose backward is split if the two halves give all weights their gradients; else the first half does it all."""

    _is_split: bool | None = None
    """Found in the first micro-batch; all micro-batches run the same operations."""

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
            return found[0], merge_groups(found[1] or [])
        if backward_type == "weight":
            for weight in self.submod.parameters():
                if weight.grad is not None and 0 in weight.grad.stride():
                    weight.grad = weight.grad.clone(memory_format=torch.contiguous_format)
        return found


def _memory_of(tensor: Tensor) -> set[int]:
    """Which storages a tensor has; a wrapper subclass has those of its inner tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {cdata(tensor.untyped_storage())}
    return set().union(*(_memory_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]))


def merge_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge those of torch's parameter groups that share a parameter or an intermediate node, so that none is counted twice.

    A group is a dict: `params`; `intermediates`, the autograd nodes where their paths meet those of inputs; `grads`, the
    gradients that these nodes got.  Nodes, and groups by their first node, are in the order in which a backward pass runs them:
    torch gives them in that of their addresses, and ranks that hold tiles of the same images must send in the same order.
    """
    disjoint: list[tuple[set, dict[Node, Any]]] = []
    for group in groups:
        params, met = set(group["params"]), dict(zip(group["intermediates"], group["grads"], strict=True))
        for other in [other for other in disjoint if not (params.isdisjoint(other[0]) and met.keys().isdisjoint(other[1]))]:
            disjoint.remove(other)
            params, met = other[0] | params, other[1] | met
        disjoint.append((params, met))
    disjoint.sort(key=lambda group: max(map(node_number_of, group[1]), default=-1), reverse=True)
    return [{"params": params, **_in_order_of_the_backward(met)} for params, met in disjoint]


def _in_order_of_the_backward(met: dict[Node, Any]) -> dict[str, list]:
    nodes = sorted(met, key=node_number_of, reverse=True)
    return {"intermediates": nodes, "grads": [met[node] for node in nodes]}


def _all_lead_to(outputs: Iterable[Any], inputs: Iterable[Any]) -> bool:
    """Whether the gradient of each output reaches an input."""
    targets = {_node_of(tensor) for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad}
    return all(_leads_to(_node_of(output), targets) for output in outputs if _has_gradient(output))


def _has_gradient(output: Any) -> bool:
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
