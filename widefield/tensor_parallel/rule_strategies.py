"""The sharding strategies that follow from the tile rules in `ops/`: along which dims are the indices independent?

A rule is asked about a tensor with one dim cut in two.  If the results are cut at the same indices, and no message is needed,
the dim can be sharded: each rank runs the same operation, with the same arguments, on its shard.  This gives the strategies of
pooling, resizing, padding, softmax, norms over pixels, reductions over other dims, attention by heads and batched products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from widefield.capture.ir import Node, Value
from widefield.capture.node_rules import Refused, description_of, rule_of
from widefield.geometry.layout import Cut, Cuts, Grid, Layout, layout_of
from widefield.rules import Description, Local, Meta, Reduced, ShardedProduct, Tile, Windowed
from widefield.tensor_parallel.op_strategy import PARTIAL, PARTIAL_GRADIENT, WHOLE, Candidates, Given, OpStrategy, Placement
from widefield.tiled.redistribute import base_layout, following_cuts

GRID = Grid((2,))


@dataclass(frozen=True)
class Independent:
    """The sharded dim of each tensor argument and each result of an operation, in order; None where it is not sharded.

    adds: the result is the sum of the ranks' results.
    """

    reads: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    adds: bool = False


_FOUND: WeakKeyDictionary[Node, dict[tuple[Value, int], Independent | None]] = WeakKeyDictionary()


def by_rule(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """The strategies in which one argument stays sharded as it is, where the operation's rule allows that."""
    for value in dict.fromkeys(node.reads):
        part = given.get(value)
        found = None if part is None else independent(node, value, part.dim)
        if part is None or found is None:
            continue
        wants: dict[Value, Placement] = {}
        for read, dim in zip(node.reads, found.reads, strict=True):
            wants[read] = PARTIAL_GRADIENT if dim is None else part.on(dim)
        outs: list[Placement] = [WHOLE if dim is None else part.on(dim) for dim in found.outs]
        yield OpStrategy(wants, [PARTIAL] if found.adds else outs)


def independent(node: Node, value: Value, dim: int) -> Independent | None:
    """The sharded dims of all arguments and results if one argument is sharded along `dim`; None where that cannot be."""
    known = _FOUND.setdefault(node, {})
    if (value, dim) not in known:
        known[value, dim] = _asked(node, value, dim)
    return known[value, dim]


def refusal_of(node: Node, value: Value, dim: int) -> str | None:
    """The text with which the rule refuses an argument that is cut along a dim; None where it does not."""
    d = None if rule_of(node) is None or value.shape[dim] < 2 else _described(node, _halves(node, value, dim))
    return d.why if isinstance(d, Refused) else None


def _asked(node: Node, value: Value, dim: int) -> Independent | None:
    if rule_of(node) is None or node.draws or value.shape[dim] < 2:
        return None
    layouts = _halves(node, value, dim)
    d, cut = _described(node, layouts), _halved(value.shape[dim])
    found = None if isinstance(d, Refused) else _read(node, d)
    if found is None:
        return None
    missing = len(node.outs) - len(found.outs)  # a rule may leave out last results that are no tensors
    found = replace(found, outs=(*found.outs, *[None] * missing))
    return found if _keeps(node, layouts, found, cut) and _runs_on_parts(node, found, cut) else None


