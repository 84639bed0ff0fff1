"""Compiles runs of pointwise operations of a tile into one kernel each.

Operations that depend on a tile's position (windows, pooling, sums) would be compiled anew for every tile, so they run with
torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule

from widefield.capture.ir import Value
from widefield.private_torch.dispatcher import OpOverload
from widefield.streaming.regions import Env, arguments, detached_unless_wanted
from widefield.streaming.schedule import StreamedTile
from widefield.streaming.tile_ops import TileOp
from widefield.streaming.tile_planner import TracedOp


@dataclass
class FusedOps:
    """Steps that run as one kernel.  drop: the values that no later step of the tile reads."""

    steps: list[tuple[TracedOp, TileOp]]
    drop: list[Value] = field(default_factory=list)

    @property
    def is_one(self) -> bool:
        return len(self.steps) == 1

    def made(self) -> dict[Value, Any]:
        return {out: step.outs[n] for unit, step in self.steps for n, out in enumerate(unit.outs) if out is not None}


def runs_of(tile: StreamedTile) -> list[FusedOps]:
    """The steps of a tile, grouped into runs that can be compiled together."""
    found: list[FusedOps] = []
    for (unit, step), drop in zip(tile.steps, tile.drop, strict=True):
        if found and _joins(found[-1], unit, step):
            found[-1].steps.append((unit, step))
            found[-1].drop += drop
        else:
            found.append(FusedOps([(unit, step)], list(drop)))
    return found


def _joins(run: FusedOps, unit: TracedOp, step: TileOp) -> bool:
    """Whether a step is pointwise, as the run before it, on the same box, and reads the run's results uncropped."""
    first, before = run.steps[0]
    matches = all(_is_simple(u) for u in (first, unit)) and first.node.grad == unit.node.grad and before.outs[0] == step.outs[0]
    made = run.made()
    return matches and all(made[v] == box for v, box in zip(unit.reads, step.reads, strict=True) if v in made)


def _is_simple(unit: TracedOp) -> bool:
    return unit.is_pointwise and isinstance(unit.node.op, OpOverload) and len(unit.outs) == 1 and bool(unit.reads)


class CompiledRegions:
    """The compiled runs of one program, compiled at their first use."""

    def __init__(self) -> None:
        self.known: dict[tuple, tuple[Callable, list[tuple[int, int]], list[Value]]] = {}

    def __call__(self, run: FusedOps, env: Env, small: Any) -> None:
        """Run the steps and put the results that are read later into `env`."""
        wanted = [value for value in run.made() if value not in run.drop]
        key = (*(unit for unit, _ in run.steps), *wanted)
        if key not in self.known:
            self.known[key] = _compiled([unit for unit, _ in run.steps], wanted)
        call, places, outs = self.known[key]
        tensors: list[Tensor] = []
        for number, (unit, step) in enumerate(run.steps):
            reads = [n for at, n in places if at == number]
            tensors += [arguments(unit, step, env, small, [n])[0] for n in reads]
        boxes = run.made()
        for value, result in zip(outs, call(*tensors), strict=True):
            env[value] = (detached_unless_wanted(value, result), boxes[value])


def _compiled(units: Sequence[TracedOp], wanted: Sequence[Value]) -> tuple[Callable, list[tuple[int, int]], list[Value]]:
    """A compiled function that returns the wanted values, and its arguments as (unit, argument number) pairs."""
    graph, made, places = FxGraph(), {}, []
    for number, unit in enumerate(units):
        reads = []
        for place, value in enumerate(unit.reads):
            if value not in made:
                places.append((number, place))
                reads.append(graph.placeholder(f"x{len(places)}"))
            else:
                reads.append(made[value])
        args, kwargs = unit.node.filled(iter(reads))
        made[unit.outs[0]] = graph.call_function(unit.node.op, args, kwargs)
    _placeholders_first(graph)
    graph.output(tuple(made[value] for value in wanted))
    return torch.compile(GraphModule({}, graph), dynamic=True), places, list(wanted)


def _placeholders_first(graph: FxGraph) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        first.prepend(node)
