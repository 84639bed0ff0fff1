"""Is every strategy of every operation right?  Each operation of every rule's cases runs whole and on parts, in one process.

Parts are sets of indices: every other one, and one against the rest.  Values and gradients are compared in float64.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from case_module import CaseModule
from marks import few
from torch import Tensor
from torch.nn import functional as F

from widefield import ops
from widefield.capture.ir import Graph, Node, Value, put_in
from widefield.capture.trace import trace
from widefield.rules import RuleCase
from widefield.tensor_parallel.op_strategy import PARTIAL, WHOLE, Candidates, OpStrategy, Placement
from widefield.tensor_parallel.placement import Shard
from widefield.tensor_parallel.sharding_rules import strategies_of

FAMILIES = sorted(found.name for found in pkgutil.iter_modules(ops.__path__))
TOLERANCE = 1e-10
"""Relative to the largest value: float64 summed in another order."""
WITHOUT_VALUES = {"empty_like", "new_empty", "empty"}
"""Operations that leave their results as memory was."""
UNDEFINED = "fused, one batch of keys for all"
"""A case in which torch's kernel writes beyond its memory, so that the process ends."""


def tried(value: Value, dim: int) -> list[Shard]:
    """Parts of a dim for two ranks."""
    indices = np.arange(value.shape[dim])
    parts = [[indices[::2], indices[1::2]], [indices[:1], indices[1:]]] if len(indices) > 1 else []
    return [Shard(dim, part) for part in parts]


def part_of(tensor: Tensor, layout: Placement, rank: int) -> Tensor:
    return tensor.index_select(layout.dim, torch.from_numpy(layout.indices[rank])) if isinstance(layout, Shard) else tensor


def graph_of(case: RuleCase) -> tuple[Graph, dict[Value, Tensor]] | None:
    """What a case does, and all its values; None where torch refuses it, or it cannot be captured."""
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in case.shapes]
    module = CaseModule(case, wholes)
    images = [whole.requires_grad_() for n, whole in enumerate(wholes) if n in case.tiled]
    try:
        graph = trace(module, module.forward, tuple(images), {})
        found = dict(zip(graph.inputs, images, strict=True)) | dict(graph.constants)
        found |= {value: module.get_parameter(name) for name, value in graph.weights.items()}
        with torch.no_grad():
            for node in graph.nodes:
                made = results(node.call(iter([found[value] for value in node.reads])))
                found |= {out: one for out, one in zip(node.outs, made, strict=False) if out is not None}
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None
    return graph, {value: tensor.detach() for value, tensor in found.items()}


