"""Which tensors does autograd save for an operation?  Measured once, on meta tensors.

The saved tensors depend on the operation and on which borders of the image a box touches, where padding may make a copy.  Other
saved bytes are in proportion to the results.  So one measurement serves many boxes.
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
    """reads, outs: the numbers of arguments and results that are saved for the backward.

    more: other saved bytes, per byte of the results.
    copies: bytes of copies that a run makes besides its results, saved or not, per byte of the results.
    shows: (result, argument) pairs where the result is a view of the argument.
    passes: arguments whose gradient takes no memory of its own: it is a view of a result's gradient, is expanded, or is None.
    """

    reads: frozenset[int]
    outs: frozenset[int]
    more: float = 0.0
    copies: float = 0.0
    shows: tuple[tuple[int, int], ...] = ()
    passes: frozenset[int] = frozenset()


class SavedTensorCache:
    """The saved tensors of each unit; units with equal operations, shapes and borders share a measurement."""

    def __init__(self) -> None:
        self._known: dict[tuple, SavedTensors] = {}
        self._names: dict[TracedOp, tuple] = {}
        self._views: set[tuple] = set()
        self._totals: dict[Value, tuple[tuple[int, ...], torch.dtype]] = {}

    def of(self, unit: TracedOp, step: TileOp) -> SavedTensors:
        """The saved tensors of a step of `unit`."""
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
        """Whether a unit that was measured returns a view of an argument."""
        return self._names.get(unit) in self._views

    def _name(self, unit: TracedOp) -> tuple:
        node = unit.node
        plain = repr(tree_map(lambda leaf: None if isinstance(leaf, Value) else leaf, (node.args, node.kwargs)))
        reads = tuple((v.shape, v.dtype, v.wants_grad, v.order) for v in unit.reads)
        kind = unit.part is not None, unit.reads[0].name == "total" if unit.reads else False
        return node.op, plain, reads, node.grad, kind, tuple(out is None for out in unit.outs)

    def _measured(self, unit: TracedOp, step: TileOp) -> SavedTensors:
        try:
            tensors = [self._stand_in(value, box) for value, box in zip(unit.reads, step.reads, strict=True)]
            return _traced(unit, step, tensors)
        except Exception:  # not every kernel runs on meta tensors; then assume that all arguments and results are saved
            return SavedTensors(frozenset(range(len(unit.reads))), frozenset(range(len(unit.outs))))

    def _stand_in(self, value: Value, box: Sequence | None) -> Tensor:
        shape, dtype = self._totals.get(value, (value.shape if box is None else size_of(tuple(box)), value.dtype))
        order = value.order if len(value.order) == len(shape) else tuple(range(len(shape)))
        return torch.empty_permuted(shape, order, dtype=dtype, device="meta").requires_grad_(value.wants_grad)

    def _note_total(self, unit: TracedOp, step: TileOp) -> None:
        """Note the shape of a reduction's total, which is not in the captured graph."""
        try:
            with torch.no_grad():
                tensors = [self._stand_in(value, box) for value, box in zip(unit.reads, step.reads, strict=True)]
                part = step.call(tensors)[0]
                total = part if unit.merge is None else unit.merge(part.unsqueeze(0))
        except Exception:  # as above; units that read the total then fail to run too
            return
        if unit.outs[0] is not None:
            self._totals[unit.outs[0]] = (tuple(total.shape), total.dtype)


def _traced(unit: TracedOp, step: TileOp, tensors: list[Tensor]) -> SavedTensors:
    with torch.set_grad_enabled(unit.node.grad):
        results, saved = _run(step, tensors)
    inside, out = _places(tensors), _places(results)
    size = max(1, sum(_storage(r) for r in results if isinstance(r, Tensor)))
    more = sum({_place(t): _storage(t) for t in saved if _place(t) not in inside and _place(t) not in out}.values())
    places = {_place(tensor) for tensor in saved}
    return SavedTensors(
        reads=frozenset(n for n, tensor in enumerate(tensors) if _place(tensor) in places),
        outs=frozenset(n for n, r in enumerate(results) if isinstance(r, Tensor) and _place(r) in places),
        more=more / size,
        copies=(more if saved else _copied(step, tensors)) / size,
        shows=tuple((n, inside[_place(r)]) for n, r in enumerate(results) if isinstance(r, Tensor) and _place(r) in inside),
        passes=_passes(tensors, results),
    )


def _run(step: TileOp, tensors: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """The results, and the tensors that autograd saved."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return step.call(list(tensors)), saved


def _copied(step: TileOp, tensors: Sequence[Tensor]) -> int:
    """The bytes of copies that a run makes of its arguments, such as for padding: what autograd would save besides these."""
    with torch.enable_grad():
        wanting = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
        results, saved = _run(step, wanting)
    known = {**_places(wanting), **_places(results)}
    return sum({_place(t): _storage(t) for t in saved if _place(t) not in known}.values())


def _borders(unit: TracedOp, step: TileOp) -> list[tuple[bool, bool]]:
    """For an operation that reads windows: per dim, whether the box that it reads begins and ends where the whole does."""
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
    """The arguments whose gradient is a view of a result's gradient, is expanded, or is None."""
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
    """Whether a tensor is expanded: its storage is smaller than its numbers."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()
