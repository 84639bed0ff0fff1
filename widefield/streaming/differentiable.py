"""A stream as a function of autograd, and its backward as another one, for losses of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from widefield.capture.ir import Graph, Value
from widefield.capture.trace import without_autocast
from widefield.geometry.box import size_of
from widefield.streaming.runner import Runner
from widefield.streaming.second_gradients import refuse_without
from widefield.streaming.tangents import TangentPass, moved_by
from widefield.tiled.partial_gradient import full_value, partial_of
from widefield.tiled.redistribute import redistribute
from widefield.tiled.tensor import TiledTensor, wrap, wrap_uncut

TWICE = "a stream's backward was called twice; it frees what it has stored, also with retain_graph=True: run the forward again"


def wrapped(results: dict[Value, Tensor], run: Runner) -> dict[Value, Tensor]:
    """The results as tiled tensors, if the image is tiled in space."""
    return {value: _out(tensor, value, run) for value, tensor in results.items()}


def run_with_gradient(run: Runner, graph: Graph, given: dict[Value, Any], wanting: list[Value]) -> dict[Value, Tensor]:
    """The results of a run, with their history.  wanting: the inputs and weights that get gradients."""
    others = [t for v, t in given.items() if v not in set(wanting) and isinstance(t, Tensor) and v.name not in graph.updates]
    tensors = _StreamedFunction.apply(run, wanting, others, *(given[value] for value in wanting))
    return dict(zip(run.program.graph.results, tensors, strict=True))


class _StreamedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Runner, wanting: list[Value], others: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.wanting, ctx.outs = run, wanting, run.program.graph.results
        found = wrapped(run.forward(), run)
        results = {value: found[value].detach() for value in ctx.outs}
        again = [results[value] for value in run.program.read_again]
        ctx.save_for_backward(*tensors, *others, *again)  # torch then raises if one is written to before the backward
        ctx.mark_non_differentiable(*(result for value, result in results.items() if not value.wants_grad))
        ctx.set_materialize_grads(False)
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors, run = ctx.saved_tensors, ctx.run
        if run.is_spent:
            raise RuntimeError(TWICE)
        outs = [value for value, grad in zip(ctx.outs, grads, strict=True) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled():
            kept = _Backward(run, ctx.wanting, outs, len(tensors))
            images = [value for value in run.program.graph.inputs if value in ctx.wanting] or ctx.wanting
            refuse_without(run.program, moved_by(run.program.graph, images))
            rest = [tensor.detach() for tensor in tensors[len(ctx.wanting) :]]  # kept for torch to see writes to them
            found = _StreamedBackward.apply(kept, *given, *tensors[: len(ctx.wanting)], *rest)
        else:
            run.is_spent = True
            found = _gradients(run, ctx.wanting, outs, given, tensors, again=False)
            run.close()
        return None, None, None, *found


class _Backward(NamedTuple):
    """A backward that is differentiated: the run, what gets gradients, the results that they come for.

    tensors: how many tensors autograd keeps of the forward, of which those of `wanting` are first.
    """

    run: Runner
    wanting: list[Value]
    outs: list[Value]
    tensors: int


def _gradients(
    run: Runner, wanting: list[Value], outs: list[Value], grads: Sequence[Tensor], tensors: Sequence[Tensor], *, again: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of `wanting`, of which `tensors` has the tensors, from those of `outs`."""
    grad_of = {value: _in(grad, value, run) for value, grad in zip(outs, grads, strict=True)}
    with without_autocast():
        gradient = run.backward(grad_of, again=again)
    found = [gradient(value) for value in wanting]
    reached = _reached(run, grad_of)  # these get zeros where no tile gives them a gradient
    found = [_zeros(v, run) if grad is None and v in reached else grad for v, grad in zip(wanting, found, strict=True)]
    pairs = zip(found, tensors, wanting, strict=False)
    return tuple(_like(grad, tensor, value, run) for grad, tensor, value in pairs)


