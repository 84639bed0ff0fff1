"""Which operations does a stream run on the whole image, or in strips of it, and what do they hold?

An operation runs whole where no rule cuts it, and so do those behind it that go on with what it made, until pixels are tiles
again or are summed up.  Random numbers are drawn for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from widefield.capture.ir import Value
from widefield.fallback import Fallback, Kind, by_size, size_text
from widefield.geometry.layout import Layout
from widefield.streaming.tile_ops import NEW
from widefield.streaming.tile_planner import TracedOp, TracedOps, asks_shape_alone

BEHIND, DRAWN = "it reads what is made whole by", "it draws for all pixels in one go, as one device does"
NAMED_MOST = 20
"""Operations that a refusal names."""


def fallbacks_of(found: TracedOps) -> list[Fallback]:
    """Every operation that does not run in the tiles that were asked for, in the order in which they run."""
    return _Reader(found.layouts).read(found.units)


class _Reader:
    """made: of values that are whole because an operation before ran whole, how many pixels there are in each channel, and
    the place of that operation.  held: whole values that a fallback before holds.
    """

    def __init__(self, layouts: Mapping[Value, Layout]) -> None:
        self.layouts = layouts
        self.sizes = next((layout.grid.sizes for layout in layouts.values()), ())
        self.made: dict[Value, tuple[int, str]] = {}
        self.held: set[Value] = set()

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
        told = self._fallback("run whole", unit, cut if is_view else [*cut, *outs])
        self._note_outs(unit, told, cut, whole)
        return told if cut or told.bytes else None  # a view of what is whole already costs nothing

    def _is_large(self, value: Value) -> bool:
        """Whether a value has enough positions on its last dims for every tile."""
        sizes = self.sizes
        return value.ndim > len(sizes) and all(n >= size for n, size in zip(value.shape[-len(sizes) :], sizes, strict=True))

    def _pixels_of(self, value: Value) -> int:
        """Of a value that is cut, in how many positions along the dims that are."""
        layout = self.layouts.get(value)
        if layout is None:
            return 0
        return math.prod(extent for extent, cut in zip(value.shape, layout.cuts, strict=True) if cut is not None)

    def _note_outs(self, unit: TracedOp, told: Fallback, cut: Sequence[Value], whole: Sequence[Value]) -> None:
        """Results that are uncut and more than sums over all pixels are whole images themselves."""
        sources = [(self._pixels_of(value), told.place) for value in cut] or [self.made[value] for value in whole]
        pixels, place = max(sources)
        least = max(math.prod(value.shape) for value in (*cut, *whole)) // pixels
        for out in unit.outs:
            if out is not None and out not in self.layouts and math.prod(out.shape) > least:
                self.made[out] = pixels, place

    def _fallback(self, kind: Kind, unit: TracedOp, values: Collection[Value]) -> Fallback:
        new = dict.fromkeys(value for value in values if value not in self.held)
        self.held |= new.keys()
        size = sum(value.bytes for value in new)
        return Fallback(kind, unit.node.path, unit.node.name, size, "" if kind == "drawn whole" else self._why(unit))

    def _why(self, unit: TracedOp) -> str:
        if unit.why or unit.node.draws or unit.call is None:
            return unit.why or (DRAWN if unit.node.draws else "what it makes is cut along fewer dims than what it reads")
        return f"{BEHIND} {next(self.made[value][1] for value in unit.reads if value in self.made)}"


def refusal_of(name: str, tiles: Sequence[int], fallbacks: Sequence[Fallback]) -> NotImplementedError | None:
    """What a strict stream raises; None where no operation runs whole.  name: of the module."""
    whole = by_size(one for one in fallbacks if one.kind == "run whole")
    whole.sort(key=lambda one: one.why.startswith(BEHIND))  # first those that a rule would cure, and the rest with them
    if not whole:
        return None
    count, total = sum(one.count for one in whole), size_text(sum(one.bytes for one in whole))
    told = "; ".join(map(str, whole[:NAMED_MOST])) + f"; and {len(whole) - NAMED_MOST} more" * (len(whole) > NAMED_MOST)
    return NotImplementedError(
        f"{name} would run {count} operation{'s' * (count > 1)} on the whole image, {total} in all, where "
        f"{' x '.join(map(str, tiles))} tiles are asked for, and strict=True refuses that: {told}.  Write them with operations "
        "that have a rule, add their rules to ops/, stream the parts before and after them, or set strict=False (in a recipe "
        "stream.strict=false) to run them whole"
    )
