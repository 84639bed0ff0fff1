"""The memory in bytes and the relative time of a schedule, by arithmetic on its boxes; nothing runs.

Time is expressed in bytes: those that an operation reads and writes, plus its FLOPs as the bytes that memory transfers in the
same time.  Of a segment's tiles only the samples are counted, each for those that it represents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from widefield.capture.flops import flops_per_number, is_transposed
from widefield.capture.ir import Graph, Node, Value
from widefield.geometry.box import size_of
from widefield.streaming.memory_simulator import box_bytes, has_stored_result, made_bytes, work_bytes
from widefield.streaming.saved_tensors import SavedTensorCache
from widefield.streaming.schedule import FusedRegion, Stage, StreamedTile, TileSchedule
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp

aten = torch.ops.aten


@dataclass(frozen=True)
class Machine:
    """flops_per_byte: FLOPs in the time in which memory transfers a byte.  step_bytes: bytes that memory transfers in the time
    in which a stream launches an operation.  far: how many times slower than memory each place of storage is."""

    flops_per_byte: float
    step_bytes: int
    far: dict[str, float]


MACHINES = {
    "cpu": Machine(8, 1 << 20, {"device": 0, "host": 0, "file": 1}),
    "cuda": Machine(40, 1 << 28, {"device": 0, "host": 60, "file": 600}),
}
"""Orders of magnitude, as only ratios of times are used; a device that is not listed counts as a GPU.