class _StreamedBackward(torch.autograd.Function):
    """The backward of a stream whose gradients are differentiated, once more and not twice."""

    @staticmethod
    def forward(ctx: Any, kept: _Backward, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        run, first = kept.run, len(kept.outs)
        found = _gradients(run, kept.wanting, kept.outs, tensors[:first], tensors[first:], again=True)
        run.start_backward({})
        ctx.kept = kept
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> Any:
        """along: of each gradient that the first backward gave, what comes for it."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "the gradients of a stream's gradients have no gradients themselves (create_graph=True was given a second "
                "time); a stream is differentiated twice, not three times: compute what needs more without a stream, on crops"
            )
        tensors, kept = ctx.saved_tensors, ctx.kept
        if kept is None or kept.run.is_spent:
            raise RuntimeError(TWICE)
        ctx.kept = None
        run, first = kept.run, len(kept.outs)
        grads, given = [grad.detach() for grad in tensors[:first]], tensors[first:]
        moves = {value: tangent for value, tangent in zip(kept.wanting, along, strict=True) if tangent is not None}
        _refuse_parts(run, moves)
        refuse_without(run.program, moved_by(run.program.graph, moves))
        second = TangentPass(run, {value: _in(tangent, value, run) for value, tangent in moves.items()})
        with without_autocast():
            changes = second.forward()
            gradient = second.backward({v: _in(grad, v, run) for v, grad in zip(kept.outs, grads, strict=True)})
        of_grads = [_out(changes[value], value, run) if value in changes else None for value in kept.outs]
        found = [_like(gradient(v), tensor, v, run) for v, tensor in zip(kept.wanting, given, strict=False)]
        run.start_backward({})
        return None, *of_grads, *found, *[None] * (kept.tensors - len(kept.wanting))


def _refuse_parts(run: Runner, moves: Iterable[Value]) -> None:
    """NotImplementedError: a loss of weights' gradients, of which each rank has a part."""
    weights = [value.name for value in moves if value.source != "input"]
    if weights and not run.spatial.is_single_rank:
        raise NotImplementedError(
            f"a loss of gradients of weights ({weights[0]}) wants second derivatives of a stream on {run.spatial.grid.size} "
            "ranks of one image, which have a part of these gradients each; penalize gradients of images, or leave out "
            "mesh.space or the stream"
        )


# ---------------------------------------------------------------------------------------------- tensors in and out


def _out(tensor: Tensor, value: Value, run: Runner) -> Tensor:
    if run.spatial.is_single_rank:
        return tensor
    if value in run.layouts:
        return wrap(tensor, run.spatial.in_space(run.layouts[value]))
    return wrap_uncut(tensor, run.spatial.grid)


def _in(grad: Tensor, value: Value, run: Runner) -> Tensor:
    """This rank's tile of the gradient of a result."""
    grad = full_value(grad)
    if type(grad) is not TiledTensor:
        return grad
    return redistribute(grad, run.spatial.in_space(run.layouts[value])) if value in run.layouts else grad.local


def _reached(run: Runner, results: Iterable[Value]) -> set[Value]:
    """The values that get a gradient from these results."""
    reached = {value for value in results if value.wants_grad}
    for node in reversed(run.program.graph.nodes):
        if node.grad and any(out in reached for out in node.outs):
            reached.update(value for value in node.reads if value.wants_grad)
    return reached


def _zeros(value: Value, run: Runner) -> Tensor:
    shape = size_of(run.spatial.own_box(run.layouts[value])) if value in run.layouts else value.shape
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _like(grad: Tensor | None, tensor: Tensor, value: Value, run: Runner) -> Tensor | None:
    """A gradient wrapped as its tensor is; that of a weight is a PartialGradient."""
    if grad is None:
        return None
    if type(tensor) is not TiledTensor:
        return partial_of(grad, run.spatial.grid)
    return wrap(grad, run.spatial.in_space(run.layouts[value])) if value in run.layouts else wrap_uncut(grad, run.spatial.grid)
