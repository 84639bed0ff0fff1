"""What a run of a schedule has in memory: values, and the gradients of a backward, of tiles and of wholes.

A small value is one that is not tiled, such as a statistic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Value
from widefield.geometry.box import Box, is_empty, size_of
from widefield.streaming.needed_tiles import needed_tiles
from widefield.streaming.regions import Region, all_of
from widefield.streaming.schedule import FusedRegion, TileSchedule
from widefield.streaming.spatial import SpatialStream
from widefield.streaming.storage.memory_pool import Pool
from widefield.streaming.storage.offload_buffer import ByteBudget, OffloadBuffer
from widefield.streaming.storage.result_writer import ResultWriter
from widefield.streaming.tile_planner import TracedOp, asks_shape_alone


class RunState:
    """The values of one forward of a schedule and, with `keeps`, the gradients of its backward.

    given: the tensor, or WindowedImage, of every input, weight and constant.  tiled: those of which a rank has only its tile.
    place: where values and gradients are stored between segments, but for what fits in `room`, on the device.
    pool: where their memory comes from.
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
        room: ByteBudget | None = None,
        writers: Mapping[Value, ResultWriter] | None = None,
    ) -> None:
        self.room, self.writers = room, writers or {}
        self.needed = needed_tiles(program, self.writers) if writers and spatial.is_single_rank else None
        self.program, self.spatial, self.layouts, self.keeps = program, spatial, program.layouts, keeps
        self.place, self.pool, self.results = place, pool, set(program.graph.results)
        self.stores: dict[Value, Any] = {}
        self.small: dict[Value, Tensor] = {}
        self.parts: dict[TracedOp, Tensor] = {}
        self.start_backward({})
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

    def new(self, value: Value, box: Box | None = None) -> Any:
        """Where the pixels of a value in `box`, or this rank's, or their gradient, are to be stored."""
        if value in self.writers and value not in self.program.read_again:
            return self.writers[value]
        box = self.spatial.own_box(self.layouts[value]) if box is None else box
        is_result = value in self.results  # the caller gets it, so it is on the device and not from the pool
        place, pool = ("device", None) if is_result else (self.place, self.pool)
        buffer = OffloadBuffer(size_of(box), value.dtype, value.device, place, value.order, pool, self.room)
        return Region(buffer, box)

    def result(self, value: Value) -> Tensor | None:
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

    def put(self, unit: TracedOp, results: Sequence[Any]) -> None:
        """Store the results of a unit that runs once."""
        for out, result in zip(unit.outs, results, strict=True):
            if out is None or result is None:
                continue
            if out in self.layouts:
                self.stores[out] = Region(OffloadBuffer.of(result), all_of(out), is_replicated=True)
            else:
                self.small[out] = result

    def whole(self, unit: TracedOp, number: int) -> Tensor:
        """A tensor argument of a unit that runs once."""
        value = unit.reads[number]
        if asks_shape_alone(unit.node):
            return torch.empty_permuted(value.shape, value.order, dtype=value.dtype, device=value.device)
        if value not in self.layouts:
            return self.small[value]
        if number not in unit.wide:  # without pixels: the unit reads only its shape and dtype
            shape = [0 if cut is not None else n for n, cut in zip(value.shape, self.layouts[value].cuts, strict=True)]
            return torch.empty(shape, dtype=value.dtype, device=value.device)
        return self.all_pixels(value, self.stores[value])

    def all_pixels(self, value: Value, store: Any) -> Tensor:
        """All pixels, on every rank."""
        if isinstance(store, Region) and not store.is_replicated and not self.spatial.is_single_rank:
            return self.spatial.whole(self.layouts[value], store.all())
        return store.read(all_of(value))

    def sources(self, segment: FusedRegion) -> dict[Value, Any]:
        """The regions that the tiles of a segment read: kept values, with the pixels that are fetched from other ranks."""
        found = {value: self.stores[value] for value in segment.sources if value in self.stores}
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

    def forget(self, stage: int) -> None:
        """Free the values that no later stage reads, if no backward follows."""
        if self.keeps:
            return
        for value in list(self.stores):
            is_read = self.program.last.get(value, -1) > stage or self.program.kept.get(value, -1) > stage
            if value.source == "made" and value not in self.results and not is_read:
                self.stores.pop(value).free()

    def close(self) -> None:
        """After a backward, let go of all tensors: autograd's graph has this object for as long as the caller has the loss."""
        for tensors in (self.stores, self.small, self.parts):
            tensors.clear()
        self.start_backward({})

    # ------------------------------------------------------------------------------------------ gradients

    def start_backward(self, grads: Mapping[Value, Tensor]) -> None:
        """Forget the gradients of an earlier backward, and take those of results."""
        self.grads: dict[Value, Tensor] = {}
        self.parts_of_grads: dict[Value, Tensor] = {}
        self.grad_buffers: dict[Value, Region] = {}
        self.leaves: dict[Value, Tensor] = {}
        self.reached: set[Value] = set()
        for value, grad in grads.items():
            box = self.spatial.own_box(self.layouts[value]) if value in self.layouts else None
            if box is None or is_empty(box) or value in self.program.read_again:
                self.add(value, grad, box)
            else:  # no tile adds to it, so it is read where it is
                self.grad_buffers[value] = Region(OffloadBuffer.of(grad), box)

    def wants(self, value: Value) -> bool:
        """Whether a backward collects the gradient of a value."""
        return value.wants_grad

    def gradient(self, value: Value) -> Tensor | None:
        """Of an input or weight, after a backward; None where it got none.

        With several ranks a weight's gradient is this rank's part times their number, so that the mean over ranks is exact.
        """
        if value in self.layouts:
            return self.grad_buffers[value].all() if value in self.grad_buffers else None
        found = [self.grads[value]] if value in self.grads else []
        found += [self.parts_of_grads[value] * self.spatial.grid.size] if value in self.parts_of_grads else []
        return sum(found[1:], found[0]) if found else None

    def add(self, value: Value, grad: Tensor, box: Box | None) -> None:
        """Add to a value's gradient, of a tiled one in a box."""
        if value not in self.layouts:
            self.grads[value] = grad if value not in self.grads else self.grads[value] + grad
            return
        assert box is not None
        if value not in self.grad_buffers:
            self.grad_buffers[value] = self.new(value)
        if not is_empty(box):
            self.grad_buffers[value].add(box, grad)

    def leaf(self, value: Value) -> Tensor:
        """A small value or weight as a leaf, whose gradient `flush` collects."""
        if not self.wants(value):
            return self.small[value]
        if value not in self.leaves:
            self.leaves[value] = self.small[value].detach().requires_grad_()
        return self.leaves[value]

    def flush(self, segment: FusedRegion | None) -> None:
        """Collect the gradients of small values; those from a segment's tiles are this rank's part."""
        leaves, self.leaves = self.leaves, {}
        self.reached.update(value for value, leaf in leaves.items() if leaf.grad is not None)
        if segment is None or self.spatial.is_single_rank:
            for value, leaf in leaves.items():
                if leaf.grad is not None:
                    self.add(value, leaf.grad, None)
            return
        made = [value for value in segment.reads if self.wants(value) and value not in self.layouts]
        grads = [
            leaves[v].grad if v in leaves and leaves[v].grad is not None else torch.zeros_like(self.small[v]) for v in made
        ]
        inner = [n for n, value in enumerate(made) if value.source == "made"]
        for n, total in zip(inner, self.spatial.add_up([grads[n] for n in inner]), strict=True):  # type: ignore[misc]
            self.add(made[n], total, None)
        for value, grad in zip(made, grads, strict=True):
            if value.source != "made" and grad is not None:
                before = self.parts_of_grads.get(value)
                self.parts_of_grads[value] = grad if before is None else before + grad

    def halo_buffers(self, segment: FusedRegion) -> dict[Value, Region]:
        """With several ranks, buffers for the gradients of the pixels that this rank's windows read, its halo included."""
        if self.spatial.is_single_rank:
            return {}
        boxes = {v: self.spatial.wanted(v, segment.tiles)[self.spatial.grid.index] for v in segment.sources if self.wants(v)}
        return {value: self.new(value, box) for value, box in boxes.items()}

    def add_halo_gradients(self, segment: FusedRegion, around: Mapping[Value, Region]) -> None:
        """Send the gradients of halos to the ranks that own these pixels, and add those received."""
        pairs = [(self.layouts[v], self.spatial.wanted(v, segment.tiles), region.all()) for v, region in around.items()]
        for value, pieces in zip(around, self.spatial.send_back(pairs) if pairs else [], strict=True):
            if value not in self.grad_buffers:
                self.grad_buffers[value] = self.new(value)
            for box, piece in pieces:
                self.add(value, piece, box)

    def has_grad(self, value: Value) -> bool:
        """Whether a value has a gradient so far."""
        return value in self.grads or value in self.grad_buffers

    def take_grad(self, value: Value) -> Tensor:
        """A value's gradient, on every rank, which is forgotten here."""
        if value in self.grad_buffers:
            return self.all_pixels(value, self.grad_buffers.pop(value))
        return self.grads.pop(value)

    def drop_unreached(self) -> None:
        """Of weights that no tile of any rank gave a gradient, forget the zeros: on one device they have none.

        Cost: with several ranks, a message of a number per weight.
        """
        values = list(self.parts_of_grads)
        if values:
            found = torch.tensor([float(value in self.reached) for value in values], device=values[0].device)
            (ranks,) = self.spatial.add_up([found])
            for value, count in zip(values, ranks.tolist(), strict=True):
                if not count:
                    del self.parts_of_grads[value]

    def forget_backward(self, stage: int, *, values: bool = True) -> None:
        """Free the gradients, and the kept values unless a later backward reads them, that no earlier stage needs."""
        for value, made in self.program.kept.items():
            for stores in (self.stores, self.grad_buffers) if values else (self.grad_buffers,):
                if made >= stage and value in stores:
                    stores.pop(value).free()
