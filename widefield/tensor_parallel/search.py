"""Chooses a sharding strategy for each operation of a graph, and builds the graph that a rank runs.

The search is greedy: it goes through the operations in order and takes the cheapest strategy of each.  The cost counts bytes
sent, weights that stay whole on every rank, and work that every rank repeats.  Before a layer gives a shard, the operations
after it are looked at, so that the shard consists of whole heads or groups, with which they can go on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from widefield.capture.flops import flops_of
from widefield.capture.ir import Graph, Node, Value, link, put_in
from widefield.fallback import Fallback
from widefield.private_torch.pytree import tree_map
from widefield.tensor_parallel.collectives import (
    CopyToRanks,
    Exchange,
    GatherFromRanks,
    Ranks,
    ReduceFromRanks,
    Reduction,
    ScatterToRanks,
)
from widefield.tensor_parallel.lookahead import AHEAD, MOVES, VIEWS, shapes_behind
from widefield.tensor_parallel.op_strategy import PARTIAL, PARTIAL_GRADIENT, WHOLE, Candidates, OpStrategy, Placement
from widefield.tensor_parallel.placement import Shard, split_along, viewed
from widefield.tensor_parallel.sharding_rules import aten, strategies_of, why_whole
from widefield.tensor_parallel.views import move_of, moved_to

WEIGHT_COST = 16
"""Cost of a byte of a weight that stays whole, in bytes sent; it includes the weight's gradient and optimizer state."""
GATHERED_COST = 1e6
"""Cost of a byte of a weight that is sharded already and would be gathered in every pass, in bytes sent."""
WEIGHT_LEAST = 4096
"""Weights of fewer bytes cost nothing, whole or sharded."""
FLOPS_PER_BYTE = 50.0
"""FLOPs that take as long as sending a byte; between a CPU's loopback (20) and GPUs of one machine (200)."""


@dataclass
class ShardedGraph:
    """graph: what this rank runs, on its shards.  shards: the Shard of each sharded weight, by name.

    sent_bytes: of the full activations and gradients in this rank's messages, in a training pass.
    replicated_flops, sharded_flops: forward work that every rank repeats, and that the ranks divide.
    layers: how each convolution or matrix product is sharded ("outputs", "inputs", "groups", "whole"), by its weight's name.
    fallbacks: values and weights that are gathered, random numbers drawn for full tensors, and layers that are left whole.
    """

    graph: Graph
    shards: dict[str, Shard]
    sent_bytes: int = 0
    replicated_flops: float = 0.0
    sharded_flops: float = 0.0
    layers: dict[str, str] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)


def choose(graph: Graph, ranks: Ranks, shards: Mapping[str, Shard] | None = None) -> ShardedGraph:
    """Choose a strategy for every operation of a graph, for the ranks of a channel axis.

    shards: of weights that are sharded already, by name; None: the search chooses how weights are sharded.
    """
    return _ShardingSearch(graph, ranks, shards).run()


