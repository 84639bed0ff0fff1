"""The peak memory of one tile, by simulating its steps: which allocations are referenced until when, as in `runner.py`.

A token stands for an allocation and counts its references: from the tile's variables and, if the tile has a backward, from
autograd's saved tensors.  An allocation without references is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from widefield.capture.ir import Value
from widefield.geometry.box import Box, is_empty, size_of
from widefield.streaming.saved_tensors import SavedTensorCache, SavedTensors
from widefield.streaming.schedule import StreamedTile
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp

CONVOLUTION = torch.ops.aten.convolution.default


def work_bytes(
    tile: StreamedTile, cache: SavedTensorCache, results: Collection[Value], *, is_copy: bool, goes_back: bool
) -> int:
    """The peak bytes of a tile, without kept values, results of the graph, weights and their gradients.

    results: of the graph.  is_copy: whether kept values are stored elsewhere, so that their windows are copies.
    goes_back: whether the tile runs a second time, with autograd, and has a backward.
    """
    plain = _MemorySimulator(tile, cache, results, is_copy, keeps=False)
    plain.forward()
    if not goes_back:
        return plain.peak
    whole = _MemorySimulator(tile, cache, results, is_copy, keeps=True)
    whole.forward()
    whole.backward()
    return max(plain.peak, whole.peak)


def has_stored_result(unit: TracedOp, step: TileOp, tile: StreamedTile, results: Collection[Value]) -> bool:
    """Whether the result of a step is stored (a kept value or a part of a reduction), so the backward does not recompute it.

    results: of the graph, which the caller may have changed.
    """
    if unit.part is not None:
        return step.attach_grad is not None
    out = unit.outs[0]
    return step.attach_grad is not None and out not in results and out in tile.kept and tile.kept[out] == step.outs[0]


def box_bytes(value: Value, box: Box | None) -> int:
    """The bytes of a box of a value; None: of the whole."""
    return value.bytes if box is None else math.prod(size_of(box)) * value.dtype.itemsize


def made_bytes(unit: TracedOp, step: TileOp) -> int:
    """The bytes of a step's results."""
    pairs = zip(unit.outs, step.outs, strict=True)
    return sum(box_bytes(value, box) for value, box in pairs if value is not None and box is not None)


@dataclass
class _Record:
    """A step that has run.

    around: the box that the tensor of each argument covers; None for a small value.  outs: tokens of the results.
    saved_tokens: tokens of the tensors that autograd saved.
    """

    unit: TracedOp
    step: TileOp
    saved: SavedTensors
    around: list[Box | None]
    outs: list[int | None]
    saved_tokens: list[int]


