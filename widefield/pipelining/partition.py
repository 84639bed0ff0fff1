"""Where is a model cut into stages?  A stage is a run of consecutive operations of the model's graph.

A cut is a place between two operations.  A value that a later stage reads crosses every cut in between.  A parameter belongs to
one stage, so there is no cut between two operations that read it.  The partition is chosen once, for one shape; the stage of
each parameter (`Partition.owner`) then says where the graph of any other shape or mode is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Literal

from widefield.capture.flops import flops_of
from widefield.capture.ir import Graph, Node, Value
from widefield.naming import did_you_mean

Balance = Literal["time", "memory"]

SLACK = 1.05
"""The longest stage may cost this times that of the most balanced partition, where fewer bytes cross the cuts."""


@dataclass(frozen=True)
class Partition:
    """The stage of each parameter and buffer (`owner`, by name), and the cost of each stage for the captured shape.

    flops: of a forward.  weight_bytes: of parameters and of buffers that change.
    crossing_bytes: sent forward across each cut, values for later stages included.
    begins: for each stage but the first, the module whose weight it reads first.
    shared: buffers that never change and that several stages read; every rank has them.
    """

    owner: Mapping[str, int]
    flops: tuple[float, ...]
    weight_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]
    begins: tuple[str, ...]
    shared: frozenset[str]

    @property
    def stages(self) -> int:
        return len(self.flops)


def choose_partition(
    graph: Graph, stages: int, *, balance: Balance = "time", named: Sequence[str] = (), trained: frozenset[str] = frozenset()
) -> Partition:
    """Cut `graph` into `stages` stages: balanced by cost, or before the modules in `named` (fnmatch patterns).

    balance: by FLOPs ("time") or by bytes of weights ("memory").
    trained: the names of parameters; other weights are buffers.
    ValueError: there are too few places to cut, or a pattern fits no module or one that cannot begin a stage.
    """
    order = OpOrder(graph, trained | set(graph.updates))
    cuts = _named_cuts(order, named, stages) if named else _balanced_cuts(order, stages, balance)
    owner = _owners(order, cuts)
    ends = list(pairwise([0, *cuts, len(order.nodes)]))
    flops = tuple(sum(order.flops[a:b]) for a, b in ends)
    weights = tuple(sum(order.weight_bytes[a:b]) for a, b in ends)
    crossing = tuple(order.crossing[cut] for cut in cuts)
    begins = tuple(order.module_from(cut) for cut in cuts)
    return Partition(owner, flops, weights, crossing, begins, _shared(order, cuts))


def cuts_of(graph: Graph, partition: Partition) -> list[int]:
    """Where a graph of any shape or mode is cut, as indices of operations: each operation is in the stage of its weights.

    NotImplementedError: the graph reads weights in another order than the one that was partitioned.
    """
    order = OpOrder(graph, frozenset(graph.weights) - partition.shared)
    cuts: list[int] = []
    for stage in range(1, partition.stages):
        before = [at + 1 for name, at in order.last_read.items() if partition.owner[name] < stage]
        after = [at for name, at in order.first_read.items() if partition.owner[name] >= stage]
        low, high = max([*before, *cuts, 0]), min(after, default=len(order.nodes))
        if low > high:
            raise NotImplementedError(
                f"a pass of this shape or mode reads a weight of stage {stage} before one of stage {stage - 1}, and stages "
                "were cut for another order; let the model run its layers in one order, or set mesh.stage=1"
            )
        cuts.append(order.lightest(low, high))
    return cuts


class OpOrder:
    """The operations of a graph in order, with the cost of each and the bytes that cross a cut before it.

    unshared: the names of weights that only one stage may have.
    """

    def __init__(self, graph: Graph, unshared: frozenset[str]) -> None:
        self.nodes, self.graph = graph.nodes, graph
        self.at = {node: number for number, node in enumerate(graph.nodes)}
        self.flops = [_flops(node) for node in graph.nodes]
        self.free = free_values(graph)
        self.first_read, self.last_read = _reads(graph, self.at, unshared)
        self.weight_bytes = [0] * len(graph.nodes)
        for name, at in self.first_read.items():
            self.weight_bytes[at] += graph.weights[name].bytes
        self.crossing = self._crossing()
        self.is_open = self._open()

    def _crossing(self) -> list[int]:
        """The bytes that cross a cut before each operation, and one at the end."""
        change = [0] * (len(self.nodes) + 2)
        for value, last in _last_reads(self.graph, self.at).items():
            if value.source in ("weight", "constant") or value in self.free:
                continue
            made = -1 if value.maker is None else self.at[value.maker]
            change[made + 1] += value.bytes
            change[last + 1] -= value.bytes
        return list(accumulate(change))[: len(self.nodes) + 1]

    def _open(self) -> list[bool]:
        """Whether a cut is allowed before each operation, and at the end: no parameter is read on both sides."""
        change = [0] * (len(self.nodes) + 2)
        for name, first in self.first_read.items():
            change[first + 1] += 1
            change[self.last_read[name] + 1] -= 1
        return [crossed == 0 for crossed in accumulate(change)]

    def lightest(self, low: int, high: int) -> int:
        """The place from `low` to `high` that the fewest bytes cross; the first of several."""
        return min(range(low, high + 1), key=lambda place: (self.crossing[place], place))

    def places(self) -> list[int]:
        """The candidate cuts: the lightest allowed place before each operation but the first that reads a weight first."""
        reading = sorted({*self.first_read.values(), *self.last_read.values()})
        firsts, found = set(self.first_read.values()), []
        for before, at in pairwise(reading):
            if at in firsts and self.is_open[at]:
                found.append(self.lightest(before + 1, at))
        return found

    def module_from(self, place: int) -> str:
        """The module whose weight is the first that is newly read from `place` on; of the model's own, the weight's name."""
        name = min((at, name) for name, at in self.first_read.items() if at >= place)[1]
        return name.rpartition(".")[0] or name


def free_values(graph: Graph) -> set[Value]:
    """The values that depend on neither inputs nor weights, such as position indices; every stage computes its own."""
    free = {value for value, _ in graph.constants}
    for node in graph.nodes:
        if not node.draws and all(value in free for value in node.reads):
            free.update(out for out in node.outs if out is not None)
    return free


def _flops(node: Node) -> float:
    """FLOPs of a forward; an operation that `flops_of` counts as 0 has one per number of its result."""
    out = next((out for out in node.outs if out is not None), None)
    if out is None:
        return 0.0
    return flops_of(node) or float(math.prod(out.shape))


def _reads(graph: Graph, at: Mapping[Node, int], unshared: frozenset[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The first and the last operation that reads each weight in `unshared`, or computes a buffer's new value."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for name, value in graph.weights.items():
        maker = graph.updates[name].maker if name in graph.updates else None
        makers = [] if maker is None else [maker]
        places = [at[node] for node in [*value.users, *makers] if node in at]
        if places and name in unshared:
            first[name], last[name] = min(places), max(places)
    return first, last


def _last_reads(graph: Graph, at: Mapping[Node, int]) -> dict[Value, int]:
    """The last operation that reads each value; the end for what the model returns."""
    last: dict[Value, int] = {}
    for number, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.reads, number))
    updates = set(graph.updates.values())
    last.update({value: len(at) for value in graph.results if value not in updates})
    return last


# ---------------------------------------------------------------------------------------------- cuts by cost


def _balanced_cuts(order: OpOrder, stages: int, balance: Balance) -> list[int]:
    places = order.places()
    if len(places) < stages - 1:
        raise ValueError(
            f"this model has {len(places)} places where a stage can begin and {stages} stages need {stages - 1}; layers that "
            "share weights stay together, so use fewer ranks on mesh.stage"
        )
    costs: Sequence[float] = order.flops if balance == "time" else order.weight_bytes
    sums = [0.0, *accumulate(costs)]
    ends = [0, *places, len(order.nodes)]

    def cost(a: int, b: int) -> float:
        return sums[ends[b]] - sums[ends[a]]

    most = _best(len(ends), stages, cost, max)[0]
    within = most * SLACK

    def bytes_within(a: int, b: int) -> float:
        return math.inf if cost(a, b) > within else float(order.crossing[ends[b]]) * (b < len(ends) - 1)

    return [ends[place] for place in _best(len(ends), stages, bytes_within, lambda x, y: x + y)[1]]


def _best(
    ends: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of the stages, and the cuts 0 < c1 < ... < ends - 1 that give it (dynamic programming)."""
    best: list[tuple[float, tuple[int, ...]]] = [(cost(0, end) if end else math.inf, ()) for end in range(ends)]
    for stage in range(1, stages):
        best = [
            min(
                ((join(best[cut][0], cost(cut, end)), (*best[cut][1], cut)) for cut in range(stage, end)),
                default=(math.inf, ()),
            )
            for end in range(ends)
        ]
    return best[-1]