cpu: from 24 runs of four nets of 0.6 and 1 million pixels in 4 to 64 tiles, on one core of an AMD EPYC with torch 2.15; the
estimated ratio to a run without tiles is within 24 % of the measured one, 13 % in the root mean square.  file: from a U-Net of
4 million pixels in 16 tiles, on a disk that the system caches in memory (1.23 estimated, 1.18 to 1.24 measured).
cuda: from the data sheet of a data-center GPU, 140 TFLOP/s and 3.5 TB/s, with 60 GB/s to the host; not measured.
"""

WEIGHT_READS = 3
"""How often a weight is read per operation: a kernel first copies it into a memory format of its own."""
WHOLE_STEP = 0.25
"""The cost of launching an operation without tiles, as a fraction of that in a stream."""


@dataclass(frozen=True)
class Setting:
    """What an estimate depends on besides the schedule: whether a backward follows, and where values are stored.

    fixed: bytes of other tensors on the device.  by_windows: inputs that are a WindowedImage.
    ranks: the number that share the image, each with its tile.  sampled: count only the samples of a segment, else all tiles.
    """

    trains: bool = True
    place: str = "device"
    fixed: int = 0
    by_windows: frozenset[Value] = frozenset()
    ranks: int = 1
    sampled: bool = True


@dataclass(frozen=True)
class Estimate:
    """The largest number of bytes at any time, and the time, of a training step or of a forward.

    peak: on the device; with kept values and their gradients if they are stored there.
    fixed: as in Setting.  inputs: those in memory.  weights: the gradients of weights that a backward computes.
    outputs: the module's outputs, their gradients, and the buffers in which more is added to these.
    kept, grads: values between segments and their gradients, without outputs; together: both at one time.
    work: of the tile that takes most, plus values of units that run once.
    cost: the time of the schedule, ideal: of a run without tiles; in bytes that memory could transfer in that time.
    """

    peak: int
    fixed: int
    inputs: int
    weights: int
    outputs: int
    kept: int
    grads: int
    together: int
    work: int
    cost: float
    ideal: float

    @property
    def rest(self) -> int:
        """The bytes that do not depend on the tiles."""
        return self.fixed + self.inputs + self.weights + self.outputs

    @property
    def slowdown(self) -> float:
        """The time as a multiple of that of a run without tiles."""
        return self.cost / max(self.ideal, 1.0)


def estimate(program: TileSchedule, setting: Setting) -> Estimate:
    """The estimate of one schedule."""
    return Estimator(program.graph, setting).estimate(program)


class Estimator:
    """Estimates several schedules of one graph; segments that they share are counted once."""

    def __init__(self, graph: Graph, setting: Setting, cache: SavedTensorCache | None = None) -> None:
        self.graph, self.setting, self.cache, self.results = (
            graph,
            setting,
            cache or SavedTensorCache(),
            set(graph.results),
        )
        device = device_of(graph)
        self.machine = MACHINES.get(device, MACHINES["cuda"])
        self.is_here = setting.place == "device" or (setting.place == "host" and device == "cpu")
        self._times: dict[FusedRegion, float] = {}
        self._works: dict[FusedRegion, int] = {}
        self._wholes: dict[TracedOp, float] = {}
        self._figures: dict[Node, tuple[float, int]] = {}

    def estimate(self, program: TileSchedule) -> Estimate:
        setting, liveness, cost = self.setting, Liveness(program, self.setting.trains), self.cost(program)
        inputs = sum(value.bytes for value in self.graph.inputs if value not in setting.by_windows) // setting.ranks
        weights = sum(value.bytes for value in self.graph.weights.values() if value.wants_grad) if setting.trains else 0
        works = [max((self._work(segment) for segment in stage.segments), default=0) for stage in program.stages]
        works += works[::-1] if setting.trains else []
        work = [tile + once for tile, once in zip(works, liveness.once, strict=True)]
        kept, grads, outputs = (
            [size // setting.ranks for size in sizes] for sizes in (liveness.kept, liveness.grads, liveness.outputs)
        )
        between = [a + b for a, b in zip(kept, grads, strict=True)]
        here = [w + o + (b if self.is_here else 0) for w, o, b in zip(work, outputs, between, strict=True)]
        return Estimate(
            peak=setting.fixed + inputs + weights + max(here),
            fixed=setting.fixed,
            inputs=inputs,
            weights=weights,
            outputs=max(outputs),
            kept=max(kept),
            grads=max(grads),
            together=max(between),
            work=max(work),
            cost=cost,
            ideal=self._ideal(program),
        )

    def cost(self, program: TileSchedule) -> float:
        """The time of a step, as in `Estimate`."""
        once = sum(self._passes(unit) * self._whole(unit) for stage in program.stages for unit in stage.once)
        return once + sum(map(self._time, program.segments))

    def together(self, program: TileSchedule) -> int:
        """The bytes of kept values and their gradients, as in `Estimate`."""
        liveness = Liveness(program, self.setting.trains)
        return max(a + b for a, b in zip(liveness.kept, liveness.grads, strict=True)) // self.setting.ranks

    def _ideal(self, program: TileSchedule) -> float:
        segments = program.segments
        units = dict.fromkeys(unit for segment in segments for unit in (*segment.units, *segment.parts))
        once = [unit for stage in program.stages for unit in stage.once]
        return sum(self._passes(unit, is_ideal=True) * self._whole(unit) for unit in (*units, *once))

    # ------------------------------------------------------------------------------------------ segments

    def _samples(self, segment: FusedRegion) -> list[tuple[StreamedTile, float]]:
        everyone = [(place, 1.0) for place in range(len(segment.tiles))]
        return [(segment.tiles[place], count) for place, count in (segment.samples if self.setting.sampled else everyone)]

    def _work(self, segment: FusedRegion) -> int:
        """The bytes of the largest tile."""
        if segment not in self._works:
            goes_back = self.setting.trains and _goes_back(segment)
            tiles = [tile for tile, _ in self._samples(segment)]
            sizes = [
                work_bytes(tile, self.cache, self.results, is_copy=not self.is_here, goes_back=goes_back) for tile in tiles
            ]
            self._works[segment] = max(sizes, default=0)
        return self._works[segment]

    def _time(self, segment: FusedRegion) -> float:
        """The time of all tiles."""
        if segment not in self._times:
            goes_back = self.setting.trains and _goes_back(segment)
            self._times[segment] = sum(count * self._tile(tile, goes_back) for tile, count in self._samples(segment))
        return self._times[segment]

    def _tile(self, tile: StreamedTile, goes_back: bool) -> float:
        read = sum(box_bytes(value, box) for value, box in tile.sources.items())
        kept = sum(box_bytes(value, box) for value, box in tile.kept.items())
        # In the backward: the windows once more, the gradients added to them, and the gradients of kept values.
        moved = 3 * read + 2 * kept if goes_back else read + kept
        time = self.machine.far[self.setting.place] * moved
        for unit, step in (*tile.steps, *tile.parts):
            spared = goes_back and has_stored_result(unit, step, tile, self.results)
            time += (self._passes(unit) - spared if goes_back else 1) * self._step(unit, step)
        return time

    def _step(self, unit: TracedOp, step: TileOp) -> float:
        """The time of one forward of an operation on a box."""
        if self.cache.of(unit, step).shows:
            return 0.0
        moved = made_bytes(unit, step) + self.machine.step_bytes
        moved += sum(_read_bytes(value, box_bytes(value, box)) for value, box in zip(unit.reads, step.reads, strict=True))
        box = step.reads[0] if is_transposed(unit.node) else step.outs[0]
        return self._moved(unit.node, moved, 0 if box is None else math.prod(size_of(box)))

    def _whole(self, unit: TracedOp) -> float:
        """The time of one forward of an operation on the whole."""
        if unit not in self._wholes:
            value = unit.reads[0] if is_transposed(unit.node) else unit.outs[0]
            moved = sum(_read_bytes(v, v.bytes) for v in unit.reads) + sum(v.bytes for v in unit.outs if v is not None)
            moved += round(WHOLE_STEP * self.machine.step_bytes)
            time = self._moved(unit.node, moved, 0 if value is None else math.prod(value.shape))
            self._wholes[unit] = 0.0 if self.cache.is_view(unit) else time
        return self._wholes[unit]

    def _moved(self, node: Node, moved: int, pixels: int) -> float:
        return moved + self._figures_of(node)[0] * pixels / self.machine.flops_per_byte

    def _passes(self, unit: TracedOp, *, is_ideal: bool = False) -> int:
        """How many forwards an operation costs in a step, with its backward and, unless ideal, its recomputation."""
        return (1 if is_ideal else 2) + self._figures_of(unit.node)[1] if self.setting.trains else 1

    def _figures_of(self, node: Node) -> tuple[float, int]:
        if node not in self._figures:
            self._figures[node] = flops_per_number(node), _backwards(node)
        return self._figures[node]


def device_of(graph: Graph) -> str:
    return next((value.device.type for value in graph.inputs), "cpu")


def _read_bytes(value: Value, size: int) -> int:
    return WEIGHT_READS * size if value.source == "weight" else size


def _goes_back(segment: FusedRegion) -> bool:
    """Whether the backward runs a segment's tiles again."""
    targets = [*segment.kept, *(out for unit in segment.parts for out in unit.outs if out is not None)]
    return any(value.wants_grad for value in targets)


