"""What one stage does: its run of operations, what it is handed, and what it hands on.

A value that a later stage reads travels from neighbour to neighbour, through the stages between, as an input and an output of
theirs: torch's pipelines know no other way.  So the long skip of a U-Net costs its bytes once per cut that it crosses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from widefield.capture.interpreter import Program
from widefield.capture.ir import Graph, Node, Value
from widefield.capture.program_cache import Constant
from widefield.pipelining.partition import Partition, free_values
from widefield.private_torch.pytree import tree_leaves


@dataclass(frozen=True)
class StageGraph:
    """takes: values from the stage before, or the model's inputs.  gives: values for the next one, or what the model returns.

    weights: those that it reads.  updates: what buffers of these become.
    unpulled: those of `takes` that ask for a gradient and get none in this stage.
    """

    program: Program
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    weights: Mapping[str, Value]
    constants: Mapping[Value, Constant]
    updates: Mapping[str, Value]
    unpulled: frozenset[Value]
    draws: bool

    def run(self, weights: Mapping[str, Tensor], taken: Sequence[Tensor], *, updates: bool = True) -> list[Tensor]:
        """The values that it gives; buffers of `weights` that change are written to afterwards, with `updates`."""
        found = dict(zip(self.takes, taken, strict=True))
        found |= {value: constant.now() for value, constant in self.constants.items()}
        for name, value in self.weights.items():
            # The next micro-batch writes to the buffer before this one's backward, which may look at it.
            found[value] = weights[name].clone() if name in self.updates else weights[name]
        self.program.run(found)
        with torch.no_grad():
            for name, value in self.updates.items() if updates else ():
                weights[name].copy_(found[value])
        return [found[value] for value in self.gives]


def parts_of(graph: Graph, division: Partition, cuts: Sequence[int], constants: Mapping[Value, Constant]) -> list[StageGraph]:
    """Every stage's part of a graph.  cuts: before which operations.  constants: where the module holds the graph's."""
    ends = [0, *cuts, len(graph.nodes)]
    free = free_values(graph)
    runs = [_with_free(graph.nodes[a:b], graph, free) for a, b in pairwise(ends)]
    wanted = [value for value in dict.fromkeys(tree_leaves(graph.outputs)) if isinstance(value, Value)]
    _stop_gradients(graph, _pulled(graph.nodes, wanted))
    taken = _taken(graph, runs, wanted, free)
    parts = []
    for stage, nodes in enumerate(runs):
        gives = wanted if stage == len(runs) - 1 else taken[stage + 1]
        parts.append(_part(graph, division, stage, nodes, taken[stage], gives, constants))
    return parts


def _stop_gradients(graph: Graph, pulled: set[Value]) -> None:
    """No gradient is sent back for what no output learns from: zeros would be a gradient where one device has none."""
    for value in (out for node in graph.nodes for out in node.outs if out is not None):
        value.wants_grad = value.wants_grad and value in pulled


def _taken(graph: Graph, runs: Sequence[Sequence[Node]], wanted: Sequence[Value], free: set[Value]) -> list[list[Value]]:
    """What each stage takes from the one before: all that it or a later stage reads, and that was made before it."""
    taken, needed = [], set(wanted)
    sent = set(graph.inputs)
    sent.update(out for node in graph.nodes for out in node.outs if out is not None and out not in free)
    for nodes in reversed(runs):
        made = {out for node in nodes for out in node.outs}
        needed = {value for value in needed | {v for node in nodes for v in node.reads} if value in sent and value not in made}
        taken.append(sorted(needed, key=lambda value: value.number))
    return [list(graph.inputs), *taken[::-1][1:]]


def _with_free(nodes: Sequence[Node], graph: Graph, free: set[Value]) -> list[Node]:
    """A stage's operations, with those of other stages that depend on nothing and that it reads from."""
    needed = {value for node in nodes for value in node.reads if value in free}
    needed.update(value for value in graph.results if value in free)
    extra: set[Node] = set()
    for node in reversed(graph.nodes):
        if any(out in needed for out in node.outs):
            extra.add(node)
            needed.update(value for value in node.reads if value in free)
    mine = set(nodes)
    return [node for node in graph.nodes if node in mine or node in extra]


def _part(
    graph: Graph,
    division: Partition,
    stage: int,
    nodes: Sequence[Node],
    takes: Sequence[Value],
    gives: Sequence[Value],
    constants: Mapping[Value, Constant],
) -> StageGraph:
    reads = {value for node in nodes for value in node.reads}
    reads.update(gives)
    weights = {name: value for name, value in graph.weights.items() if value in reads}
    updates = {name: value for name, value in graph.updates.items() if division.owner[name] == stage}
    pulled = _pulled(nodes, gives)
    return StageGraph(
        program=Program(nodes, [*gives, *updates.values()]),
        takes=tuple(takes),
        gives=tuple(gives),
        weights=weights,
        constants={value: constant for value, constant in constants.items() if value in reads},
        updates=updates,
        unpulled=frozenset(value for value in takes if value.wants_grad and value not in pulled),
        draws=any(node.draws for node in nodes),
    )


def _pulled(nodes: Sequence[Node], gives: Sequence[Value]) -> set[Value]:
    """The values from which a gradient may come to one that is given."""
    pulled = {value for value in gives if value.wants_grad}
    for node in reversed(nodes):
        if any(out in pulled for out in node.outs if out is not None):
            pulled.update(value for value in node.reads if value.wants_grad)
    return pulled