def results(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


class Trial:
    """A node run whole, and in a way on two ranks one after the other."""

    def __init__(self, node: Node, values: dict[Value, Tensor]) -> None:
        self.node, self.values = node, {value: values[value] for value in dict.fromkeys(node.reads)}
        leaves = leaves_of(self.values)
        self.whole = results(node.call(iter([leaves[value] for value in node.reads])))
        self.pulls = [
            torch.randn_like(one) if out is not None and out.wants_grad and one.numel() else None
            for one, out in zip(self.whole, node.outs, strict=False)
        ]
        self.expected = gradients(self.whole, self.pulls, leaves)

    def problems(self, way: OpStrategy) -> Iterator[str]:
        """What is wrong with this way, a text each."""
        sums = {number: torch.zeros_like(self.whole[number]) for number, layout in enumerate(way.outs) if layout is PARTIAL}
        grads = {value: torch.zeros_like(grad) for value, grad in self.expected.items()}
        for rank in range(2):
            leaves = leaves_of({value: part_of(whole, way.want(value), rank) for value, whole in self.values.items()})
            made = self._on_rank(way, rank, leaves)
            for number, (out, layout) in enumerate(zip(self.node.outs, way.outs, strict=True)):
                if number in sums:
                    sums[number] += made[number].detach()
                elif out is not None:
                    yield from difference(f"result {number}", made[number], part_of(self.whole[number], layout, rank))
            pairs = zip(self.pulls, way.outs, strict=False)
            pulls = [None if pull is None else part_of(pull, layout, rank) for pull, layout in pairs]
            add_up(grads, gradients(made, pulls, leaves), way, rank)
        for number, total in sums.items():
            yield from difference(f"result {number}", total + self._bias(way, total.ndim), self.whole[number])
        for value, grad in grads.items():
            if value is not way.bias:
                yield from difference(f"the gradient of {value}", grad, self.expected[value])

    def _on_rank(self, way: OpStrategy, rank: int, leaves: dict[Value, Tensor]) -> list[Any]:
        args = put_in(self.node.args if way.args is None else way.args(rank), leaves)
        return results((way.op or self.node.op)(*args, **put_in(self.node.kwargs, leaves)))

    def _bias(self, way: OpStrategy, ndim: int) -> Any:
        return 0 if way.bias is None else self.values[way.bias].view([-1 if dim == way.bias_dim else 1 for dim in range(ndim)])


def leaves_of(values: dict[Value, Tensor]) -> dict[Value, Tensor]:
    return {value: tensor.clone().requires_grad_(value.wants_grad) for value, tensor in values.items()}


def gradients(outs: list[Any], pulls: list[Tensor | None], leaves: dict[Value, Tensor]) -> dict[Value, Tensor]:
    """Of the leaves that want one, where each result is pulled by its tensor."""
    pairs = [(out, pull) for out, pull in zip(outs, pulls, strict=False) if pull is not None and out.requires_grad]
    wanted = {value: leaf for value, leaf in leaves.items() if leaf.requires_grad}
    if not pairs or not wanted:
        return {}
    outs, pulls = map(list, zip(*pairs, strict=True))
    found = torch.autograd.grad(outs, list(wanted.values()), pulls, allow_unused=True)
    return {v: torch.zeros_like(wanted[v]) if grad is None else grad for v, grad in zip(wanted, found, strict=True)}


def add_up(totals: dict[Value, Tensor], found: dict[Value, Tensor], way: OpStrategy, rank: int) -> None:
    """Put a rank's gradients where they belong: of what is whole, each rank has all of it."""
    for value in totals.keys() & found.keys():
        layout = way.want(value)
        if isinstance(layout, Shard):
            totals[value].index_add_(layout.dim, torch.from_numpy(layout.indices[rank]), found[value])
        else:
            totals[value] += found[value] / (2 if layout is WHOLE else 1)


def difference(what: str, got: Tensor, expected: Tensor) -> Iterator[str]:
    got, expected = got.detach(), expected.detach()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        yield f"{what} is {tuple(got.shape)} {got.dtype} and should be {tuple(expected.shape)} {expected.dtype}"
        return
    finite = expected[expected.isfinite()].abs() if expected.is_floating_point() else torch.zeros(0)
    most = TOLERANCE * max(1.0, finite.max().item()) if finite.numel() else 0
    same = torch.isclose(got, expected, rtol=0, atol=most, equal_nan=True)
    if not same.all():
        yield f"{what} differs at {(~same).sum()} of {same.numel()} places"


def strategies(node: Node) -> Iterator[tuple[Value, Shard, OpStrategy]]:
    """Every way but that on wholes in which a node runs on a part of one of its arguments."""
    for value in dict.fromkeys(node.reads):
        for part in [part for dim in range(value.ndim) for part in tried(value, dim)]:
            for way in list(strategies_of(node, {value: part}, Candidates(2, tried)))[:-1]:
                yield value, part, way


def nodes_of(graph: Graph) -> list[Node]:
    """Those whose results are values, and the same each time."""
    return [node for node in graph.nodes if not node.draws and node.name not in WITHOUT_VALUES and any(node.outs)]


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's advice on speed, and its words of targets that broadcast
        yield
    torch.set_default_dtype(torch.float32)


FEW = {"group_norm": 40, "patches": 30, "running": 40, "unpooling": 40}
"""Families whose cases have few operations that run on parts; of the others there are 100 ways at least."""


LONG = {"cross_entropy", "indexing", "losses", "padding", "random", "resize", "sampling", "slices"}
"""Those with the most ways."""


@pytest.mark.parametrize("family", few(FAMILIES, *[family for family in FAMILIES if family not in LONG]))
def test_every_strategy_gives_parts_of_the_wholes_results_and_gradients(family, in_float64):
    found, count = [], 0
    for case in importlib.import_module(f"{ops.__name__}.{family}").CASES:
        if case.name == UNDEFINED:
            continue
        graph, values = graph_of(case) or (None, {})
        for node in [] if graph is None else nodes_of(graph):
            trial = Trial(node, values)
            for value, part, way in strategies(node):
                count += 1
                said = f"{case.name}: {node}, {value} cut as {part}"
                found += [f"{said}: {problem}" for problem in trial.problems(way)]
    assert not found, "\n".join(found)
    assert count >= FEW.get(family, 100)


def dims_of(name: str, run: Callable, *shapes: tuple[int, ...]) -> set[int]:
    """Along which dims of its first argument the operation of this name runs on parts."""
    graph, _ = graph_of(RuleCase("", run, shapes, tuple(range(len(shapes)))))
    (node,) = [node for node in nodes_of(graph) if node.name == name]
    return {part.dim for value, part, _ in strategies(node) if value is node.reads[0]}


@pytest.mark.parametrize(
    ("name", "run", "dims"),
    [
        ("max_pool2d_with_indices", lambda x: F.max_pool2d(x, 2), {0, 1}),
        ("upsample_bicubic2d", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), {0, 1}),
        ("grid_sampler_2d", lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1)), {0, 1}),
        ("_softmax", lambda x: x.softmax(2), {0, 1, 3}),
        ("cumsum", lambda x: x.cumsum(3), {0, 1, 2}),
        ("sort", lambda x: x.sort(0).values, {1, 2, 3}),
        ("var", lambda x: x.var((2, 3)), {0, 1}),
        ("native_layer_norm", lambda x: F.layer_norm(x, (6, 5)), {0, 1}),
        ("tril", lambda x: x.tril(), {0, 1}),  # whose rows and columns count from the whole's first
    ],
)
def test_an_operation_runs_on_parts_of_the_dims_that_its_rule_leaves_alone(name, run, dims, in_float64):
    assert dims_of(name, run, (2, 4, 6, 5)) == dims