# ---------------------------------------------------------------------------------------------- cuts by name


def _named_cuts(order: OpOrder, named: Sequence[str], stages: int) -> list[int]:
    if len(named) != stages - 1:
        raise ValueError(
            f"pipeline.stages={list(named)} names {len(named)} modules and {stages} stages have {stages - 1} beginnings beside "
            f"the first; name {stages - 1}, or leave it empty to have them chosen"
        )
    cuts: list[int] = []
    for pattern in named:
        cuts.append(_cut_before(order, pattern))
        if len(cuts) > 1 and cuts[-1] <= cuts[-2]:
            raise ValueError(
                f"pipeline.stages={list(named)}: '{pattern}' does not run after the module before it; name them as the model "
                "runs them"
            )
    return cuts


def _cut_before(order: OpOrder, pattern: str) -> int:
    """The lightest place before the first operation that reads a weight of a module that `pattern` fits."""
    modules = {module: None for name in order.graph.weights for module in _modules_of(name)}
    fitting = {module for module in modules if fnmatchcase(module, pattern)}
    if not fitting:
        raise ValueError(
            f"pipeline.stages has '{pattern}', and no module with weights has that name{did_you_mean(pattern, modules)} "
            f"The outermost are {', '.join(module for module in modules if '.' not in module)}"
        )
    firsts = [at for name, at in order.first_read.items() if not fitting.isdisjoint(_modules_of(name))]
    at = min(firsts, default=0)
    reading = [place for place in {*order.first_read.values(), *order.last_read.values()} if place < at]
    if not reading:
        raise ValueError(
            f"pipeline.stages has '{pattern}', with which the model begins, so the stage before it is empty; leave it out"
        )
    if not order.is_open[at]:
        tied = next(name for name, first in order.first_read.items() if first < at <= order.last_read[name])
        raise ValueError(
            f"pipeline.stages has '{pattern}', and {tied} is read before and in it, so both must be in one stage; "
            "name another module"
        )
    return order.lightest(max(reading) + 1, at)


def _modules_of(name: str) -> Iterator[str]:
    """The modules that contain a parameter, outermost first."""
    parts = name.split(".")[:-1]
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _shared(order: OpOrder, cuts: Sequence[int]) -> frozenset[str]:
    """The weights that several stages read."""
    found = set()
    for name, value in order.graph.weights.items():
        stages = {sum(cut <= order.at[node] for cut in cuts) for node in value.users if node in order.at}
        found.update([name] if len(stages) > 1 else [])
    return frozenset(found)


def _owners(order: OpOrder, cuts: Sequence[int]) -> dict[str, int]:
    """The stage of every parameter and buffer; one that no operation reads goes with the one before it."""
    owner: dict[str, int] = {}
    stage = 0
    for name, value in order.graph.weights.items():
        places = [order.at[node] for node in value.users if node in order.at]
        places = [order.first_read[name]] if name in order.first_read else places
        if places:
            stage = sum(cut <= min(places) for cut in cuts)
        owner[name] = stage
    return owner
