"""The part of a graph that one stage runs, with the values that it receives and sends.

torch's pipelines send only from each stage to the next.  So a value that a later stage reads passes through the stages between,
as an input and an output of each.  A long skip connection of a U-Net costs its bytes once per cut that it crosses.
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
    """A stage's operations.  takes: values from the stage before, or the model's inputs.

    gives: values for the next stage, or what the model returns.
    weights: the parameters and buffers that it reads, by name.  updates: the new values of buffers, by name.
    constants: the constants that it reads, and where the module has them.
    without_gradient: those of `takes` that want a gradient and get none in this stage.
    draws: whether an operation draws random numbers.
    """

    program: Program
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    weights: Mapping[str, Value]
    constants: Mapping[Value, Constant]
    updates: Mapping[str, Value]
    without_gradient: frozenset[Value]
    draws: bool

    def run(self, weights: Mapping[str, Tensor], taken: Sequence[Tensor], *, updates: bool = True) -> list[Tensor]:
        """The values of `gives`, from those of `takes`; with `updates`, buffers in `weights` are updated afterwards."""
        found = dict(zip(self.takes, taken, strict=True))
        found |= {value: constant.now() for value, constant in self.constants.items()}
        for name, value in self.weights.items():
            # The next micro-batch writes to the buffer before this one's backward, which may read it.
            found[value] = weights[name].clone() if name in self.updates else weights[name]
        self.program.run(found)
        with torch.no_grad():
            for name, value in self.updates.items() if updates else ():
                weights[name].copy_(found[value])
        return [found[value] for value in self.gives]


def parts_of(graph: Graph, partition: Partition, cuts: Sequence[int], constants: Mapping[Value, Constant]) -> list[StageGraph]:
    """Every stage's part of a graph.  cuts: the indices of the operations that begin the later stages.

    constants: where the module has the graph's constants.
    """
    ends = [0, *cuts, len(graph.nodes)]
    free = free_values(graph)
    runs = [_with_free(graph.nodes[a:b], graph, free) for a, b in pairwise(ends)]
    wanted = [value for value in dict.fromkeys(tree_leaves(graph.outputs)) if isinstance(value, Value)]
    _stop_gradients(graph, _with_gradient(graph.nodes, wanted))
    taken = _taken(graph, runs, wanted, free)
    parts = []
    for stage, nodes in enumerate(runs):
        gives = wanted if stage == len(runs) - 1 else taken[stage + 1]
        parts.append(_part(graph, partition, stage, nodes, taken[stage], gives, constants))
    return parts


def _stop_gradients(graph: Graph, with_gradient: set[Value]) -> None:
    """Clear `wants_grad` of values on which no output depends: a stage would send zeros, where one device gives None."""
    for value in (out for node in graph.nodes for out in node.outs if out is not None):
        value.wants_grad = value.wants_grad and value in with_gradient


def _taken(graph: Graph, runs: Sequence[Sequence[Node]], wanted: Sequence[Value], free: set[Value]) -> list[list[Value]]:
    """What each stage receives from the one before: the values that it or a later stage reads and that were made before it."""
    taken, needed = [], set(wanted)
    sent = set(graph.inputs)
    sent.update(out for node in graph.nodes for out in node.outs if out is not None and out not in free)
    for nodes in reversed(runs):
        made = {out for node in nodes for out in node.outs}
        needed = {value for value in needed | {v for node in nodes for v in node.reads} if value in sent and value not in made}
        taken.append(sorted(needed, key=lambda value: value.number))
    return [list(graph.inputs), *taken[::-1][1:]]


def _with_free(nodes: Sequence[Node], graph: Graph, free: set[Value]) -> list[Node]:
    """A stage's operations, with those of other stages that make input-independent values which it reads."""
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
    partition: Partition,
    stage: int,
    nodes: Sequence[Node],
    takes: Sequence[Value],
    gives: Sequence[Value],
    constants: Mapping[Value, Constant],
) -> StageGraph:
    reads = {value for node in nodes for value in node.reads}
    reads.update(gives)
    weights = {name: value for name, value in graph.weights.items() if value in reads}
    updates = {name: value for name, value in graph.updates.items() if partition.owner[name] == stage}
    with_gradient = _with_gradient(nodes, gives)
    return StageGraph(
        program=Program(nodes, [*gives, *updates.values()]),
        takes=tuple(takes),
        gives=tuple(gives),
        weights=weights,
        constants={value: constant for value, constant in constants.items() if value in reads},
        updates=updates,
        without_gradient=frozenset(value for value in takes if value.wants_grad and value not in with_gradient),
        draws=any(node.draws for node in nodes),
    )


def _with_gradient(nodes: Sequence[Node], gives: Sequence[Value]) -> set[Value]:
    """The values that get a gradient from those of `gives`."""
    found = {value for value in gives if value.wants_grad}
    for node in reversed(nodes):
        if any(out in found for out in node.outs if out is not None):
            found.update(value for value in node.reads if value.wants_grad)
    return found
