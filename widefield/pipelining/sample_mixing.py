"""Which operations of a model mix samples?  Found on meta tensors, before a batch is divided into micro-batches.

The graph runs on meta tensors whose batch dim is cut over a pretended grid of two ranks that cannot communicate.  An operation
mixes samples if its tile rule tries to send a message, and may mix them if it has no rule.  An operation that selects samples,
such as the first one, counts as well: in a micro-batch it would select others.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from widefield.capture.decompositions import BATCH_NORM_OVER
from widefield.capture.ir import Graph, Node, Value
from widefield.geometry.layout import Cut, Grid, layout_of
from widefield.private_torch.dispatcher import OpOverload
from widefield.private_torch.pytree import tree_leaves
from widefield.tiled.sample_mixing import PRODUCTS, ROW_BY_ROW, VIEWS, may_mix, name_of, tells_samples_apart
from widefield.tiled.tensor import TiledTensor, wrap

_NO_GROUP = Grid((2,), 0, (((0,), "ranks that cannot talk"),))
"""Two ranks without a process group; this one is the first."""


def where_samples_meet(graph: Graph) -> list[str]:
    """Torch's names of the operations that mix or select samples, each once; empty where no input has two samples."""
    rows = max((value.shape[0] for value in graph.inputs if value.shape), default=0)
    if rows < 2:
        return []
    known = {value: _cut(value, 0) if value.shape and value.shape[0] == rows else _plain(value) for value in graph.inputs}
    found: dict[str, None] = {}
    inner: Inner = {}
    numbers = dict(graph.constants)  # and the values computed from constants only, such as from the batch's size
    with torch.no_grad():
        for node in graph.nodes:
            if node.op is BATCH_NORM_OVER and type(known.get(node.reads[0])) is not TiledTensor:
                found["batch_norm of what holds no samples, which every copy counts"] = None
            reads_samples = any(type(known.get(value)) is TiledTensor for value in node.reads)
            made = _run(node, known, rows, found) if reads_samples and not node.draws else None
            if reads_samples:
                _look_for_numbers(node, known, numbers, found)
            elif not node.draws and numbers.keys() >= set(node.reads):
                numbers.update(_made_of(node, numbers))
            for out, tensor in zip(node.outs, made or [None] * len(node.outs), strict=True):
                if out is None:
                    continue
                shown = _viewed(out, node, known, inner) if name_of(node.op) in VIEWS and reads_samples else None
                is_made = type(tensor) is TiledTensor or isinstance(tensor, Tensor) and isinstance(node.op, OpOverload)
                known[out] = shown if shown is not None else tensor if is_made else _after(out, node, known, rows)
                _pass_on(out, node, inner)
    return list(found)


def where_counts_enter(graph: Graph, other: Graph) -> list[str]:
    """The name of the first operation that has other numbers as arguments than in `other`, captured for another batch size.

    Empty if there is none: the model does not compute with the number of samples.  Only pointwise and filling operations are
    compared: how torch copies, multiplies and adds a bias depends on sizes in any case.
    """
    ours, theirs = ([node for node in each.nodes if _is_counted(node)] for each in (graph, other))
    for (value, one), (_, two) in zip(graph.constants, other.constants, strict=False):
        if one.shape == two.shape and not torch.equal(one, two):
            return [name_of(user.op) for user in value.users[:1]]
    for one, two in zip_longest(ours, theirs):
        if one is None or two is None or one.op is not two.op or _numbers_in(one) != _numbers_in(two):
            return [name_of((one or two).op)]
    return []


_FILLS = {"full", "full_like", "new_full", "fill", "scalar_tensor", "constant_pad_nd"}
_COPIES = {"clone", "copy", "_to_copy", "alias", "detach", "lift_fresh", "lift_fresh_copy"}


def _is_counted(node: Node) -> bool:
    if not isinstance(node.op, OpOverload):
        return False
    name = node.op.overloadpacket.__name__
    is_bias = node.op is torch.ops.aten.add.Tensor and not _numbers_in(node)
    return name not in _COPIES and not is_bias and (name in _FILLS or torch.Tag.pointwise in node.op.tags)


def _numbers_in(node: Node) -> list[Any]:
    """The arguments that are single numbers: neither tensors nor, as lists, sizes."""
    given = (*node.args, *node.kwargs.values())
    return [leaf for leaf in given if isinstance(leaf, (bool, int, float, complex))]


Inner = dict[Value, tuple[int, int]]
"""(dim, others) of values in which a dim joins `others` x samples, as where (tokens, samples, channels) is viewed as rows of
channels.  Their tensors are cut as if samples came first in the dim, which makes no difference to row-by-row operations."""


