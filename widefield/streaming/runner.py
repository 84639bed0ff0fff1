"""Runs a schedule on real tensors, tile after tile: the forward without autograd, the backward with it.

The backward runs each tile again, from its windows of the kept values, with gradients enabled, and calls autograd on it.  The
resulting gradients are added up: those of windows where they overlap, those of weights and of small values over all tiles.  (A
small value is one that is not tiled, such as a statistic.)  A convolution whose result was kept is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Value
from widefield.streaming.fusion import CompiledRegions, FusedOps, runs_of
from widefield.streaming.needed_tiles import units_with_gradient
from widefield.streaming.progress import counted
from widefield.streaming.regions import Env, Leaves, all_of, arguments, crop, detached_unless_wanted, leaf_of, merged
from widefield.streaming.run_state import RunState
from widefield.streaming.schedule import FusedRegion, Stage, StreamedTile
from widefield.streaming.storage.heap import trimmed
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp


class Runner(RunState):
    """One forward of a schedule and, with `keeps`, its backward; see RunState.

    fused: compiled runs of pointwise operations; None: nothing is compiled.
    """

    def __init__(self, *given: Any, fused: CompiledRegions | None = None, **where: Any) -> None:
        super().__init__(*given, **where)
        self.fused, self.is_spent = fused, False

    def forward(self) -> dict[Value, Tensor]:
        """The graph's results: outputs, of which this rank has its tile, and new values of buffers."""
        with torch.no_grad():
            for number, stage in enumerate(self.program.stages):
                for unit in stage.once:
                    self.spatial.check_generators(unit)
                    assert unit.call is not None
                    self.put(unit, unit.call([self.whole(unit, n) for n in range(len(unit.reads))]))
                for segment in stage.segments:
                    self._forward_segment(segment)
                self.forget(number)
            found = {value: tensor for value in self.program.graph.results if (tensor := self.result(value)) is not None}
        for value in self.results.difference(self.program.read_again):
            self.stores.pop(value, None)  # it is the caller's, and the backward does not read it
        return found

    def _forward_segment(self, segment: FusedRegion) -> None:
        sources = self.sources(segment)
        parts: dict[TracedOp, list[Tensor]] = {unit: [] for unit in segment.parts}
        self.stores.update({value: self.new(value) for value in segment.kept})
        for tile in trimmed(counted(self.spatial.local(segment.tiles), "forward", segment, self.program.segments), self.keeps):
            if self.needed is not None and tile.number not in self.needed[segment]:
                continue
            env: Env = {value: (sources[value].read(box), box) for value, box in tile.sources.items()}
            self.steps(tile, env, self.small)
            for value, box in tile.kept.items():
                self.stores[value].write(box, crop(*env[value], box))
            for unit, step in tile.parts:
                parts[unit].append(step.call(arguments(unit, step, env, self.small))[0])
        for unit, found in parts.items():
            self.parts[unit] = self.spatial.gather_parts(unit, segment.tiles, torch.stack(found))
            total = unit.outs[0]
            assert total is not None
            self.small[total] = merged(unit, self.parts[unit])

    def steps(self, tile: StreamedTile, env: Env, small: Any, *, compiled: bool = True) -> None:
        """Run a tile's operations.  env: what it has read; what it makes is added.  small: the values that are not tiled."""
        again, fused = torch.is_grad_enabled(), self.fused if compiled else None
        for run in runs_of(tile) if fused is not None else map(FusedOps, ([pair] for pair in tile.steps), tile.drop):
            with torch.set_grad_enabled(again and run.steps[0][0].node.grad):
                if fused is not None and not run.is_one:
                    fused(run, env, small)
                else:
                    self._step(tile, *run.steps[0], env, small, again)
            for value in run.drop:
                env.pop(value, None)

    def _step(self, tile: StreamedTile, unit: TracedOp, step: TileOp, env: Env, small: Any, again: bool) -> None:
        tensors, out = arguments(unit, step, env, small), unit.outs[0]
        if again and step.attach_grad is not None and self._is_stored(tile, out) and tile.kept[out] == step.outs[0]:
            results: list[Any] = [step.attach_grad(self.stores[out].read(tile.kept[out]), tensors)]
        else:
            results = step.call(tensors)
        for value, result, box in zip(unit.outs, results, step.outs, strict=True):
            if value is not None and box is not None:
                env[value] = (detached_unless_wanted(value, result), box)

    def _is_stored(self, tile: StreamedTile, value: Value | None) -> bool:
        """Whether a tile of the backward may read the stored result; the caller may have changed results of the graph."""
        return value in tile.kept and value not in self.results

    # ------------------------------------------------------------------------------------------ backward

    def backward(self, grads: Mapping[Value, Tensor], *, again: bool = False) -> Callable[[Value], Tensor | None]:
        """From the gradients of outputs, a function that gives the gradients of inputs and weights; see `gradient`.

        again: whether another backward follows; the values that it reads are not freed.
        """
        self.start_backward(grads)
        for number in reversed(range(len(self.program.stages))):
            stage = self.program.stages[number]
            for segment in reversed(stage.segments):
                self._backward_segment(segment)
            self._backward_once(stage)
            self.forget_backward(number, values=not again)
        return self.gradient

    def _backward_segment(self, segment: FusedRegion) -> None:
        of_parts = {unit: self._part_grads(unit, segment) for unit in segment.parts}
        wanted = [value for value in segment.kept if value.wants_grad and value in self.grad_buffers]
        if not wanted and all(part_grad is None for part_grad in of_parts.values()):
            return
        sources, small = self.sources(segment), Leaves(self.leaf)
        around = self.halo_buffers(segment)
        known = {unit: self.spatial.own_parts(unit, segment.tiles, self.parts[unit]) for unit in segment.parts}
        count = dict.fromkeys(segment.parts, 0)
        with torch.enable_grad():
            for tile in counted(self.spatial.local(segment.tiles), "backward", segment, self.program.segments):
                env: Env = {v: (leaf_of(v, sources[v].read(box)), box) for v, box in tile.sources.items()}
                leaves = {value: tensor for value, (tensor, _) in env.items() if tensor.requires_grad}
                self.steps(tile, env, small)
                outs, grads = [], []
                for value in wanted:
                    if value in tile.kept and env[value][0].requires_grad:
                        outs.append(crop(*env[value], tile.kept[value]))
                        grads.append(self.grad_buffers[value].read(tile.kept[value]))
                for unit, step in tile.parts:
                    part_grad = of_parts[unit]
                    if part_grad is not None:
                        tensors, own = arguments(unit, step, env, small), known[unit][count[unit]]
                        part = step.call(tensors)[0] if step.attach_grad is None else step.attach_grad(own, tensors)
                        if part.requires_grad:
                            outs.append(part)
                            grads.append(part_grad[count[unit]])
                    count[unit] += 1
                env.clear()
                if outs:
                    torch.autograd.backward(outs, grads)
                for value, leaf in leaves.items():
                    if leaf.grad is not None:
                        into, box = around.get(value), tile.sources[value]
                        self.add(value, leaf.grad, box) if into is None else into.add(box, leaf.grad)
        self.add_halo_gradients(segment, around)
        self.flush(segment)

    def _part_grads(self, unit: TracedOp, segment: FusedRegion) -> Tensor | None:
        """The gradients of this rank's parts of a reduction; None if its total has none."""
        total = unit.outs[0]
        assert total is not None
        part_grad = self.grads.pop(total, None)
        if part_grad is None:
            return None
        with torch.enable_grad():
            parts = self.parts[unit].detach().requires_grad_()
            (found,) = torch.autograd.grad(merged(unit, parts), parts, self.spatial.add_up_over_copies(unit, part_grad))
        return self.spatial.own_parts(unit, segment.tiles, found)

    def _backward_once(self, stage: Stage) -> None:
        """The backward of all units of a stage that run once; the gradients of their results are complete."""
        units = units_with_gradient(stage.once, self.has_grad)
        made = {out for unit in units for out in unit.outs if out is not None}
        env: dict[Value, Tensor] = {}
        full: dict[Value, Tensor] = {}
        small = Leaves(self.leaf)
        with torch.enable_grad():
            for unit in units:
                assert unit.call is not None
                tensors = []
                for number, value in enumerate(unit.reads):
                    if value in made:
                        tensors.append(env[value])
                    elif value not in self.layouts:
                        tensors.append(small[value])
                    elif number not in unit.wide:
                        tensors.append(self.whole(unit, number))
                    else:
                        if value not in full:
                            full[value] = leaf_of(value, self.whole(unit, number))
                        tensors.append(full[value])
                with torch.set_grad_enabled(unit.node.grad):
                    results = unit.call(tensors)
                pairs = zip(unit.outs, results, strict=True)
                env.update({out: detached_unless_wanted(out, result) for out, result in pairs if out is not None})
            outs = [value for value, tensor in env.items() if tensor.requires_grad and self.has_grad(value)]
            grads = [self.take_grad(value) for value in outs]
            if outs:
                torch.autograd.backward([env[value] for value in outs], grads)
        for value, leaf in full.items():
            if leaf.grad is not None:
                box = self.spatial.own_box(self.layouts[value])
                self.add(value, crop(leaf.grad, all_of(value), box), box)
        self.flush(None)