# ---------------------------------------------------------------------------------------------- operations


def _backwards(node: Node) -> int:
    """The cost of an operation's backward, in forwards: of a product, one for each factor that needs a gradient; else 2."""
    if not any(out is not None and out.wants_grad for out in node.outs):
        return 0
    return sum(value.wants_grad for value in node.reads[:2]) if flops_per_number(node) else 2


# ---------------------------------------------------------------------------------------------- liveness


class Liveness:
    """The bytes that are live at each moment.  Moments are the stages of the forward and, in training, of the backward.

    kept, grads: of kept values and of their gradients, without outputs.  once: of results of units that run once, and of what
    their backward takes.  outputs: of the outputs made by then; in the backward with their gradients and, of those that
    later segments read, the buffers in which more is added to these.
    """

    def __init__(self, program: TileSchedule, trains: bool) -> None:
        self.program, self.trains, self.stages = program, trains, len(program.stages)
        self.count = self.stages * (2 if trains else 1)
        self.kept, self.grads, self.once, self.outputs = ([0] * self.count for _ in range(4))
        self._results = set(program.graph.results)
        self._last = {value: n for n, stage in enumerate(program.stages) for value in _read_by(stage)}
        for value, made in program.kept.items():
            self._add_kept(value, made)
        for number, stage in enumerate(program.stages):
            for unit in stage.once:
                self._add_once(unit, number)
        for value in program.graph.inputs:
            self._add_grad(value, 0)

    def _back(self, stage: int) -> int:
        """The moment of a stage's backward."""
        return 2 * self.stages - 1 - stage

    def _add(self, sizes: list[int], start: int, stop: int, size: int) -> None:
        for at in range(start, min(stop + 1, self.count)):
            sizes[at] += size

    def _add_kept(self, value: Value, made: int) -> None:
        if value in self._results:
            return self._add_output(value, made)
        self._add(self.kept, made, self._back(made) if self.trains else self._last.get(value, made), value.bytes)
        self._add_grad(value, made)

    def _add_grad(self, value: Value, made: int) -> None:
        """A gradient lives from the backward of the last stage that reads the value to that of the stage that makes it."""
        if self.trains and value.wants_grad and value in self._last:
            self._add(self.grads, self._back(self._last[value]), self._back(made), value.bytes)

    def _add_output(self, value: Value, made: int) -> None:
        self._add(self.outputs, made, self.count, value.bytes)
        if self.trains and value.wants_grad:
            is_summed = value in self.program.layouts and value in self.program.read_again
            self._add(self.outputs, self.stages, self.count, (2 if is_summed else 1) * value.bytes)

    def _add_once(self, unit: TracedOp, made: int) -> None:
        for value in unit.outs:
            if value is not None and value in self._results:
                self._add_output(value, made)
            elif value is not None:
                goes = not self.trains and value in self.program.layouts
                self._add(self.once, made, self._last.get(value, made) if goes else self.count, value.bytes)
                self._add_grad(value, made)
        if self.trains:
            with_gradient = [v for v in (*unit.outs, *(unit.reads[n] for n in unit.wide)) if v is not None and v.wants_grad]
            self._add(self.once, self._back(made), self._back(made), sum(value.bytes for value in with_gradient))


def _read_by(stage: Stage) -> list[Value]:
    found = [unit.reads[number] for unit in stage.once for number in unit.wide]
    return found + [value for segment in stage.segments for value in segment.sources]