class _MemorySimulator:
    def __init__(
        self, tile: StreamedTile, cache: SavedTensorCache, results: Collection[Value], is_copy: bool, *, keeps: bool
    ) -> None:
        self.tile, self.cache, self.results, self.is_copy, self.keeps = tile, cache, results, is_copy, keeps
        self.live = self.peak = 0
        self._sizes: list[int] = []
        self._counts: list[int] = []
        self._env: dict[Value, tuple[int, Box]] = {}
        self._grads: dict[Value, int] = {}
        self._records: list[_Record] = []

    def _new(self, size: int) -> int:
        """A token with one reference."""
        self._sizes.append(size)
        self._counts.append(1)
        self.live += size
        self.peak = max(self.peak, self.live)
        return len(self._sizes) - 1

    def _hold(self, token: int) -> int:
        self._counts[token] += 1
        return token

    def _release(self, *tokens: int) -> None:
        for token in tokens:
            self._counts[token] -= 1
            if self._counts[token] == 0:
                self.live -= self._sizes[token]

    def _kept(self, value: Value, box: Box | None) -> int:
        """The token of a window of a kept value."""
        return self._new(box_bytes(value, box) if self.is_copy else 0)

    # ------------------------------------------------------------------------------------------ forward

    def forward(self) -> None:
        """Simulate the steps, from the windows to the kept values and the parts of reductions."""
        tile = self.tile
        for value, box in tile.sources.items():
            self._env[value] = self._kept(value, box), box
            if self.keeps and value.wants_grad:
                self._hold(self._env[value][0])  # the leaf, whose gradient is read afterwards
        drops = [*tile.drop, *([] for _ in tile.parts)]
        for (unit, step), drop in zip((*tile.steps, *tile.parts), drops, strict=True):
            self._run(unit, step)
            for value in drop:
                if value in self._env:
                    self._release(self._env.pop(value)[0])
        for value, (token, _) in self._env.items():
            if not (self.keeps and value in tile.kept):
                self._release(token)

    def _run(self, unit: TracedOp, step: TileOp) -> None:
        around = [self._env[value][1] if value in self._env else None for value in unit.reads]
        saved, is_stored = (
            self.cache.of(unit, step),
            self.keeps and has_stored_result(unit, step, self.tile, self.results),
        )
        copies = self._new(round(saved.copies * made_bytes(unit, step)))
        scratch = self._new(0 if is_stored else self._scratch(unit, step, around))
        outs = self._outs(unit, step, saved, is_stored)
        self._release(scratch)
        saved_tokens: list[int] = []
        if self.keeps and any(out is not None and out.wants_grad for out in unit.outs):
            saved_tokens = [self._hold(self._env[unit.reads[n]][0]) for n in sorted(saved.reads) if unit.reads[n] in self._env]
            saved_tokens += [self._hold(token) for n, token in enumerate(outs) if token is not None and n in saved.outs]
            saved_tokens += [self._hold(copies)] if saved.more else []
        self._release(copies)
        self._records.append(_Record(unit, step, saved, around, outs, saved_tokens))

    def _scratch(self, unit: TracedOp, step: TileOp, around: list[Box | None]) -> int:
        """Temporary bytes of a convolution's kernel: its result and a copy of a window of a larger tensor, in its format."""
        out = unit.outs[0]
        if unit.node.op is not CONVOLUTION or out is None:
            return 0
        image = unit.reads[0]
        is_window = around[0] != step.reads[0] or (image in self.tile.sources and not self.is_copy)
        return box_bytes(out, step.outs[0]) + (box_bytes(image, step.reads[0]) if is_window else 0)

    def _outs(self, unit: TracedOp, step: TileOp, saved: SavedTensors, is_stored: bool) -> list[int | None]:
        """The tokens of a step's results, which are added to the tile's variables."""
        outs: list[int | None] = []
        for number, (value, box) in enumerate(zip(unit.outs, step.outs, strict=True)):
            source = next((unit.reads[read] for out, read in saved.shows if out == number), None)
            if value is None or box is None:
                outs.append(None)
                continue
            if source is not None and source in self._env:
                token = self._hold(self._env[source][0])
            else:
                token = self._kept(value, box) if is_stored else self._new(box_bytes(value, box))
            outs.append(token)
            if unit.part is None:
                self._env[value] = token, box
        return outs

    # ------------------------------------------------------------------------------------------ backward

    def backward(self) -> None:
        """Simulate the backward of the steps, with the gradients as autograd makes and frees them."""
        for value, box in self.tile.kept.items():
            if value.wants_grad:
                self._grads[value] = self._kept(value, box)
        for record in reversed(self._records):
            given = [self._grads.pop(out) for out in record.unit.outs if out in self._grads]
            if given or record.unit.part is not None:
                self._back(record, given)
            self._release(*given, *record.saved_tokens)

    def _back(self, record: _Record, given: list[int]) -> None:
        """Add the gradients of a step's arguments."""
        news = [self._new(self._scratch(record.unit, record.step, record.around))]
        for number, (value, box) in enumerate(zip(record.unit.reads, record.step.reads, strict=True)):
            around = record.around[number]
            if not value.wants_grad or (box is not None and is_empty(box)):
                continue
            if around is None:
                news.append(self._new(value.bytes))  # of a weight or a small value: accumulated at once
                continue
            shares = number in record.saved.passes and given
            token = self._hold(given[0]) if shares else self._new(box_bytes(value, box))
            if box is not None and box != around:
                token = self._moved(token, box_bytes(value, around))
            self._grads[value] = self._added(value, token, box_bytes(value, around))
        self._release(*news)

    def _moved(self, token: int, size: int) -> int:
        """Replace a token by a copy of another size."""
        new = self._new(size)
        self._release(token)
        return new

    def _added(self, value: Value, token: int, size: int) -> int:
        """Add a gradient to that of a value, in place unless that has another reference."""
        if value not in self._grads:
            return token
        old = self._grads[value]
        if self._counts[old] > 1:
            old = self._moved(old, size)
        self._release(token)
        return old