def _halved(extent: int) -> Cut:
    return Cut((0,), (0, extent // 2, extent))


def _halves(node: Node, value: Value, dim: int) -> list[Layout | None]:
    """The layouts of the arguments if one is cut in two along a dim; None for the others."""
    cuts = tuple(_halved(extent) if d == dim else None for d, extent in enumerate(value.shape))
    return [layout_of(value.shape, cuts, GRID) if read is value else None for read in node.reads]


def _described(node: Node, layouts: Sequence[Layout | None]) -> Description | Refused:
    try:
        return description_of(node, layouts)
    except ValueError as error:  # sizes that only the full tensor can have
        return Refused(str(error))


# ---------------------------------------------------------------------------------------------- what descriptions say


def _read(node: Node, d: Description) -> Independent | None:
    if isinstance(d, Windowed):
        return _windowed(node, d)
    if isinstance(d, ShardedProduct):
        return None if d.is_partial_gradient else _product(node, d)
    if isinstance(d, Local) and not d.by_position:
        return _local(node, d)
    return _reduced(node, d) if isinstance(d, Reduced) else None


def _windowed(node: Node, d: Windowed) -> Independent | None:
    main = next((read for read in d.reads if read.tensor.is_cut), None)
    if main is None or any(cut is not None and dim in main.reach for dim, cut in enumerate(main.tensor.cuts)):
        return None
    cuts = [following_cuts(main, out.shape) if out.cuts is None else out.cuts for out in d.outs]
    at = _dim(cuts[0])
    if at is None:
        return None
    reads = _of(node, {read.tensor.number: _same_dim(read.tensor, at, d.outs[0].shape, read.reach) for read in d.reads})
    return Independent(reads, tuple(_dim(cut) for cut in cuts))


def _same_dim(meta: Meta, dim: int, shape: tuple[int, ...], reach: dict) -> int | None:
    return dim if dim not in reach and dim < meta.ndim and meta.shape[dim] == shape[dim] else None


def _local(node: Node, d: Local) -> Independent | None:
    layout = base_layout(d)
    if d.layouts is None and any(layout.cuts[dim % max(1, len(layout.shape))] is not None for dim in d.whole):
        return None
    outs = [None if cuts is None else _dim(cuts) for _, cuts in d.outs(layout)]
    return Independent(_along(node, d, layout), tuple(outs)) if not set(outs) & set(d.reach) else None


def _reduced(node: Node, d: Reduced) -> Independent | None:
    layout = base_layout(d)
    if any(layout.cuts[dim] is not None for dim in d.dims):
        return None
    outs = [_dim(layout.cuts if out.cuts is None else out.cuts) if isinstance(out, Tile) else None for out in d.outs]
    return Independent(_along(node, d, layout), tuple(outs))


def _product(node: Node, d: ShardedProduct) -> Independent:
    reads = {meta.number: _dim(layout.cuts) for meta, layout in zip(d.reads, d.layouts, strict=True)}
    return Independent(_of(node, reads), (_dim(d.out.cuts),), adds=bool(d.partial_axes))


def _along(node: Node, d: Local | Reduced, layout: Layout) -> tuple[int | None, ...]:
    """The cut dim of each argument, from the layout of the first one by broadcasting."""
    dims: dict[int, int | None] = {}
    for number, meta in enumerate(d.reads):
        at = layout if d.layouts is None else d.layouts[number]
        dim = None if at is None else _dim(at.cuts)
        missing = 0 if at is None else len(at.shape) - meta.ndim
        fits = dim is not None and at is not None and dim >= missing and meta.shape[dim - missing] == at.shape[dim]
        dims[meta.number] = dim - missing if fits and dim is not None else None
    return _of(node, dims)


def _of(node: Node, dims: dict[int, int | None]) -> tuple[int | None, ...]:
    return tuple(dims.get(number) for number in range(len(node.reads)))


def _dim(cuts: Cuts) -> int | None:
    return next((dim for dim, cut in enumerate(cuts) if cut is not None), None)


# ---------------------------------------------------------------------------------------------- what must hold then


def _keeps(node: Node, layouts: Sequence[Layout | None], found: Independent, cut: Cut) -> bool:
    """Whether the argument keeps its cut, and every result is cut in a dim of the same extent."""
    stays = all(layout is None or dim == _dim(layout.cuts) for layout, dim in zip(layouts, found.reads, strict=True))
    if found.adds:  # an argument that is not sharded would be added by every rank
        return stays and len(node.outs) == 1 and None not in found.reads
    given = [(out, dim) for out, dim in zip(node.outs, found.outs, strict=False) if out is not None]
    extent = cut.bounds[-1]
    return stays and bool(given) and all(dim is not None and out.shape[dim] == extent for out, dim in given)


def _runs_on_parts(node: Node, found: Independent, cut: Cut) -> bool:
    """Whether the operation, with its own arguments, maps shards to shards: an argument could be the extent of the dim."""
    part = cut.bounds[1]

    def shape(value: Value, dim: int | None) -> tuple[int, ...]:
        return tuple(part if d == dim else extent for d, extent in enumerate(value.shape))

    reads = zip(node.reads, found.reads, strict=True)
    try:
        made = node.call(iter([torch.empty(shape(value, dim), dtype=value.dtype, device="meta") for value, dim in reads]))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return False
    made = list(made) if isinstance(made, (tuple, list)) else [made]
    given = [(one, out, dim) for one, out, dim in zip(made, node.outs, found.outs, strict=False) if out is not None]
    return all(tuple(one.shape) == (out.shape if found.adds else shape(out, dim)) for one, out, dim in given)
