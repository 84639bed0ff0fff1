"""Which way does each operation of a model take, and what does a rank run then?

Operations are gone through in their order, and each takes the way that costs least: bytes that are sent, weights that stay
whole on every rank, work that every rank does alike.  Before a layer gives a part, the operations behind it are looked at, so
that it gives one that they can go on with: whole heads, whole groups.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils._pytree import tree_map

from widefield.engine.channel.ahead import AHEAD, MOVES, VIEWS, shapes_behind
from widefield.engine.channel.exchange import AddUp, Enter, Exchange, Fetch, Keep, Ranks, Sum
from widefield.engine.channel.part import Part, split_along, viewed
from widefield.engine.channel.views import move_of, moved_to
from widefield.engine.channel.way import ENTERED, SUM, WHOLE, Cutter, Layout, Way
from widefield.engine.channel.ways import aten, flops_of, ways_of
from widefield.engine.stream.graph import Graph, Node, Value, link, put_in

WEIGHT_COST = 16
"""What a byte of a weight that stays whole costs, in bytes sent: it stands for its gradient and optimizer state too."""
GATHERED_COST = 1e6
"""The same where ranks hold parts of the weight already, so that it would have to be gathered in every pass."""
WEIGHT_LEAST = 4096
"""Bytes of a weight that is worth a thought."""
FLOPS_PER_BYTE = 50.0
"""How much work takes as long as sending a byte; between a CPU's loopback (20) and GPUs of one machine (200)."""


@dataclass
class Chosen:
    """graph: what this rank runs, on its parts.  stored: the part of each weight that ranks hold parts of, by name.

    sent: bytes of activations and their gradients that this rank's messages carry in a training pass, wholes counted.
    whole_flops, cut_flops: forward work that every rank does alike, and that they share.
    layers: of each convolution or product with a weight, its name and how it is cut ("outputs", "inputs", "groups", "whole").
    """

    graph: Graph
    stored: dict[str, Part]
    sent: int = 0
    whole_flops: float = 0.0
    cut_flops: float = 0.0
    layers: dict[str, str] = field(default_factory=dict)


def choose(graph: Graph, ranks: Ranks, stored: Mapping[str, Part] | None = None) -> Chosen:
    """The way of every operation of a graph, for the ranks of a channel axis.

    stored: the parts of weights as they are held already; None: weights are free to be cut.
    """
    return _Chooser(graph, ranks, stored).chosen()


