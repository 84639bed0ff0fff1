"""Where is a model cut into stages?  Its operations stand in the order in which they run; a stage is a run of them.

A cut stands between two operations.  What one stage makes and a later one reads crosses every cut between them.  A
parameter belongs to one stage, so no cut stands between two operations that read it.  The choice is made once; in which stage
a parameter lies (`Division.owner`) then says where to cut the operations of any other shape or mode.
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
"""A stage may take so much of the best split's longest stage, where fewer bytes travel for it."""


@dataclass(frozen=True)
class Partition:
    """Which stage has which parameter or buffer, and what each stage costs; of one sample's shape.

    flops: of a forward.  weight_bytes: of parameters and of buffers that change.
    crossing_bytes: what travels forward from each stage but the last to the next, with what is handed on to later ones.
    begins: the module whose weight each stage but the first reads first.
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


def divide(
    graph: Graph, stages: int, *, balance: Balance = "time", named: Sequence[str] = (), trained: frozenset[str] = frozenset()
) -> Partition:
    """Cut `graph` into `stages` parts: with as equal cost as can be, or where the modules in `named` begin.

    trained: the names of parameters; other weights are buffers.
    ValueError: there are fewer places to cut than it takes, or a name fits no module, or one that cannot begin a stage.
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


def cuts_of(graph: Graph, division: Partition) -> list[int]:
    """Where `graph`, of any shape or mode, is cut: operations stay where their weights are."""
    order = OpOrder(graph, frozenset(graph.weights) - division.shared)
    cuts: list[int] = []
    for stage in range(1, division.stages):
        before = [at + 1 for name, at in order.last_read.items() if division.owner[name] < stage]
        after = [at for name, at in order.first_read.items() if division.owner[name] >= stage]
        low, high = max([*before, *cuts, 0]), min(after, default=len(order.nodes))
        if low > high:
            raise NotImplementedError(
                f"a pass of this shape or mode reads a weight of stage {stage} before one of stage {stage - 1}, and stages "
                "were cut for another order; let the model run its layers in one order, or set mesh.stage=1"
            )
        cuts.append(order.lightest(low, high))
    return cuts


class OpOrder:
    """The operations of a graph in order, with what each costs and what crosses the place before it.

    alone: the names of weights that one stage alone may have.
    """

    def __init__(self, graph: Graph, alone: frozenset[str]) -> None:
        self.nodes, self.graph = graph.nodes, graph
        self.at = {node: number for number, node in enumerate(graph.nodes)}
        self.flops = [_flops(node) for node in graph.nodes]
        self.free = free_values(graph)
        self.first_read, self.last_read = _reads(graph, self.at, alone)
        self.weight_bytes = [0] * len(graph.nodes)
        for name, at in self.first_read.items():
            self.weight_bytes[at] += graph.weights[name].bytes
        self.crossing = self._crossing()
        self.is_open = self._open()

    def _crossing(self) -> list[int]:
        """Bytes that cross the place before each operation, and the end."""
        change = [0] * (len(self.nodes) + 2)
        for value, last in _last_reads(self.graph, self.at).items():
            if value.source in ("weight", "constant") or value in self.free:
                continue
            made = -1 if value.maker is None else self.at[value.maker]
            change[made + 1] += value.bytes
            change[last + 1] -= value.bytes
        return list(accumulate(change))[: len(self.nodes) + 1]

    def _open(self) -> list[bool]:
        """Whether a cut may stand before each operation: no parameter is read on both sides."""
        change = [0] * (len(self.nodes) + 2)
        for name, first in self.first_read.items():
            change[first + 1] += 1
            change[self.last_read[name] + 1] -= 1
        return [held == 0 for held in accumulate(change)]

    def lightest(self, low: int, high: int) -> int:
        """Of the places from `low` to `high`, the first that the fewest bytes cross."""
        return min(range(low, high + 1), key=lambda place: (self.crossing[place], place))

    def places(self) -> list[int]:
        """The best place before each operation that begins to read weights, first to last, the very first left out."""
        reading = sorted({*self.first_read.values(), *self.last_read.values()})
        firsts, found = set(self.first_read.values()), []
        for before, at in pairwise(reading):
            if at in firsts and self.is_open[at]:
                found.append(self.lightest(before + 1, at))
        return found

    def module_from(self, place: int) -> str:
        """The module whose weight is read first from `place` on; the weight itself, where the model holds it."""
        name = min((at, name) for name, at in self.first_read.items() if at >= place)[1]
        return name.rpartition(".")[0] or name


def free_values(graph: Graph) -> set[Value]:
    """What depends on neither images nor weights, as numbers of positions: every stage makes it for itself."""
    free = {value for value, _ in graph.constants}
    for node in graph.nodes:
        if not node.draws and all(value in free for value in node.reads):
            free.update(out for out in node.outs if out is not None)
    return free


def _flops(node: Node) -> float:
    """Of a forward; pointwise operations count one per number."""
    out = next((out for out in node.outs if out is not None), None)
    if out is None:
        return 0.0
    return flops_of(node) or float(math.prod(out.shape))


def _reads(graph: Graph, at: Mapping[Node, int], alone: frozenset[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The first and the last operation that reads each weight in `alone`; what makes a buffer's next value reads it too."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for name, value in graph.weights.items():
        maker = graph.updates[name].maker if name in graph.updates else None
        makers = [] if maker is None else [maker]
        places = [at[node] for node in [*value.users, *makers] if node in at]
        if places and name in alone:
            first[name], last[name] = min(places), max(places)
    return first, last


def _last_reads(graph: Graph, at: Mapping[Node, int]) -> dict[Value, int]:
    """The last operation that reads each value; the end, for what the model returns."""
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
    """The cuts 0 < c1 < ... < ends - 1 that make the joined cost of the stages least, and that cost."""
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
    """The place where the first module that `pattern` fits begins to read weights."""
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
    """The modules that a parameter lies in, outermost first."""
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
    """The stage of every parameter and buffer; what nobody reads lies with the one before it by name."""
    owner: dict[str, int] = {}
    stage = 0
    for name, value in order.graph.weights.items():
        places = [order.at[node] for node in value.users if node in order.at]
        places = [order.first_read[name]] if name in order.first_read else places
        if places:
            stage = sum(cut <= min(places) for cut in cuts)
        owner[name] = stage
    return owner
