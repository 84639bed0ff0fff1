"""Sharding rules of views, slices and concatenations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from widefield.capture.ir import Node
from widefield.tensor_parallel.op_strategy import Candidates, Given, OpStrategy, even
from widefield.tensor_parallel.placement import Shard, joined, sliced, viewed

aten = torch.ops.aten


def _one_view(node: Node, given: Given, part: Shard | None, args: Callable[[int], tuple] | None = None) -> Iterator[OpStrategy]:
    x = node.args[0]
    if x in given and part is not None:
        yield OpStrategy({x: given[x]}, [part], args)


def of_view(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, out = node.args[0], node.outs[0]
    if x not in given or out is None:
        return
    part = viewed(given[x], x.shape, out.shape)
    if part is not None:
        yield from _one_view(node, given, part, lambda rank: (x, list(part.shape(out.shape, rank))))


def moved_to(node: Node, dim: int) -> int | None:
    """Where permute, transpose, t, unsqueeze or squeeze moves a dim of its input; None where a squeeze removes it."""
    x, name = node.args[0], node.op
    if name is aten.permute.default:
        return [d % x.ndim for d in node.args[1]].index(dim)
    if name in (aten.transpose.int, aten.t.default):
        a, b = (d % x.ndim for d in (node.args[1:] if name is aten.transpose.int else (0, x.ndim - 1)))
        return b if dim == a else a if dim == b else dim
    if name is aten.unsqueeze.default:
        return dim + (node.args[1] % (x.ndim + 1) <= dim)
    if name in SQUEEZES:
        gone = _squeezed(node)
        return None if dim in gone else dim - sum(d < dim for d in gone)
    return dim


SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)


def _squeezed(node: Node) -> list[int]:
    """The dims that a squeeze removes from the full tensor."""
    x = node.args[0]
    given = node.args[1] if len(node.args) > 1 else range(x.ndim)
    return sorted({d % x.ndim for d in (given if isinstance(given, (list, tuple, range)) else [given]) if x.shape[d] == 1})


def move_of(node: Node) -> tuple[Any, tuple]:
    """The operation that moves a shard's dims as `node` moves those of the full tensor, and its arguments after the tensor.

    A squeeze then lists its dims, since more dims may have length 1 in a shard than in the full tensor.
    """
    return (aten.squeeze.dims, (_squeezed(node),)) if node.op in SQUEEZES else (node.op, node.args[1:])


def of_move(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x = node.args[0]
    dim = moved_to(node, given[x].dim) if x in given else None
    if dim is not None:
        op, args = move_of(node)
        yield OpStrategy({x: given[x]}, [given[x].on(dim)], lambda _: (x, *args), op)


def of_expand(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, out = node.args[0], node.outs[0]
    if x not in given or out is None:
        return
    part = given[x].on(given[x].dim + out.ndim - x.ndim)
    if x.shape[given[x].dim] == out.shape[part.dim]:
        yield from _one_view(node, given, part, lambda rank: (x, list(part.shape(out.shape, rank)), *node.args[2:]))


def of_slice(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, dim, start, stop, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    if x not in given:
        return
    part, dim = given[x], dim % x.ndim
    if part.dim != dim:
        yield from _one_view(node, given, part)
        return
    pixels = range(*slice(start, stop, step).indices(x.shape[dim]))
    of_out = sliced(part, pixels.start, pixels.stop, pixels.step) if len(pixels) else None
    if of_out is None:
        return

    def args(rank: int) -> tuple:
        wanted = set((of_out.indices[rank] * pixels.step + pixels.start).tolist())
        return x, dim, [at for at, index in enumerate(part.indices[rank].tolist()) if index in wanted]

    yield OpStrategy({x: part}, [of_out], args, _picked)


def _picked(x: Any, dim: int, places: list[int]) -> Any:
    """Select the indices `places` of a dim: as a view where they are consecutive."""
    if places[-1] - places[0] + 1 == len(places):
        return x.narrow(dim, places[0], len(places))
    return x.index_select(dim, torch.tensor(places, device=x.device))


def of_cat(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    values, dim = node.args[0], (node.args[1] if len(node.args) > 1 else 0)
    assert node.outs[0] is not None
    dim %= node.outs[0].ndim
    for value in values:
        if value not in given:
            continue
        part = given[value]
        if part.dim != dim:
            wants = {other: part for other in values if other.ndim == value.ndim}  # torch skips a tensor of shape (0,)
            yield OpStrategy(dict(wants), [part])
            continue
        if any(other.ndim != value.ndim for other in values):
            continue
        parts = {other: given.get(other) or next(iter(even(other, dim, candidates)), None) for other in values}
        if all(one is not None and one.dim == dim for one in parts.values()):
            yield OpStrategy(dict(parts), [joined([parts[other] for other in values])])  # type: ignore[misc, arg-type]
