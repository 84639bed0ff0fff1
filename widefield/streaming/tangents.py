"""What a loss of gradients asks of a stream, such as a penalty on them: the derivative of its backward.

From gradients u of its results a backward makes gradients J'u of inputs and weights.  A loss of these has gradients v at them,
and what is asked for are the gradients of

    <v, J'u> = <u, J v>

by u, which is J v, and by inputs and weights.  J v is what the results change by where inputs and weights change along v: their
tangents.  So a second pass goes over the same tiles.  Its forward makes the tangent of each value that is stored, from those of
the values that a tile reads.  Its backward runs each tile again and differentiates the tile's own backward, so that a value and
its tangent get a gradient each; those of the results' tangents are u.  Values are there from the first forward, tangents are
stored beside them, and nothing is drawn again.  Source: Pearlmutter 1994, Fast exact multiplication by the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Graph, Value
from widefield.streaming.derivatives import TwoBackwards, pushed
from widefield.streaming.needed_tiles import units_with_gradient
from widefield.streaming.progress import counted
from widefield.streaming.regions import Env, Leaves, Region, all_of, arguments, crop, detached_unless_wanted, leaf_of, merged
from widefield.streaming.run_state import RunState
from widefield.streaming.runner import Runner
from widefield.streaming.schedule import FusedRegion, Stage, StreamedTile
from widefield.streaming.storage.heap import trimmed
from widefield.streaming.tile_planner import TracedOp

Moves = list[tuple[Tensor, Tensor]]
"""Leaves of autograd with their tangents."""
PairOfGrads = Sequence[Tensor | None]
"""The gradients of a value and of its tangent."""


def moved_by(graph: Graph, given: Iterable[Value]) -> set[Value]:
    """The values that change where the given ones do, and whose change autograd would follow."""
    moved = set(given)
    for node in graph.nodes:
        if node.grad and any(value in moved for value in node.reads):
            moved.update(out for out in node.outs if out is not None and out.wants_grad)
    return moved


class _Tangents(RunState):
    """The tangents of a forward's values, where they have one, and the gradients of these."""

    def has(self, value: Value) -> bool:
        return value in self.stores or value in self.small

    def wants(self, value: Value) -> bool:
        return value.wants_grad and value.source == "made" and self.has(value)

    def add_to_leaf(self, value: Value, grad: Tensor) -> None:
        """Add to the gradient of a small value, for `flush` to collect."""
        leaf = self.leaf(value)
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad


