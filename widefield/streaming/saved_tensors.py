"""What memory does autograd hold on to for an operation?  Asked of torch once, on tensors without pixels.

What it saves follows from the operation and from the borders that a box touches, where padding may be put around a copy: which
arguments and results, and how much more beside them, in proportion to the results.  So one answer serves many boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Value
from widefield.geometry.box import size_of
from widefield.private_torch.pytree import tree_map
from widefield.private_torch.tensors import cdata
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp


@dataclass(frozen=True)
class SavedTensors:
    """reads, outs: arguments and results, by number, that are held until the backward.

    more: bytes held beside these, per byte of the results.
    copies: bytes that a run takes beside its results, per byte of these, held or not.
    shows: results that are another view of an argument's memory.  passes: arguments whose gradient takes no memory of its own,
    since it lies in that of a result's, or has none.
    """

    reads: frozenset[int]
    outs: frozenset[int]
    more: float = 0.0
    copies: float = 0.0
    shows: tuple[tuple[int, int], ...] = ()
    passes: frozenset[int] = frozenset()


class SavedTensorCache:
    """What is saved of each unit, once it was asked; units that differ in nothing that matters share an answer."""

    def __init__(self) -> None:
        self._known: dict[tuple, SavedTensors] = {}
        self._names: dict[TracedOp, tuple] = {}
        self._views: set[tuple] = set()
        self._totals: dict[Value, tuple[tuple[int, ...], torch.dtype]] = {}

    def of(self, unit: TracedOp, step: TileOp) -> SavedTensors:
        if unit not in self._names:
            self._names[unit] = self._name(unit)
            if unit.part is not None:
                self._note_total(unit, step)
        key = (*self._names[unit], *_borders(unit, step))
        if key not in self._known:
            self._known[key] = self._measured(unit, step)
            if self._known[key].shows:
                self._views.add(self._names[unit])
        return self._known[key]

    def is_view(self, unit: TracedOp) -> bool:
        """Whether a unit that was asked about shows memory that was there before."""
        return self._names.get(unit) in self._views

    def _name(self, unit: TracedOp) -> tuple:
        node = unit.node
        told = repr(tree_map(lambda leaf: None if isinstance(leaf, Value) else leaf, (node.args, node.kwargs)))
        reads = tuple((v.shape, v.dtype, v.wants_grad, v.order) for v in unit.reads)
        kind = unit.part is not None, unit.reads[0].name == "total" if unit.reads else False
        return node.op, told, reads, node.grad, kind, tuple(out is None for out in unit.outs)

    def _measured(self, unit: TracedOp, step: TileOp) -> SavedTensors:
        try:
            tensors = [self._stand_in(value, box) for value, box in zip(unit.reads, step.reads, strict=True)]
            return _traced(unit, step, tensors)
        except Exception:  # not every kernel has a form without pixels; then all that may be saved is taken to be
            return SavedTensors(frozenset(range(len(unit.reads))), frozenset(range(len(unit.outs))))

    def _stand_in(self, value: Value, box: Sequence | None) -> Tensor:
        shape, dtype = self._totals.get(value, (value.shape if box is None else size_of(tuple(box)), value.dtype))
        order = value.order if len(value.order) == len(shape) else tuple(range(len(shape)))
        return torch.empty_permuted(shape, order, dtype=dtype, device="meta").requires_grad_(value.wants_grad)

    def _note_total(self, unit: TracedOp, step: TileOp) -> None:
        """The shape of a sum over all turns, which is a program's own and not the module's."""
        try:
            with torch.no_grad():
                tensors = [self._stand_in(value, box) for value, box in zip(unit.reads, step.reads, strict=True)]
                part = step.call(tensors)[0]
                total = part if unit.merge is None else unit.merge(part.unsqueeze(0))
        except Exception:  # as above: who reads the total then finds no kernel either
            return
        if unit.outs[0] is not None:
            self._totals[unit.outs[0]] = (tuple(total.shape), total.dtype)


def _traced(unit: TracedOp, step: TileOp, tensors: list[Tensor]) -> SavedTensors:
    with torch.set_grad_enabled(unit.node.grad):
        results, held = _run(step, tensors)
    inside, out = _places(tensors), _places(results)
    size = max(1, sum(_storage(r) for r in results if isinstance(r, Tensor)))
    more = sum({_place(t): _storage(t) for t in held if _place(t) not in inside and _place(t) not in out}.values())
    places = {_place(tensor) for tensor in held}
    return SavedTensors(
        reads=frozenset(n for n, tensor in enumerate(tensors) if _place(tensor) in places),
        outs=frozenset(n for n, r in enumerate(results) if isinstance(r, Tensor) and _place(r) in places),
        more=more / size,
        copies=(more if held else _copied(step, tensors)) / size,
        shows=tuple((n, inside[_place(r)]) for n, r in enumerate(results) if isinstance(r, Tensor) and _place(r) in inside),
        passes=_passes(tensors, results),
    )


def _run(step: TileOp, tensors: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """The results, and what autograd took hold of meanwhile."""
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        return held[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return step.call(list(tensors)), held


def _copied(step: TileOp, tensors: Sequence[Tensor]) -> int:
    """The bytes of copies that a run makes of its arguments, as those for padding: what autograd would hold besides these."""
    with torch.enable_grad():
        wanting = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
        results, held = _run(step, wanting)
    known = {**_places(wanting), **_places(results)}
    return sum({_place(t): _storage(t) for t in held if _place(t) not in known}.values())


def _borders(unit: TracedOp, step: TileOp) -> list[tuple[bool, bool]]:
    """Of an operation that reads through windows, whether what it reads begins and ends where the whole does, dim by dim."""
    box = step.reads[0] if step.reads else None
    if box is None or step.outs[0] is None or box[2:] == step.outs[0][2:]:
        return []
    return [(i.start == 0, i.stop == n) for i, n in zip(box, unit.reads[0].shape, strict=True)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _place(tensor: Tensor) -> int:
    return cdata(tensor.untyped_storage())


def _places(tensors: Sequence[Tensor]) -> dict[int, int]:
    return {_place(tensor): n for n, tensor in enumerate(tensors) if isinstance(tensor, Tensor)}


def _passes(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> frozenset[int]:
    """The arguments whose gradient lies in the memory of a result's, or takes next to none."""
    outs = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    wanting = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
    if not outs or not wanting:
        return frozenset(range(len(tensors)))
    given_grads = [torch.empty_like(out) for out in outs]
    grads = torch.autograd.grad(outs, [tensors[n] for n in wanting], given_grads, allow_unused=True)
    given = _places(given_grads)
    free = [n for n, g in zip(wanting, grads, strict=True) if g is None or _place(g) in given or _is_spread(g)]
    return frozenset(free)


def _is_spread(tensor: Tensor) -> bool:
    """Whether few numbers stand for many pixels, as `expand` has it."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()