class _Chooser:
    def __init__(self, graph: Graph, ranks: Ranks, stored: Mapping[str, Part] | None) -> None:
        self.graph, self.ranks, self.is_free = graph, ranks, stored is None
        self.stored: dict[str, Part] = dict(stored or {})
        self.cutter = Cutter(ranks.size, self._tried)
        self.at = {node: number for number, node in enumerate(graph.nodes)}
        self.have: dict[Value, dict[Layout, Value]] = {}
        self.late: set[Value] = set()
        """Views and casts of weights, which are made once it is known of which part."""
        self.nodes: list[Node] = []
        self.sent: dict[Node, int] = {}
        self.weights: dict[str, Value] = {}
        self.found = Chosen(graph, self.stored)
        self.count = 0
        self.candidates: dict[tuple[Value, int], list[Part]] = {}
        self.returned = set(graph.results) - set(graph.updates.values()) - set(graph.weights.values())

    def chosen(self) -> Chosen:
        for value in self.graph.inputs:
            self.have[value] = {WHOLE: value}
        for value, _ in self.graph.constants:
            self.have[value] = {WHOLE: value}
        for node in self.graph.nodes:
            if self._is_late(node):
                self.late.add(node.outs[0])  # type: ignore[arg-type]
            else:
                self._take(node, self._best(node))
        outputs = tree_map(lambda leaf: self.need(leaf, WHOLE) if isinstance(leaf, Value) else leaf, self.graph.outputs)
        updates = {name: self.need(value, self.stored.get(name, WHOLE)) for name, value in self.graph.updates.items()}
        for name in self.graph.weights:
            self._weight(name)
        graph = Graph(self.graph.inputs, self.weights, self.graph.constants, self.nodes, outputs, updates)
        link(graph)  # which drops messages that nobody needed in the end
        return replace(self.found, graph=graph, sent=sum(self.sent.get(node, 0) for node in graph.nodes))

    # ------------------------------------------------------------------------------------------ which way

    def _best(self, node: Node) -> Way:
        ways = list(ways_of(node, self._given(node.reads), self.cutter))
        return ways[0] if len(ways) == 1 else min(ways, key=lambda way: self._cost(node, way))

    def _given(self, values: list[Value]) -> dict[Value, Part]:
        """The parts that values are at hand in, where they are not whole as well."""
        found = {}
        for value in values:
            layouts = self.have.get(value, {})
            part = next((layout for layout in layouts if isinstance(layout, Part)), None)
            if part is not None:
                found[value] = part
        return found

    def _cost(self, node: Node, way: Way) -> float:
        """Bytes sent, now and soon, with weights that stay whole and work that is not shared as bytes."""
        cost = sum(self._price(value, way.want(value)) for value in dict.fromkeys(node.reads))
        is_cut = any(isinstance(layout, Part) for layout in way.outs) or SUM in way.outs
        if not is_cut:
            return cost + flops_of(node) * 3 * (1 - 1 / self.cutter.size) / FLOPS_PER_BYTE
        out = node.outs[0]
        assert out is not None
        if way.outs[0] is SUM:
            return cost + 2 * out.bytes
        return cost + (self._ahead(node, out, way.outs[0]) if isinstance(way.outs[0], Part) else 0.0)

    def _price(self, value: Value, layout: Layout) -> float:
        """What it costs to have a value so: 0 where it is so already."""
        if value in self.late or value.source == "weight":
            return self._price_of_weight(value, layout)
        have = self.have[value]
        if layout in have or (layout is ENTERED and not value.wants_grad and WHOLE in have):
            return 0.0
        back = value.bytes * bool(value.wants_grad)
        price = 0.0 if WHOLE in have else value.bytes
        return price + (2 * back if layout is ENTERED else back if isinstance(layout, Part) else 0)

    def _price_of_weight(self, value: Value, layout: Layout) -> float:
        name = _weight_of(value)
        if name is None or value.bytes < WEIGHT_LEAST:
            return 0.0
        held = self.stored.get(name)
        is_free = self.is_free and held is None and name not in self.weights
        if isinstance(layout, Part):
            wanted = self._back_to_weight(value, layout)
            return 0.0 if wanted is not None and (is_free or wanted == held) else GATHERED_COST * value.bytes
        if held is not None:
            return GATHERED_COST * value.bytes
        return WEIGHT_COST * value.bytes * (1 - 1 / self.cutter.size) if is_free else 0.0

    def _ahead(self, node: Node, out: Value, part: Part) -> float:
        """Bytes that must be gathered behind a node that gives a part, as far as one looks."""
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
            cost += self._step_ahead(user, parts, queue)
        return cost + sum(value.bytes for value in parts if value in self.returned)

    def _step_ahead(self, user: Node, parts: dict[Value, Part], queue: list) -> float:
        """Let one operation take a way that goes on with parts; what must be gathered where it has none."""
        given = {**self._given(user.reads), **{value: parts[value] for value in user.reads if value in parts}}
        ours = [value for value in dict.fromkeys(user.reads) if value in parts]
        for way in ways_of(user, given, replace(self.cutter, tried=lambda value, dim: [])):
            if all(way.want(value) == parts[value] for value in ours):
                for out, layout in zip(user.outs, way.outs, strict=False):
                    if out is not None and isinstance(layout, Part):
                        parts[out] = layout
                        [heapq.heappush(queue, (self.at[next_], id(next_), next_)) for next_ in out.users]
                return 0.0
        return float(sum(value.bytes for value in ours))

    def _tried(self, value: Value, dim: int) -> list[Part]:
        """Parts that a new whole's dim might be dealt out in: in even runs, and by what the operations behind it make of it."""
        key = (value, dim)
        if key not in self.candidates:
            extent, size = value.shape[dim], self.ranks.size
            shapes = dict.fromkeys([(extent,), *shapes_behind(value, dim, self.at)])
            assert all(math.prod(shape) == extent for shape in shapes), f"a dim of {extent} is none of {list(shapes)}"
            splits = [(shape, axis) for shape in shapes for axis, count in enumerate(shape) if count >= size]
            self.candidates[key] = list(dict.fromkeys(Part(dim, split_along(shape, axis, size)) for shape, axis in splits))
        return self.candidates[key]

    # ------------------------------------------------------------------------------------------ what is run

    def _take(self, node: Node, way: Way) -> None:
        """Write down a node as this rank runs it."""
        names = {value: self.need(value, way.want(value)) for value in dict.fromkeys(node.reads)}
        args = node.args if way.args is None else way.args(self.ranks.rank)
        op = node.op if way.op is None else way.op
        outs = [None if out is None else self._new(out, layout) for out, layout in zip(node.outs, way.outs, strict=True)]
        args, kwargs = put_in(args, names), put_in(node.kwargs, names)
        self._add(op, args, kwargs, outs, grad=node.grad, is_single=node.is_single, draws=node.draws)
        for out, layout, made in zip(node.outs, way.outs, outs, strict=True):
            if out is not None and made is not None:
                self.have[out] = {layout: made}
        if SUM in way.outs:
            self._add_up(node, way)
        self._tell(node, way)

    def _add_up(self, node: Node, way: Way) -> None:
        out = node.outs[0]
        assert out is not None
        total = self._exchange(out, SUM, WHOLE)
        if way.bias is not None:
            bias = self.need(way.bias, WHOLE)
            shape = [1] * out.ndim
            shape[way.bias_dim] = -1
            seen, after = self._new(out, WHOLE), self._new(out, WHOLE)
            self._add(aten.view.default, (bias, shape), {}, [seen], grad=node.grad)
            self._add(aten.add.Tensor, (total, seen), {}, [after], grad=node.grad)
            total = after
        self.have[out] = {WHOLE: total}

    def need(self, value: Value, layout: Layout) -> Value:
        """The value of the rank's run that is `value` in this layout, made where it is not there yet."""
        if value.source == "weight":
            self._weight(value.name, layout)
        elif value in self.late and layout not in self.have.get(value, {}):
            return self._late(value, layout)
        have = self.have[value]
        if layout in have:
            return have[layout]
        if layout is not WHOLE and WHOLE not in have:
            self.need(value, WHOLE)
        if layout is ENTERED and not value.wants_grad:
            return have[WHOLE]
        return self._exchange(value, WHOLE if WHOLE in have else next(iter(have)), layout)

    def _exchange(self, value: Value, before: Layout, after: Layout) -> Value:
        """A message, or for ENTERED none until the backward."""
        ranks, own = self.ranks, self.have[value][before]
        made = self._new(value, after)
        if after is ENTERED:
            op, extra, factor = Enter.apply, Sum(ranks, value.order), 2 * bool(value.wants_grad)
        elif before is SUM:
            op, extra, factor = AddUp.apply, Sum(ranks, value.order), 2
        elif isinstance(after, Part):
            op, extra, factor = Keep.apply, Exchange(after, ranks, value.order), int(value.wants_grad)
        else:
            assert isinstance(before, Part), f"{before} to {after}"
            op, extra, factor = Fetch.apply, Exchange(before, ranks, value.order), 1
        self._add(op, (own, extra), {}, [made], grad=value.maker is None or value.maker.grad)
        self.have[value][after] = made
        self.sent[self.nodes[-1]] = factor * value.bytes
        return made

    def _add(
        self,
        op: Any,
        args: Any,
        kwargs: Any,
        outs: list[Value | None],
        *,
        grad: bool,
        is_single: bool = True,
        draws: bool = False,
    ) -> None:
        self.nodes.append(Node(op, args, kwargs, outs, is_single, grad, draws))

    def _new(self, value: Value, layout: Layout) -> Value:
        """A value of this rank's run, of the size that it has here."""
        shape = layout.shape(value.shape, self.ranks.rank) if isinstance(layout, Part) else value.shape
        self.count += 1
        return Value(-self.count, shape, value.dtype, value.device, value.order, wants_grad=value.wants_grad)

    # ------------------------------------------------------------------------------------------ weights

    def _weight(self, name: str, layout: Layout = WHOLE) -> None:
        """Decide, at its first use, of what part of a weight this rank holds."""
        if name in self.weights:
            return
        value = self.graph.weights[name]
        if self.is_free and isinstance(layout, Part):
            self.stored[name] = layout
        held = self.stored.get(name)
        own = value if held is None else self._new(value, held)
        own.source, own.name = "weight", name
        self.weights[name] = own
        self.have[value] = {WHOLE if held is None else held: own}

    def _is_late(self, node: Node) -> bool:
        """Whether a node only shows or casts a weight."""
        is_view = node.op in MOVES or node.op in VIEWS
        return is_view and len(node.reads) == 1 and (node.reads[0].source == "weight" or node.reads[0] in self.late)

    def _late(self, value: Value, layout: Layout) -> Value:
        """A view of a weight, of the part that is asked for."""
        node = value.maker
        assert node is not None
        before = _behind(node, layout) if isinstance(layout, Part) else layout
        if before is None:  # no part of the weight is this part of the view
            self._late(value, WHOLE)
            return self._exchange(value, WHOLE, layout)
        own = self.need(node.reads[0], before)
        made = self._new(value, layout)
        op, args = (node.op, (list(made.shape),)) if node.op in VIEWS else move_of(node)
        self._add(op, (own, *args), node.kwargs, [made], grad=node.grad)
        self.have.setdefault(value, {})[layout] = made
        return made

    def _back_to_weight(self, value: Value, layout: Part) -> Part | None:
        """The part of a weight of which a view has this part."""
        part: Part | None = layout
        while value.source != "weight" and part is not None:
            assert value.maker is not None
            part, value = _behind(value.maker, part), value.maker.reads[0]
        return part

    # ------------------------------------------------------------------------------------------ in words

    def _tell(self, node: Node, way: Way) -> None:
        flops = flops_of(node)
        if not flops:
            return
        is_cut = SUM in way.outs or isinstance(way.outs[0], Part)
        self.found.cut_flops += flops * is_cut
        self.found.whole_flops += flops * (not is_cut)
        names = [name for name in map(_weight_of, node.reads) if name is not None and self.graph.weights[name].ndim > 1]
        if names:
            groups = node.op is aten.convolution.default and node.args[8] > 1
            how = "inputs" if SUM in way.outs else "outputs" if not groups else "groups"
            self.found.layers[names[0]] = how if is_cut else "whole"


def _weight_of(value: Value) -> str | None:
    """The name of the weight that a value is or is a view of."""
    while value.source != "weight":
        node = value.maker
        if node is None or len(node.reads) != 1 or not (node.op in MOVES or node.op in VIEWS):
            return None
        value = node.reads[0]
    return value.name


def _behind(node: Node, part: Part) -> Part | None:
    """Of which part of its input a view or a cast gives this part; None where there is none."""
    x, out = node.reads[0], node.outs[0]
    assert out is not None
    if node.op in VIEWS:
        return viewed(part, out.shape, x.shape)
    dim = next((dim for dim in range(x.ndim) if moved_to(node, dim) == part.dim), None)
    return None if dim is None or x.shape[dim] != out.shape[part.dim] else part.on(dim)
