"""Runs a schedule on real tensors, tile after tile: the forward without autograd, the backward with it.

The backward runs each tile again, from its windows of the kept values, with gradients enabled, and calls autograd on it.  The
resulting gradients are added up: those of windows where they overlap, those of weights and of small values over all tiles.  (A
small value is one that is not tiled, such as a statistic.)  A convolution whose result was kept is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Value
from widefield.geometry.box import Box, is_empty, size_of
from widefield.streaming.fusion import CompiledRegions, FusedOps, runs_of
from widefield.streaming.needed_tiles import needed_tiles, units_with_gradient
from widefield.streaming.progress import counted
from widefield.streaming.regions import Env, Leaves, Region, all_of, arguments, crop, detached_unless_wanted, leaf_of, merged
from widefield.streaming.schedule import FusedRegion, Stage, StreamedTile, TileSchedule
from widefield.streaming.spatial import SpatialStream
from widefield.streaming.storage.heap import trimmed
from widefield.streaming.storage.memory_pool import Pool
from widefield.streaming.storage.offload_buffer import ByteBudget, OffloadBuffer
from widefield.streaming.storage.result_writer import ResultWriter
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp, asks_shape_alone


class Runner:
    """One forward of a schedule and, with `keeps`, its backward.

    given: the tensor, or WindowedImage, of every input, weight and constant.  tiled: those of which a rank has only its tile.
    place: where values and gradients are stored between segments, but for what fits in `room`, on the device.
    pool: where their memory comes from.  fused: compiled runs of pointwise operations; None: nothing is compiled.
    writers: results that are given away tile by tile, without a backward, and are not in memory as a whole.
    """

    def __init__(
        self,
        program: TileSchedule,
        spatial: SpatialStream,
        given: Mapping[Value, Any],
        tiled: Collection[Value] = (),
        *,
        keeps: bool = False,
        place: str = "device",
        pool: Pool | None = None,
        fused: CompiledRegions | None = None,
        room: ByteBudget | None = None,
        writers: Mapping[Value, ResultWriter] | None = None,
    ) -> None:
        self.room, self.writers = room, writers or {}
        self.needed = needed_tiles(program, self.writers) if writers and spatial.is_single_rank else None
        self.program, self.spatial, self.layouts, self.keeps = program, spatial, program.layouts, keeps
        self.place, self.pool, self.fused, self.results = place, pool, fused, set(program.graph.results)
        self.stores: dict[Value, Any] = {}
        self.small: dict[Value, Tensor] = {}
        self.parts: dict[TracedOp, Tensor] = {}
        self.is_spent = False
        for value, tensor in given.items():
            if value not in self.layouts:
                changes = keeps and value.name in program.graph.updates  # the backward reads what the forward read
                whole = tensor.read(all_of(value)) if hasattr(tensor, "read") else tensor.detach()
                self.small[value] = whole.clone() if changes else whole
            elif hasattr(tensor, "read"):
                self.stores[value] = tensor
            elif value in tiled:
                self.stores[value] = Region(OffloadBuffer.of(tensor.detach()), spatial.own_box(self.layouts[value]))
            else:
                self.stores[value] = Region(OffloadBuffer.of(tensor.detach()), all_of(value), is_replicated=True)

    def _new(self, value: Value, box: Box | None = None) -> Any:
        if value in self.writers and value not in self.program.read_again:
            return self.writers[value]
        box = self.spatial.own_box(self.layouts[value]) if box is None else box
        is_result = value in self.results  # the caller gets it, so it is on the device and not from the pool
        place, pool = ("device", None) if is_result else (self.place, self.pool)
        buffer = OffloadBuffer(size_of(box), value.dtype, value.device, place, value.order, pool, self.room)
        return Region(buffer, box)

    # ------------------------------------------------------------------------------------------ forward

    def forward(self) -> dict[Value, Tensor]:
        """The graph's results: outputs, of which this rank has its tile, and new values of buffers."""
        with torch.no_grad():
            for number, stage in enumerate(self.program.stages):
                for unit in stage.once:
                    self.spatial.check_generators(unit)
                    assert unit.call is not None
                    self._put(unit, unit.call([self._whole(unit, n) for n in range(len(unit.reads))]))
                for segment in stage.segments:
                    self._forward_segment(segment)
                self._forget(number)
            found = {value: tensor for value in self.program.graph.results if (tensor := self._result(value)) is not None}
        for value in self.results.difference(self.program.read_again):
            self.stores.pop(value, None)  # it is the caller's, and the backward does not read it
        return found

    def _result(self, value: Value) -> Tensor | None:
        """None: its writer has it."""
        box = self.spatial.own_box(self.layouts[value]) if value in self.layouts else all_of(value)
        store = self.stores.get(value)
        if isinstance(store, ResultWriter):
            return None
        if value not in self.layouts:
            found = self.small[value]
        else:
            found = store.all() if isinstance(store, Region) and store.box == box else store.read(box)
        if value not in self.writers:
            return found
        self.writers[value].write(box, found)
        return None

    def _put(self, unit: TracedOp, results: Sequence[Any]) -> None:
        for out, result in zip(unit.outs, results, strict=True):
            if out is not None and out in self.layouts:
                self.stores[out] = Region(OffloadBuffer.of(result), all_of(out), is_replicated=True)
            elif out is not None:
                self.small[out] = result

    def _whole(self, unit: TracedOp, number: int) -> Tensor:
        """A tensor argument of a unit that runs once."""
        value = unit.reads[number]
        if asks_shape_alone(unit.node):
            return torch.empty_permuted(value.shape, value.order, dtype=value.dtype, device=value.device)
        if value not in self.layouts:
            return self.small[value]
        if number not in unit.wide:  # without pixels: the unit reads only its shape and dtype
            shape = [0 if cut is not None else n for n, cut in zip(value.shape, self.layouts[value].cuts, strict=True)]
            return torch.empty(shape, dtype=value.dtype, device=value.device)
        return self._all_of(value, self.stores[value])

    def _all_of(self, value: Value, store: Any) -> Tensor:
        """All pixels, on every rank."""
        if isinstance(store, Region) and not store.is_replicated and not self.spatial.is_single_rank:
            return self.spatial.whole(self.layouts[value], store.all())
        return store.read(all_of(value))

    def _forward_segment(self, segment: FusedRegion) -> None:
        sources = self._sources(segment)
        parts: dict[TracedOp, list[Tensor]] = {unit: [] for unit in segment.parts}
        self.stores.update({value: self._new(value) for value in segment.kept})
        for tile in trimmed(counted(self.spatial.local(segment.tiles), "forward", segment, self.program.segments), self.keeps):
            if self.needed is not None and tile.number not in self.needed[segment]:
                continue
            env: Env = {value: (sources[value].read(box), box) for value, box in tile.sources.items()}
            self._steps(tile, env, self.small)
            for value, box in tile.kept.items():
                self.stores[value].write(box, crop(*env[value], box))
            for unit, step in tile.parts:
                parts[unit].append(step.call(arguments(unit, step, env, self.small))[0])
        for unit, found in parts.items():
            self.parts[unit] = self.spatial.gather_parts(unit, segment.tiles, torch.stack(found))
            total = unit.outs[0]
            assert total is not None
            self.small[total] = merged(unit, self.parts[unit])

    def _sources(self, segment: FusedRegion) -> dict[Value, Any]:
        """The regions that the tiles of a segment read: kept values, with the pixels that are fetched from other ranks."""
        found = {value: self.stores[value] for value in segment.sources}
        if self.spatial.is_single_rank:
            return found
        pairs = []
        for value, store in found.items():
            wanted = self.spatial.wanted(value, segment.tiles)
            if isinstance(store, Region) and not store.is_replicated and not self.spatial.is_local(self.layouts[value], wanted):
                pairs.append((value, wanted))
        moves = [(self.layouts[value], wanted, found[value].all()) for value, wanted in pairs]
        for (value, wanted), tensor in zip(pairs, self.spatial.fetch(moves) if moves else [], strict=True):
            found[value] = Region(OffloadBuffer.of(tensor), wanted[self.spatial.grid.index])
        return found

    def _steps(self, tile: StreamedTile, env: Env, small: Any) -> None:
        again = torch.is_grad_enabled()
        for run in runs_of(tile) if self.fused is not None else map(FusedOps, ([pair] for pair in tile.steps), tile.drop):
            with torch.set_grad_enabled(again and run.steps[0][0].node.grad):
                if self.fused is not None and not run.is_one:
                    self.fused(run, env, small)
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

    def _forget(self, stage: int) -> None:
        """Free the values that no later stage reads, if no backward follows."""
        if self.keeps:
            return
        for value in list(self.stores):
            is_read = self.program.last.get(value, -1) > stage or self.program.kept.get(value, -1) > stage
            if value.source == "made" and value not in self.results and not is_read:
                self.stores.pop(value).free()

    # ------------------------------------------------------------------------------------------ backward

    def backward(self, grads: Mapping[Value, Tensor]) -> Callable[[Value], Tensor | None]:
        """From the gradients of outputs, a function that gives the gradients of inputs and weights, or None.

        With several ranks a weight's gradient is this rank's part times their number, so that the mean over ranks is exact.
        """
        self.grads: dict[Value, Tensor] = {}
        self.parts_of_grads: dict[Value, Tensor] = {}
        self.grad_buffers: dict[Value, Region] = {}
        self.leaves: dict[Value, Tensor] = {}
        for value, grad in grads.items():
            box = self.spatial.own_box(self.layouts[value]) if value in self.layouts else None
            if box is None or is_empty(box) or value in self.program.read_again:
                self._add(value, grad, box)
            else:  # no tile adds to it, so it is read where it is
                self.grad_buffers[value] = Region(OffloadBuffer.of(grad), box)
        for number in reversed(range(len(self.program.stages))):
            stage = self.program.stages[number]
            for segment in reversed(stage.segments):
                self._backward_segment(segment)
            self._backward_once(stage)
            self._forget_backward(number)
        return self._gradient

    def close(self) -> None:
        """After a backward, let go of all tensors: autograd's graph has this object for as long as the caller has the loss."""
        for tensors in (self.stores, self.small, self.parts, self.grads, self.parts_of_grads, self.grad_buffers, self.leaves):
            tensors.clear()

    def _gradient(self, value: Value) -> Tensor | None:
        if value in self.layouts:
            return self.grad_buffers[value].all() if value in self.grad_buffers else None
        found = [self.grads[value]] if value in self.grads else []
        found += [self.parts_of_grads[value] * self.spatial.grid.size] if value in self.parts_of_grads else []
        return sum(found[1:], found[0]) if found else None

    def _add(self, value: Value, grad: Tensor, box: Box | None) -> None:
        if value not in self.layouts:
            self.grads[value] = grad if value not in self.grads else self.grads[value] + grad
            return
        assert box is not None
        if value not in self.grad_buffers:
            self.grad_buffers[value] = self._new(value)
        if not is_empty(box):
            self.grad_buffers[value].add(box, grad)

    def _leaf(self, value: Value) -> Tensor:
        """A small value or weight as a leaf, whose gradient `_flush` collects."""
        if not value.wants_grad:
            return self.small[value]
        if value not in self.leaves:
            self.leaves[value] = self.small[value].detach().requires_grad_()
        return self.leaves[value]

    def _flush(self, segment: FusedRegion | None) -> None:
        """Collect the gradients of small values; those from a segment's tiles are this rank's part."""
        leaves, self.leaves = self.leaves, {}
        if segment is None or self.spatial.is_single_rank:
            for value, leaf in leaves.items():
                if leaf.grad is not None:
                    self._add(value, leaf.grad, None)
            return
        made = [value for value in segment.reads if value.wants_grad and value not in self.layouts]
        grads = [
            leaves[v].grad if v in leaves and leaves[v].grad is not None else torch.zeros_like(self.small[v]) for v in made
        ]
        inner = [n for n, value in enumerate(made) if value.source == "made"]
        for n, total in zip(inner, self.spatial.add_up([grads[n] for n in inner]), strict=True):  # type: ignore[misc]
            self._add(made[n], total, None)
        for value, grad in zip(made, grads, strict=True):
            if value.source != "made" and grad is not None:
                before = self.parts_of_grads.get(value)
                self.parts_of_grads[value] = grad if before is None else before + grad

    def _backward_segment(self, segment: FusedRegion) -> None:
        of_parts = {unit: self._part_grads(unit, segment) for unit in segment.parts}
        wanted = [value for value in segment.kept if value.wants_grad and value in self.grad_buffers]
        if not wanted and all(part_grad is None for part_grad in of_parts.values()):
            return
        sources, small = self._sources(segment), Leaves(self._leaf)
        around = self._halo_buffers(segment)
        known = {unit: self.spatial.own_parts(unit, segment.tiles, self.parts[unit]) for unit in segment.parts}
        count = dict.fromkeys(segment.parts, 0)
        with torch.enable_grad():
            for tile in counted(self.spatial.local(segment.tiles), "backward", segment, self.program.segments):
                env: Env = {v: (leaf_of(v, sources[v].read(box)), box) for v, box in tile.sources.items()}
                leaves = {value: tensor for value, (tensor, _) in env.items() if tensor.requires_grad}
                self._steps(tile, env, small)
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
                        self._add(value, leaf.grad, box) if into is None else into.add(box, leaf.grad)
        self._add_halo_gradients(segment, around)
        self._flush(segment)

    def _halo_buffers(self, segment: FusedRegion) -> dict[Value, Region]:
        """With several ranks, buffers for the gradients of the pixels that this rank's windows read, its halo included."""
        if self.spatial.is_single_rank:
            return {}
        boxes = {v: self.spatial.wanted(v, segment.tiles)[self.spatial.grid.index] for v in segment.sources if v.wants_grad}
        return {value: self._new(value, box) for value, box in boxes.items()}

    def _add_halo_gradients(self, segment: FusedRegion, around: Mapping[Value, Region]) -> None:
        """Send the gradients of halos to the ranks that own these pixels, and add those received."""
        pairs = [(self.layouts[v], self.spatial.wanted(v, segment.tiles), region.all()) for v, region in around.items()]
        for value, pieces in zip(around, self.spatial.send_back(pairs) if pairs else [], strict=True):
            if value not in self.grad_buffers:
                self.grad_buffers[value] = self._new(value)
            for box, piece in pieces:
                self._add(value, piece, box)

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
        units = units_with_gradient(stage.once, self._has_grad)
        made = {out for unit in units for out in unit.outs if out is not None}
        env: dict[Value, Tensor] = {}
        full: dict[Value, Tensor] = {}
        small = Leaves(self._leaf)
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
                        tensors.append(self._whole(unit, number))
                    else:
                        if value not in full:
                            full[value] = leaf_of(value, self._whole(unit, number))
                        tensors.append(full[value])
                with torch.set_grad_enabled(unit.node.grad):
                    results = unit.call(tensors)
                pairs = zip(unit.outs, results, strict=True)
                env.update({out: detached_unless_wanted(out, result) for out, result in pairs if out is not None})
            outs = [value for value, tensor in env.items() if tensor.requires_grad and self._has_grad(value)]
            grads = [self._take_grad(value) for value in outs]
            if outs:
                torch.autograd.backward([env[value] for value in outs], grads)
        for value, leaf in full.items():
            if leaf.grad is not None:
                box = self.spatial.own_box(self.layouts[value])
                self._add(value, crop(leaf.grad, all_of(value), box), box)
        self._flush(None)

    def _has_grad(self, value: Value) -> bool:
        return value in self.grads or value in self.grad_buffers

    def _take_grad(self, value: Value) -> Tensor:
        if value in self.grad_buffers:
            return self._all_of(value, self.grad_buffers.pop(value))
        return self.grads.pop(value)

    def _forget_backward(self, stage: int) -> None:
        """Free the kept values and gradients that no earlier stage needs."""
        for value, made in self.program.kept.items():
            for stores in (self.stores, self.grad_buffers):
                if made >= stage and value in stores:
                    stores.pop(value).free()