class TangentPass:
    """The second pass, forward and backward.

    run: after its forward, with the values that its backward reads.
    given: the tangents of inputs and weights, those of this rank's tile.
    """

    def __init__(self, run: Runner, given: Mapping[Value, Tensor]) -> None:
        self.run, self.program, self.spatial = run, run.program, run.spatial
        tiled = [v for v in given if isinstance(at := run.stores.get(v), Region) and not at.is_replicated]
        where: dict[str, Any] = {"place": run.place, "pool": run.pool, "room": run.room}
        self.along = _Tangents(run.program, run.spatial, given, tiled, keeps=True, **where)
        self.both: tuple[RunState, RunState] = (run, self.along)
        self.moved = moved_by(run.program.graph, given)

    # ------------------------------------------------------------------------------------------ forward

    def forward(self) -> dict[Value, Tensor]:
        """The tangents of the results that have one, of which this rank has its tile."""
        for stage in self.program.stages:
            for unit in filter(self._is_moved, stage.once):
                self._forward_once(unit)
            for segment in stage.segments:
                self._forward_segment(segment)
        results = [value for value in self.program.graph.results if self.along.has(value)]
        return {value: tensor for value in results if (tensor := self.along.result(value)) is not None}

    def _is_moved(self, unit: TracedOp) -> bool:
        return unit.node.grad and not unit.node.draws and any(value in self.moved for value in unit.reads)

    def _forward_once(self, unit: TracedOp) -> None:
        assert unit.call is not None
        tensors, moves = list[Tensor](), Moves()
        for number, value in enumerate(unit.reads):
            tensors.append(leaf_of(value, self.run.whole(unit, number)))
            if self.along.has(value) and tensors[-1].requires_grad:
                moves.append((tensors[-1], self.along.whole(unit, number)))
        with torch.enable_grad():
            results = unit.call(tensors)
        wanted = [made if value in self.moved else None for value, made in zip(unit.outs, results, strict=True)]
        self.along.put(unit, pushed(wanted, moves))

    def _forward_segment(self, segment: FusedRegion) -> None:
        kept = [value for value in segment.kept if value in self.moved]
        parts: dict[TracedOp, list[Tensor]] = {unit: [] for unit in segment.parts if self._is_moved(unit)}
        if not kept and not parts:
            return
        sources, tangents = (state.sources(segment) for state in self.both)
        self.along.stores.update({value: self.along.new(value) for value in kept})
        for tile in trimmed(counted(self.spatial.local(segment.tiles), "forward", segment, self.program.segments), True):
            with torch.enable_grad():
                env: Env = {v: (leaf_of(v, sources[v].read(box)), box) for v, box in tile.sources.items()}
                moves = [(env[v][0], tangents[v].read(box)) for v, box in tile.sources.items() if v in tangents]
                found = self._made(tile, env, kept, parts)
            moves += [(leaf, self.along.small[v]) for v, leaf in self.run.leaves.items() if v in self.along.small]
            for target, tangent in zip(found, pushed(list(found.values()), moves), strict=True):
                assert tangent is not None
                if isinstance(target, Value):
                    self.along.stores[target].write(tile.kept[target], tangent)
                else:
                    parts[target].append(tangent)
        self.run.leaves.clear()
        for unit, own in parts.items():
            self._merge(unit, self.spatial.gather_parts(unit, segment.tiles, torch.stack(own)))

    def _made(
        self, tile: StreamedTile, env: Env, kept: Iterable[Value], parts: Iterable[TracedOp]
    ) -> dict[Value | TracedOp, Tensor]:
        """What a tile makes of these values and parts of reductions, with its history.  env: what it reads; emptied."""
        small = Leaves(self.run.leaf)
        self.run.steps(tile, env, small, compiled=False)
        found: dict[Value | TracedOp, Tensor] = {}
        found.update({value: crop(*env[value], tile.kept[value]) for value in kept if value in tile.kept})
        found.update({unit: step.call(arguments(unit, step, env, small))[0] for unit, step in tile.parts if unit in parts})
        env.clear()
        return found

    def _merge(self, unit: TracedOp, tangents: Tensor) -> None:
        total = unit.outs[0]
        assert total is not None
        self.moved.add(total)
        self.along.parts[unit] = tangents
        with torch.enable_grad():
            parts = self.run.parts[unit].detach().requires_grad_()
            (tangent,) = pushed([merged(unit, parts)], [(parts, tangents)])
        assert tangent is not None
        self.along.small[total] = tangent

    # ------------------------------------------------------------------------------------------ backward

    def backward(self, grads: Mapping[Value, Tensor]) -> Callable[[Value], Tensor | None]:
        """From gradients of results the gradients of <grads, J v> by inputs and weights, as the first backward gives its own.

        A forward has to be before it; the tangents are gone then, and the values of the first forward are not.
        """
        self.run.start_backward({})
        self.along.start_backward({value: grad for value, grad in grads.items() if self.along.has(value)})
        for number in reversed(range(len(self.program.stages))):
            stage = self.program.stages[number]
            for segment in reversed(stage.segments):
                self._backward_segment(segment)
            self._backward_once(stage)
            self.run.forget_backward(number, values=False)
            self.along.forget_backward(number)
        self.run.drop_unreached()
        return self.run.gradient

    def _backward_segment(self, segment: FusedRegion) -> None:
        of_parts = {unit: self._part_grads(unit, segment) for unit in segment.parts}
        of_parts = {unit: pair for unit, pair in of_parts.items() if any(grad is not None for grad in pair)}
        wanted = [value for value in segment.kept if value.wants_grad and any(value in s.grad_buffers for s in self.both)]
        if not wanted and not of_parts:
            return
        sources, tangents = (state.sources(segment) for state in self.both)
        around = [state.halo_buffers(segment) for state in self.both]
        seen = dict.fromkeys(of_parts, 0)
        for tile in counted(self.spatial.local(segment.tiles), "backward", segment, self.program.segments):
            twice = TwoBackwards()
            with torch.enable_grad():
                env: Env = {v: (leaf_of(v, sources[v].read(box)), box) for v, box in tile.sources.items()}
                leaves = {v: tensor for v, (tensor, _) in env.items() if tensor.requires_grad}
                for target, made in self._made(tile, env, wanted, of_parts).items():
                    if isinstance(target, Value):
                        twice.add(made, self._grads_of(target, tile))
                    else:
                        twice.add(made, [None if grad is None else grad[seen[target]] for grad in of_parts[target]])
                        seen[target] += 1
            windows = {v: tangents[v].read(tile.sources[v]) for v in leaves if v in tangents}
            self._backward_tile(twice, tile, leaves, windows, around)
        for state, buffers in zip(self.both, around, strict=True):
            state.add_halo_gradients(segment, buffers)
            state.flush(segment)

    def _grads_of(self, value: Value, tile: StreamedTile) -> PairOfGrads:
        box = tile.kept[value]
        return [state.grad_buffers[value].read(box) if value in state.grad_buffers else None for state in self.both]

    def _backward_tile(
        self,
        twice: TwoBackwards,
        tile: StreamedTile,
        leaves: Mapping[Value, Tensor],
        windows: Mapping[Value, Tensor],
        around: Sequence[Mapping[Value, Region]],
    ) -> None:
        """Add what a tile gives to the gradients of what it has read.

        leaves, windows: its windows, and those of tangents.  around: with several ranks, buffers for their gradients.
        """
        small = {value: leaf for value, leaf in self.run.leaves.items() if leaf.requires_grad}
        tangents = {**windows, **{value: self.along.small[value] for value in small if value in self.along.small}}
        found = twice.run({**leaves, **small}, tangents)
        for value, leaf in leaves.items():
            box = tile.sources[value]
            for state, grad, buffers in zip(self.both, (leaf.grad, found.get(value)), around, strict=True):
                if grad is not None and state.wants(value):
                    state.add(value, grad, box) if value not in buffers else buffers[value].add(box, grad)
        for value in filter(self.along.wants, small):
            if value in found:
                self.along.add_to_leaf(value, found[value])

    def _part_grads(self, unit: TracedOp, segment: FusedRegion) -> PairOfGrads:
        """The gradients of this rank's parts of a reduction, and of their tangents; None where the total's has none."""
        total = unit.outs[0]
        assert total is not None
        grads = [state.grads.pop(total, None) for state in self.both]
        grads = [None if grad is None else self.spatial.add_up_over_copies(unit, grad) for grad in grads]
        if all(grad is None for grad in grads):
            return grads
        twice, parts = TwoBackwards(), self.run.parts[unit].detach().requires_grad_()
        with torch.enable_grad():
            twice.add(merged(unit, parts), grads)
        of_tangents = twice.run({total: parts}, {total: self.along.parts[unit]} if unit in self.along.parts else {})
        found = [parts.grad, of_tangents.get(total)]
        return [None if grad is None else self.spatial.own_parts(unit, segment.tiles, grad) for grad in found]

    def _backward_once(self, stage: Stage) -> None:
        """The backward of all units of a stage that run once; the gradients of their results are complete."""
        units = units_with_gradient(stage.once, lambda value: any(state.has_grad(value) for state in self.both))
        env: dict[Value, Tensor] = {}
        full: dict[Value, Tensor] = {}
        tangents: dict[Value, Tensor] = {}
        twice = TwoBackwards()
        with torch.enable_grad():
            for unit in units:
                assert unit.call is not None
                tensors = [self._argument_once(unit, number, env, full, tangents) for number in range(len(unit.reads))]
                with torch.set_grad_enabled(unit.node.grad):
                    results = unit.call(tensors)
                pairs = zip(unit.outs, results, strict=True)
                env.update({out: detached_unless_wanted(out, result) for out, result in pairs if out is not None})
            for value, made in env.items():
                twice.add(made, [state.take_grad(value) if state.has_grad(value) else None for state in self.both])
        small = {value: leaf for value, leaf in self.run.leaves.items() if leaf.requires_grad}
        tangents.update({value: self.along.small[value] for value in small if value in self.along.small})
        leaves = {value: leaf for value, leaf in full.items() if leaf.requires_grad}
        found = twice.run({**leaves, **small}, tangents)
        for value, leaf in leaves.items():
            box = self.spatial.own_box(self.run.layouts[value])
            for state, grad in zip(self.both, (leaf.grad, found.get(value)), strict=True):
                if grad is not None and state.wants(value):
                    state.add(value, crop(grad, all_of(value), box), box)
        for value in filter(self.along.wants, small):
            if value in found:
                self.along.add_to_leaf(value, found[value])
        for state in self.both:
            state.flush(None)

    def _argument_once(
        self, unit: TracedOp, number: int, env: dict[Value, Tensor], full: dict[Value, Tensor], tangents: dict[Value, Tensor]
    ) -> Tensor:
        """An argument in the backward.  env: what units have made.  full, tangents: of tiled values, filled here."""
        value = unit.reads[number]
        if value in env:
            return env[value]
        if value not in self.run.layouts:
            return self.run.leaf(value)
        if number not in unit.wide:
            return self.run.whole(unit, number)
        if value not in full:
            full[value] = leaf_of(value, self.run.whole(unit, number))
            if self.along.has(value):
                tangents[value] = self.along.whole(unit, number)
        return full[value]
