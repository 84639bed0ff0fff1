"""Which operations does a stream run on the whole image, or in strips of it, and how many bytes do they take?

An operation that no rule cuts runs on the whole image.  So do the operations that read its result, until a value is tiled again
or reduced over all pixels.  Random numbers are drawn for the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from widefield.capture.ir import Value
from widefield.fallback import Fallback, Kind, by_size
from widefield.geometry.layout import Layout
from widefield.quantity import size_text
from widefield.streaming.tile_ops import NEW
from widefield.streaming.tile_planner import TracedOp, TracedOps, asks_shape_alone

BEHIND, DRAWN = "it reads what is made whole by", "it draws for all pixels in one go, as one device does"
NAMED_MOST = 20
"""How many operations a refusal names."""


def fallbacks_of(found: TracedOps) -> list[Fallback]:
    """The operations that do not run in the tiles that were asked for, in the order in which they run."""
    return _Reader(found.layouts).read(found.units)


class _Reader:
    """made: for values that are whole because an earlier operation ran whole, the pixels per channel, and that operation.

    counted: whole values whose bytes an earlier fallback counts.
    """

    def __init__(self, layouts: Mapping[Value, Layout]) -> None:
        self.layouts = layouts
        self.sizes = next((layout.grid.sizes for layout in layouts.values()), ())
        self.made: dict[Value, tuple[int, str]] = {}
        self.counted: set[Value] = set()

    def read(self, units: Sequence[TracedOp]) -> list[Fallback]:
        if math.prod(self.sizes) == 1:  # one tile is the whole
            return []
        found = [self._of(unit) for unit in units]
        return [one for one in found if one is not None]

    def _of(self, unit: TracedOp) -> Fallback | None:
        wide = [unit.reads[number] for number in sorted(unit.wide)]
        cut = [value for value in wide if self._pixels_of(value) > 1]
        if unit.call is None:
            return self._fallback("run in strips", unit, cut) if cut else None
        outs = [out for out in unit.outs if out is not None]
        if unit.node.draws and not cut:
            is_large = any(value in self.layouts or self._is_large(value) for value in (*unit.reads, *outs))
            return self._fallback("drawn whole", unit, outs) if is_large else None
        whole = [value for value in unit.reads if value in self.made]
        if asks_shape_alone(unit.node) or unit.node.op in NEW or not (cut or whole):
            return None
        is_view = getattr(unit.node.op, "is_view", False) or unit.node.op is torch.ops.aten._unsafe_view.default
        fallback = self._fallback("run whole", unit, cut if is_view else [*cut, *outs])
        self._note_outs(unit, fallback, cut, whole)
        return fallback if cut or fallback.bytes else None  # a view of a value that is whole already takes no memory

    def _is_large(self, value: Value) -> bool:
        """Whether the last dims of a value are long enough to be cut into all tiles."""
        sizes = self.sizes
        return value.ndim > len(sizes) and all(n >= size for n, size in zip(value.shape[-len(sizes) :], sizes, strict=True))

    def _pixels_of(self, value: Value) -> int:
        """The number of positions along the cut dims of a value; 0 if it is not cut."""
        layout = self.layouts.get(value)
        if layout is None:
            return 0
        return math.prod(extent for extent, cut in zip(value.shape, layout.cuts, strict=True) if cut is not None)

    def _note_outs(self, unit: TracedOp, fallback: Fallback, cut: Sequence[Value], whole: Sequence[Value]) -> None:
        """Note the results that are whole images: not cut, and larger than a reduction over all pixels."""
        sources = [(self._pixels_of(value), fallback.place) for value in cut] or [self.made[value] for value in whole]
        pixels, place = max(sources)
        least = max(math.prod(value.shape) for value in (*cut, *whole)) // pixels
        for out in unit.outs:
            if out is not None and out not in self.layouts and math.prod(out.shape) > least:
                self.made[out] = pixels, place

    def _fallback(self, kind: Kind, unit: TracedOp, values: Collection[Value]) -> Fallback:
        new = dict.fromkeys(value for value in values if value not in self.counted)
        self.counted |= new.keys()
        size = sum(value.bytes for value in new)
        return Fallback(kind, unit.node.path, unit.node.name, size, "" if kind == "drawn whole" else self._why(unit))

    def _why(self, unit: TracedOp) -> str:
        if unit.why or unit.node.draws or unit.call is None:
            return unit.why or (DRAWN if unit.node.draws else "what it makes is cut along fewer dims than what it reads")
        return f"{BEHIND} {next(self.made[value][1] for value in unit.reads if value in self.made)}"


def refusal_of(name: str, tiles: Sequence[int], fallbacks: Sequence[Fallback]) -> NotImplementedError | None:
    """The error that a strict stream raises; None if no operation runs whole.  name: of the module."""
    whole = by_size(one for one in fallbacks if one.kind == "run whole")
    whole.sort(key=lambda one: one.why.startswith(BEHIND))  # first those that lack a rule: with one, the others are cured too
    if not whole:
        return None
    count, total = sum(one.count for one in whole), size_text(sum(one.bytes for one in whole))
    listed = "; ".join(map(str, whole[:NAMED_MOST])) + f"; and {len(whole) - NAMED_MOST} more" * (len(whole) > NAMED_MOST)
    return NotImplementedError(
        f"{name} would run {count} operation{'s' * (count > 1)} on the whole image, {total} in all, where "
        f"{' x '.join(map(str, tiles))} tiles are asked for, and strict=True refuses that: {listed}.  Write them with "
        "operations that have a rule, add their rules to ops/, stream the parts before and after them, or set strict=False "
        "(in a recipe stream.strict=false) to run them whole"
    )