def _viewed(out: Value, node: Node, known: dict[Value, Tensor], inner: Inner) -> Tensor | None:
    """The result of a view that joins samples with dims before them (see Inner), or splits them again; None for others."""
    x = node.reads[0]
    tensor, first = known[x], next((n for n, (a, b) in enumerate(zip(x.shape, out.shape, strict=False)) if a != b), 0)
    if x in inner:
        dim, others = inner[x]
        splits = first == dim and out.ndim > dim + 1 and out.shape[dim] == others and not x.shape[dim] % others
        return _cut(out, dim + 1) if splits else None
    batch = next((dim for dim, cut in enumerate(tensor.tile_layout.cuts) if cut is not None), 0)  # type: ignore[attr-defined]
    others = math.prod(x.shape[first:batch])
    if first >= batch or others == 1 or first >= out.ndim or out.shape[first] != others * x.shape[batch]:
        return None
    inner[out] = first, others
    return _cut(out, first)


def _pass_on(out: Value, node: Node, inner: Inner) -> None:
    """Give the entry in `inner` of what a row-by-row operation reads to its result."""
    by_row = torch.Tag.pointwise in getattr(node.op, "tags", ()) or name_of(node.op) in ROW_BY_ROW | PRODUCTS
    for x in node.reads if by_row else ():
        if x in inner and out not in inner and out.ndim > inner[x][0] and out.shape[inner[x][0]] == x.shape[inner[x][0]]:
            inner[out] = inner[x]


def _run(node: Node, known: dict[Value, Tensor], rows: int, found: dict[str, None]) -> list[Any] | None:
    """The operation's results; None if it tried to send a message, has no rule, or selected some of the samples."""
    args, kwargs = node.filled(iter([known[value] if value in known else _plain(value) for value in node.reads]))
    try:
        made = node.op(*args, **kwargs)
    except Exception:  # there is no process group to send in, or no rule for the operation
        if may_mix(node.op, args):
            found[name_of(node.op)] = None
        return None
    leaves = _leaves(node, made)
    if any(type(leaf) is TiledTensor and not _has_every_sample(leaf, rows) for leaf in leaves):
        found[name_of(node.op)] = None
        return None
    fits = len(leaves) == len(node.outs)
    return leaves if fits else None


def _look_for_numbers(node: Node, known: dict[Value, Tensor], numbers: dict[Value, Tensor], found: dict[str, None]) -> None:
    """Note in `found` an operation that treats samples differently by their index in the batch."""
    args, _ = node.filled(iter([numbers.get(value, known.get(value)) for value in node.reads]))
    if tells_samples_apart(node.op, args):
        found[name_of(node.op)] = None


def _made_of(node: Node, numbers: dict[Value, Tensor]) -> dict[Value, Tensor]:
    leaves = _leaves(node, node.call(iter([numbers[value] for value in node.reads])))
    return {out: leaf for out, leaf in zip(node.outs, leaves, strict=False) if out is not None and isinstance(leaf, Tensor)}


def _leaves(node: Node, made: Any) -> list[Any]:
    """A node's results, one for each of its `outs`."""
    return [made] if node.is_single else tree_leaves(made, is_leaf=lambda leaf: leaf is None)


def _has_every_sample(tensor: TiledTensor, rows: int) -> bool:
    """Whether the cut dim has equally many rows for every sample and is cut in the middle."""
    cuts = [(cut.bounds, extent) for cut, extent in zip(tensor.tile_layout.cuts, tensor.shape, strict=True) if cut is not None]
    each = [extent // rows for _, extent in cuts]
    return all(n > 0 and bounds == (0, n * (rows // 2), n * rows) for n, (bounds, _) in zip(each, cuts, strict=True))


def _after(out: Value, node: Node, known: dict[Value, Tensor], rows: int) -> Tensor:
    """A stand-in for a result that could not be computed: cut along the dim that can have the samples, by its size."""
    if node.op is BATCH_NORM_OVER and out is not node.outs[0]:
        return _plain(out)  # running statistics: their channels may be as many as the samples
    layouts = [known[value].tile_layout for value in node.reads if value in known and type(known[value]) is TiledTensor]
    dims = [0] if layouts else []
    dims += [dim for layout in layouts for dim, cut in enumerate(layout.cuts) if cut is not None]
    dims = [dim for dim in dims if dim < out.ndim and out.shape[dim] and out.shape[dim] % rows == 0]
    dim = min(dims, key=lambda each: out.shape[each], default=None)
    return _plain(out) if dim is None else _cut(out, dim)


def _plain(value: Value) -> Tensor:
    return torch.empty_permuted(value.shape, value.order, dtype=value.dtype, device="meta")


def _cut(value: Value, dim: int) -> Tensor:
    """The first rank's half of a value that is cut along `dim`."""
    rows = value.shape[dim]
    cuts = [Cut((0,), (0, rows // 2, rows)) if each == dim else None for each in range(value.ndim)]
    return wrap(_plain(value).narrow(dim, 0, rows // 2).contiguous(), layout_of(value.shape, tuple(cuts), _NO_GROUP))