class _ShardingSearch:
    def __init__(self, graph: Graph, ranks: Ranks, shards: Mapping[str, Shard] | None) -> None:
        self.graph, self.ranks, self.is_free = graph, ranks, shards is None
        self.shards: dict[str, Shard] = dict(shards or {})
        self.candidates = Candidates(ranks.size, self._candidate_shards)
        self.at = {node: number for number, node in enumerate(graph.nodes)}
        self.available: dict[Value, dict[Placement, Value]] = {}
        self.weight_views: set[Value] = set()
        """Views and casts of weights, which are built when they are read, since only then their shard is known."""
        self.nodes: list[Node] = []
        self.sent_bytes: dict[Node, int] = {}
        self.weights: dict[str, Value] = {}
        self.found = ShardedGraph(graph, self.shards)
        self.reader: Node | None = None
        """The operation whose arguments are being built; None for outputs of the module and new values of its buffers."""
        self.gathered: dict[Node, Fallback] = {}
        self.drawn_whole: list[Fallback] = []
        self.like_shards: set[Value] = set()
        """Full tensors that are made like a sharded one, such as the tensor into which a mask is drawn."""
        self.left_whole: dict[str, Fallback] = {}
        """Layers whose weights are left whole, by the weight's name."""
        self.count = 0
        self.tried_shards: dict[tuple[Value, int], list[Shard]] = {}
        self.returned = set(graph.results) - set(graph.updates.values()) - set(graph.weights.values())

    def run(self) -> ShardedGraph:
        for value in self.graph.inputs:
            self.available[value] = {WHOLE: value}
        for value, _ in self.graph.constants:
            self.available[value] = {WHOLE: value}
        for node in self.graph.nodes:
            if self._is_weight_view(node):
                self.weight_views.add(node.outs[0])  # type: ignore[arg-type]
            else:
                self._apply(node, self._cheapest(node))
        self.reader = None
        outputs = tree_map(lambda leaf: self.need(leaf, WHOLE) if isinstance(leaf, Value) else leaf, self.graph.outputs)
        updates = {name: self.need(value, self.shards.get(name, WHOLE)) for name, value in self.graph.updates.items()}
        for name in self.graph.weights:
            self._weight(name)
        graph = Graph(self.graph.inputs, self.weights, self.graph.constants, self.nodes, outputs, updates)
        link(graph)  # it drops messages whose results no operation reads
        gathered = [self.gathered[node] for node in graph.nodes if node in self.gathered]
        sent = sum(self.sent_bytes.get(node, 0) for node in graph.nodes)
        fallbacks = [*gathered, *self.drawn_whole, *self.left_whole.values()]
        return replace(self.found, graph=graph, sent_bytes=sent, fallbacks=fallbacks)

    # ------------------------------------------------------------------------------------------ the cheapest strategy

    def _cheapest(self, node: Node) -> OpStrategy:
        strategies = list(strategies_of(node, self._given(node.reads), self.candidates))
        return strategies[0] if len(strategies) == 1 else min(strategies, key=lambda strategy: self._cost(node, strategy))

    def _given(self, values: list[Value]) -> dict[Value, Shard]:
        """The shards in which values are available."""
        found = {}
        for value in values:
            placements = self.available.get(value, {})
            part = next((placement for placement in placements if isinstance(placement, Shard)), None)
            if part is not None:
                found[value] = part
        return found

    def _cost(self, node: Node, strategy: OpStrategy) -> float:
        """Bytes sent now and after the next operations, plus replicated weights and replicated work in the same unit."""
        cost = sum(self._price(value, strategy.want(value)) for value in dict.fromkeys(node.reads))
        if not _is_cut(strategy):
            return cost + flops_of(node) * 3 * (1 - 1 / self.candidates.size) / FLOPS_PER_BYTE
        out, placement = next(pair for pair in zip(node.outs, strategy.outs, strict=True) if pair[0] is not None)
        assert out is not None
        if placement is PARTIAL:
            return cost + 2 * out.bytes
        return cost + (self._lookahead_cost(node, out, placement) if isinstance(placement, Shard) else 0.0)

    def _price(self, value: Value, placement: Placement) -> float:
        """Cost of converting a value to a placement: 0 where it is available in it."""
        if value in self.weight_views or value.source == "weight":
            return self._price_of_weight(value, placement)
        available = self.available[value]
        if placement in available or (placement is PARTIAL_GRADIENT and not value.wants_grad and WHOLE in available):
            return 0.0
        back = value.bytes * bool(value.wants_grad)
        price = 0.0 if WHOLE in available else value.bytes
        return price + (2 * back if placement is PARTIAL_GRADIENT else back if isinstance(placement, Shard) else 0)

    def _price_of_weight(self, value: Value, placement: Placement) -> float:
        name = _weight_of(value)
        if name is None or value.bytes < WEIGHT_LEAST:
            return 0.0
        part = self.shards.get(name)
        is_free = self.is_free and part is None and name not in self.weights
        if isinstance(placement, Shard):
            wanted = self._weight_shard(value, placement)
            return 0.0 if wanted is not None and (is_free or wanted == part) else GATHERED_COST * value.bytes
        if part is not None:
            return GATHERED_COST * value.bytes
        return WEIGHT_COST * value.bytes * (1 - 1 / self.candidates.size) if is_free else 0.0

    def _lookahead_cost(self, node: Node, out: Value, part: Shard) -> float:
        """Bytes that must be gathered after a node that gives a shard, within the next AHEAD operations."""
        parts, cost = {out: part}, 0.0
        queue = [(self.at[user], id(user), user) for user in out.users]
        heapq.heapify(queue)
        seen: set[Node] = set()
        for _ in range(AHEAD):
            if not queue:
                break
            *_, user = heapq.heappop(queue)
            if user in seen:
                continue
            seen.add(user)
            cost += self._advance(user, parts, queue)
        return cost + sum(value.bytes for value in parts if value in self.returned)

    def _advance(self, user: Node, parts: dict[Value, Shard], queue: list) -> float:
        """Find the shards that an operation makes of `parts`; the bytes to gather where no strategy of it accepts them."""
        given = {**self._given(user.reads), **{value: parts[value] for value in user.reads if value in parts}}
        ours = [value for value in dict.fromkeys(user.reads) if value in parts]
        for strategy in strategies_of(user, given, replace(self.candidates, shards=lambda value, dim: [])):
            if all(strategy.want(value) == parts[value] for value in ours):
                for out, placement in zip(user.outs, strategy.outs, strict=False):
                    if out is not None and isinstance(placement, Shard):
                        parts[out] = placement
                        [heapq.heappush(queue, (self.at[next_], id(next_), next_)) for next_ in out.users]
                return 0.0
        return float(sum(value.bytes for value in ours))

    def _candidate_shards(self, value: Value, dim: int) -> list[Shard]:
        """Shards worth trying for a dim: even runs, and even divisions of the heads or groups that later operations see."""
        key = (value, dim)
        if key not in self.tried_shards:
            extent, size = value.shape[dim], self.ranks.size
            shapes = dict.fromkeys([(extent,), *shapes_behind(value, dim, self.at)])
            assert all(math.prod(shape) == extent for shape in shapes), f"a dim of {extent} is none of {list(shapes)}"
            splits = [(shape, axis) for shape in shapes for axis, count in enumerate(shape) if count >= size]
            self.tried_shards[key] = list(dict.fromkeys(Shard(dim, split_along(shape, axis, size)) for shape, axis in splits))
        return self.tried_shards[key]

    # ------------------------------------------------------------------------------------------ this rank's graph

    def _apply(self, node: Node, strategy: OpStrategy) -> None:
        """Add a node as this rank runs it, and the messages that it needs."""
        self.reader = node
        names = {value: self.need(value, strategy.want(value)) for value in dict.fromkeys(node.reads)}
        args = node.args if strategy.args is None else strategy.args(self.ranks.rank)
        op = node.op if strategy.op is None else strategy.op
        outs = [
            None if out is None else self._new(out, placement) for out, placement in zip(node.outs, strategy.outs, strict=True)
        ]
        args, kwargs = put_in(args, names), put_in(node.kwargs, names)
        self.nodes.append(Node(op, args, kwargs, outs, node.is_single, node.grad, node.draws))
        self.nodes[-1].path = node.path
        for out, placement, made in zip(node.outs, strategy.outs, outs, strict=True):
            if out is not None and made is not None:
                self.available[out] = {placement: made}
        if PARTIAL in strategy.outs:
            self._reduce(node, strategy)
        self._report(node, strategy)

    def _reduce(self, node: Node, strategy: OpStrategy) -> None:
        out = node.outs[0]
        assert out is not None
        total = self._exchange(out, PARTIAL, WHOLE)
        if strategy.bias is not None:
            bias = self.need(strategy.bias, WHOLE)
            shape = [1] * out.ndim
            shape[strategy.bias_dim] = -1
            seen, after = self._new(out, WHOLE), self._new(out, WHOLE)
            self._add(aten.view.default, (bias, shape), {}, [seen], grad=node.grad)
            self._add(aten.add.Tensor, (total, seen), {}, [after], grad=node.grad)
            total = after
        self.available[out] = {WHOLE: total}

    def need(self, value: Value, placement: Placement) -> Value:
        """The value of this rank's graph that is `value` in this placement; added where it is not there yet."""
        if value.source == "weight":
            self._weight(value.name, placement)
        elif value in self.weight_views and placement not in self.available.get(value, {}):
            return self._weight_view(value, placement)
        available = self.available[value]
        if placement in available:
            return available[placement]
        if placement is not WHOLE and WHOLE not in available:
            self.need(value, WHOLE)
        if placement is PARTIAL_GRADIENT and not value.wants_grad:
            return available[WHOLE]
        return self._exchange(value, WHOLE if WHOLE in available else next(iter(available)), placement)

    def _exchange(self, value: Value, before: Placement, after: Placement) -> Value:
        """Add the collective that converts a value from one placement to another."""
        ranks, own = self.ranks, self.available[value][before]
        made = self._new(value, after)
        if after is PARTIAL_GRADIENT:
            op, extra, factor = CopyToRanks.apply, Reduction(ranks, value.order), 2 * bool(value.wants_grad)
        elif before is PARTIAL:
            op, extra, factor = ReduceFromRanks.apply, Reduction(ranks, value.order), 2
        elif isinstance(after, Shard):
            op, extra, factor = ScatterToRanks.apply, Exchange(after, ranks, value.order), int(value.wants_grad)
        else:
            assert isinstance(before, Shard), f"{before} to {after}"
            op, extra, factor = GatherFromRanks.apply, Exchange(before, ranks, value.order), 1
        self._add(op, (own, extra), {}, [made], grad=value.maker is None or value.maker.grad)
        self.available[value][after] = made
        self.sent_bytes[self.nodes[-1]] = factor * value.bytes
        if op == GatherFromRanks.apply:
            self.gathered[self.nodes[-1]] = self._gathered(value)
        return made

    def _add(self, op: Any, args: Any, kwargs: Any, outs: list[Value | None], *, grad: bool) -> None:
        self.nodes.append(Node(op, args, kwargs, outs, is_single=True, grad=grad))

    def _new(self, value: Value, placement: Placement) -> Value:
        """A new value of this rank's graph, with the shape that it has here."""
        shape = placement.shape(value.shape, self.ranks.rank) if isinstance(placement, Shard) else value.shape
        self.count += 1
        return Value(-self.count, shape, value.dtype, value.device, value.order, wants_grad=value.wants_grad)

    # ------------------------------------------------------------------------------------------ weights

    def _weight(self, name: str, placement: Placement = WHOLE) -> None:
        """Add a weight at its first use; if weights are free, this decides its shard."""
        if name in self.weights:
            return
        value = self.graph.weights[name]
        if self.is_free and isinstance(placement, Shard):
            self.shards[name] = placement
        part = self.shards.get(name)
        own = value if part is None else self._new(value, part)
        own.source, own.name = "weight", name
        self.weights[name] = own
        self.available[value] = {WHOLE if part is None else part: own}

    def _is_weight_view(self, node: Node) -> bool:
        """Whether a node is only a view or a cast of a weight."""
        is_view = node.op in MOVES or node.op in VIEWS
        return is_view and len(node.reads) == 1 and (node.reads[0].source == "weight" or node.reads[0] in self.weight_views)

    def _weight_view(self, value: Value, placement: Placement) -> Value:
        """Add a view or a cast of a weight, in the placement that is asked for."""
        node = value.maker
        assert node is not None
        before = _input_shard(node, placement) if isinstance(placement, Shard) else placement
        if before is None:  # no shard of the weight becomes this shard of the view
            self._weight_view(value, WHOLE)
            return self._exchange(value, WHOLE, placement)
        own = self.need(node.reads[0], before)
        made = self._new(value, placement)
        op, args = (node.op, (list(made.shape),)) if node.op in VIEWS else move_of(node)
        self._add(op, (own, *args), node.kwargs, [made], grad=node.grad)
        self.available.setdefault(value, {})[placement] = made
        return made

    def _weight_shard(self, value: Value, placement: Shard) -> Shard | None:
        """The shard of a weight whose view has this shard; None if there is none."""
        part: Shard | None = placement
        while value.source != "weight" and part is not None:
            assert value.maker is not None
            part, value = _input_shard(value.maker, part), value.maker.reads[0]
        return part

    # ------------------------------------------------------------------------------------------ what is reported

    def _report(self, node: Node, strategy: OpStrategy) -> None:
        outs = [out for out in node.outs if out is not None]
        if self.like_shards & set(node.reads) or any(isinstance(placement, Shard) for placement in strategy.wants.values()):
            if node.draws:
                self.drawn_whole += [Fallback("drawn whole", node.path, node.name, out.bytes) for out in outs]
            elif not _is_cut(strategy):
                self.like_shards.update(outs)
        flops = flops_of(node)
        if not flops:
            return
        is_cut = _is_cut(strategy)
        self.found.sharded_flops += flops * is_cut
        self.found.replicated_flops += flops * (not is_cut)
        names = [name for name in map(_weight_of, node.reads) if name is not None and self.graph.weights[name].ndim > 1]
        if names:
            groups = node.op is aten.convolution.default and node.args[8] > 1
            how = "inputs" if PARTIAL in strategy.outs else "outputs" if not groups else "groups"
            self.found.layers[names[0]] = how if is_cut else "whole"
            if not is_cut:
                self.left_whole[names[0]] = Fallback("left whole", node.path, node.name, self.graph.weights[names[0]].bytes)

    def _gathered(self, value: Value) -> Fallback:
        """Why the reader needs the full tensor of a sharded value."""
        if self.reader is None:
            return Fallback("gathered", "", "output", value.bytes, "the module returns it, or keeps it in a buffer")
        name = _weight_of(value)
        if name is not None:
            why = f"the weight {name} is sharded, and it takes another shard, or the whole"
        else:
            part = next(placement for placement in self.available[value] if isinstance(placement, Shard))
            why = why_whole(self.reader, value, part, self.candidates)
        return Fallback("gathered", self.reader.path, self.reader.name, value.bytes, why)


def _is_cut(strategy: OpStrategy) -> bool:
    """Whether the ranks divide the work."""
    return PARTIAL in strategy.outs or any(isinstance(placement, Shard) for placement in strategy.outs)


def _weight_of(value: Value) -> str | None:
    """The name of the weight that a value is or is a view of."""
    while value.source != "weight":
        node = value.maker
        if node is None or len(node.reads) != 1 or not (node.op in MOVES or node.op in VIEWS):
            return None
        value = node.reads[0]
    return value.name


def _input_shard(node: Node, part: Shard) -> Shard | None:
    """The shard of its input of which a view or a cast gives this shard; None where there is none."""
    x, out = node.reads[0], node.outs[0]
    assert out is not None
    if node.op in VIEWS:
        return viewed(part, out.shape, x.shape)
    dim = next((dim for dim in range(x.ndim) if moved_to(node, dim) == part.dim), None)
    return None if dim is None or x.shape[dim] != out.shape[part.dim] else part.on(dim)
