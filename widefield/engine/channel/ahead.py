"""What do the operations behind a value make of one of its dims: heads, groups, halves?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from widefield.engine.channel.views import moved_to
from widefield.engine.stream.graph import Node, Value

aten = torch.ops.aten

AHEAD = 48
"""How many operations are looked at behind a layer that might give a part."""
MOVES = (
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default,
    aten.clone.default, aten._to_copy.default, aten.detach.default,
)  # fmt: skip
VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Operations that show or cast a tensor."""


def shapes_behind(value: Value, dim: int, at: Mapping[Node, int]) -> Iterator[tuple[int, ...]]:
    """Shapes that the operations behind a value see its dim as: heads, groups, halves."""
    queue: list[tuple[int, int, Node, Value, int]] = [(at[user], n, user, value, dim) for n, user in enumerate(value.users)]
    for number in range(AHEAD):
        if number >= len(queue):
            return
        *_, user, seen, d = queue[number]
        out = user.outs[0]
        yield from _shapes_at(user, seen, d)
        if out is None or user.op in (aten.convolution.default,):
            continue
        after = _follow_dim(user, seen, out, d)
        if after is not None:
            queue += [(at[next_], 0, next_, out, after) for next_ in out.users]


def _shapes_at(user: Node, seen: Value, dim: int) -> Iterator[tuple[int, ...]]:
    extent, out = seen.shape[dim], user.outs[0]
    is_channels = dim == 1 and seen is user.args[0]  # pixels and samples are in no group
    if user.op is aten.native_group_norm.default:
        if is_channels:
            yield user.args[6], extent // user.args[6]
    elif user.op is aten.convolution.default:
        if is_channels and user.args[8] > 1:
            yield user.args[8], extent // user.args[8]
    elif user.op is aten.slice.Tensor and out is not None and user.args[1] % seen.ndim == dim and out.shape[dim] < extent:
        if out.shape[dim] and extent % out.shape[dim] == 0:
            yield extent // out.shape[dim], out.shape[dim]
    elif user.op in VIEWS and out is not None:
        yield from _split_of(seen.shape, dim, out.shape)


def _split_of(before: tuple[int, ...], dim: int, after: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The dims that a view splits `dim` into."""
    inner = math.prod(before[dim + 1 :])
    tail: list[int] = []
    for extent in reversed(after):
        tail.insert(0, extent)
        if math.prod(tail) == inner * before[dim]:
            sizes = list(tail)
            while sizes and inner > 1 and math.prod(sizes) // sizes[-1] >= before[dim]:
                sizes.pop()
            if math.prod(sizes) == before[dim] and len(sizes) > 1:
                yield tuple(sizes)


def _follow_dim(user: Node, seen: Value, out: Value, dim: int) -> int | None:
    """Where a dim is after an operation that leaves it as it is."""
    if user.op in MOVES and user.reads[0] is seen:
        return moved_to(user, dim)
    if out.ndim == seen.ndim and out.shape[dim] == seen.shape[dim]:
        return dim
    return None
