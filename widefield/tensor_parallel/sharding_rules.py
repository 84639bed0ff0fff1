"""Sharding rules: the strategies with which each operation can run on sharded tensors.

Here are the rules of layers whose weights are sharded with their image, of pointwise operations and of masks; those of views
are in views.py.  For all other operations the tile rule in `ops/` decides (rule_strategies.py).  An operation without any runs
on full tensors, with the same numbers; what is gathered for it is reported with its bytes (`ShardedGraph.fallbacks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from widefield.capture.decompositions import BATCH_NORM_OVER, linear
from widefield.capture.ir import Node, Value
from widefield.capture.node_rules import rule_of
from widefield.capture.recorder import POINTWISE
from widefield.tensor_parallel import views
from widefield.tensor_parallel.op_strategy import (
    PARTIAL,
    PARTIAL_GRADIENT,
    WHOLE,
    Candidates,
    Given,
    OpStrategy,
    Placement,
    Rule,
    even,
)
from widefield.tensor_parallel.placement import Shard, in_groups
from widefield.tensor_parallel.rule_strategies import by_rule, refusal_of

aten = torch.ops.aten


def strategies_of(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """The strategies of a node, if the values in `given` are available as these shards; the last one takes full tensors."""
    rule = _rule_of(node)
    parts = {value: given[value] for value in node.reads if value in given}
    if rule is not None:
        yield from rule(node, parts, candidates)
    yield OpStrategy({}, [WHOLE] * len(node.outs))


def why_whole(node: Node, value: Value, part: Shard, candidates: Candidates) -> str:
    """Why an operation reads the full tensor of a sharded value."""
    if _rule_of(node) is None:
        return "no file in ops/ has a rule for it"
    if (refusal := refusal_of(node, value, part.dim)) is not None:
        return f"its rule refuses: {refusal.partition(';')[0]}"
    if len(list(strategies_of(node, {value: part}, candidates))) == 1:
        return f"its rule wants dim {part.dim} whole"
    return "its rule has no cheaper strategy for the shards that there are"


def _rule_of(node: Node) -> Rule | None:
    op = node.op
    if op in RULES:
        return RULES[op]
    if op in POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ()):
        return _pointwise
    return by_rule if rule_of(node) is not None else None


# ---------------------------------------------------------------------------------------------- pointwise


def _pointwise(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    out = next(out for out in node.outs if out is not None)
    for value in dict.fromkeys(node.reads):
        if value in given:
            dim = given[value].dim + out.ndim - value.ndim
            part = given[value].on(dim)
            if value.shape[given[value].dim] == out.shape[dim]:
                yield OpStrategy(_aligned(node, out, part), [part] * len(node.outs))


def _aligned(node: Node, out: Value, part: Shard) -> dict[Value, Placement]:
    """The placement of each operand of a broadcasting operation whose result has the shard `part`."""
    wants: dict[Value, Placement] = {}
    for value in node.reads:
        dim = part.dim - (out.ndim - value.ndim)
        wants[value] = part.on(dim) if dim >= 0 and value.shape[dim] == out.shape[part.dim] else PARTIAL_GRADIENT
    return wants


# ---------------------------------------------------------------------------------------------- layers with weights


def _convolution(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, weight, bias, *_, transposed, _, groups = node.args
    out = node.outs[0]
    assert out is not None
    inputs, outputs = (0, 1) if transposed else (1, 0)
    if x is weight:  # one value cannot have two placements
        return
    if groups > 1:
        yield from _grouped(node, given, candidates)
        return
    for part in candidates.shards(out, 1) if x not in given else []:
        yield OpStrategy({x: PARTIAL_GRADIENT, weight: part.on(outputs), **_if(bias, part.on(0))}, [part])
    parts = [given[x]] if x in given and given[x].dim == 1 else []
    for part in parts or even(x, 1, candidates):
        args = (x, weight, None, *node.args[3:])
        yield OpStrategy({x: part, weight: part.on(inputs)}, [PARTIAL], lambda _, args=args: args, bias=bias, bias_dim=1)


def _grouped(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, weight, bias, *_, groups = node.args
    out = node.outs[0]
    assert out is not None
    parts = [given[x]] if x in given and given[x].dim == 1 else []
    for part in parts or candidates.shards(x, 1):
        whole = in_groups(part, groups)
        if whole is None:
            continue
        of_out = Shard(1, [_channels(indices, out.shape[1] // groups) for indices in whole.indices])
        of_weight = Shard(0, [_channels(indices, weight.shape[0] // groups) for indices in whole.indices])

        def args(rank: int, whole: Shard = whole) -> tuple:
            return (*node.args[:8], len(whole.indices[rank]))

        yield OpStrategy({x: part, weight: of_weight, **_if(bias, of_out.on(0))}, [of_out], args)


def _channels(groups: Any, each: int) -> Any:
    return (groups[:, None] * each + torch.arange(each).numpy()).reshape(-1)


def _if(value: Value | None, placement: Placement) -> dict[Value, Placement]:
    return {} if value is None else {value: placement}


def _matrix(
    x: Value, weight: Value, bias: Value | None, node: Node, given: Given, candidates: Candidates
) -> Iterator[OpStrategy]:
    """(..., C) times (C, K), and a bias of (K)."""
    out, last = node.outs[0], x.ndim - 1
    assert out is not None
    if x is weight:  # one value cannot have two placements
        return
    if x in given and given[x].dim < last:
        yield OpStrategy({x: given[x]}, [given[x]])
        return
    for part in candidates.shards(out, last) if x not in given else []:
        yield OpStrategy({x: PARTIAL_GRADIENT, weight: part.on(1), **_if(bias, part.on(0))}, [part])
    for part in [given[x]] if x in given else even(x, last, candidates):
        op = linear if bias is not None else None
        args = (x, weight) if bias is not None else None
        given_args = None if args is None else (lambda _, args=args: args)
        yield OpStrategy({x: part, weight: part.on(0)}, [PARTIAL], given_args, op, bias=bias, bias_dim=last)


def _linear(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, weight, *bias = node.args
    yield from _matrix(x, weight, bias[0] if bias else None, node, given, candidates)


def _addmm(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    bias, x, weight = node.args
    if not node.kwargs and bias.ndim == 1:
        yield from _matrix(x, weight, bias, node, given, candidates)


def _mm(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    yield from _matrix(*node.args, None, node, given, candidates)


# ---------------------------------------------------------------------------------------------- norms with weights


def _batch_norm(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, *others = node.args[:5]
    if x in given and given[x].dim == 1:
        part = given[x].on(0)
        yield OpStrategy(
            {x: given[x], **{v: part for v in others if isinstance(v, Value)}}, [given[x], *[part] * (len(node.outs) - 1)]
        )


def _group_norm(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """x (N, C, ...), weight, bias, N, C, pixels, groups, eps."""
    x, weight, bias, count, channels, pixels, groups, eps = node.args
    part = given.get(x)
    whole = in_groups(part, groups) if part is not None and part.dim == 1 else None
    if part is None or whole is None:
        return

    def args(rank: int) -> tuple:
        return x, weight, bias, count, len(part.indices[rank]), pixels, len(whole.indices[rank]), eps

    wants = {x: part, **_if(weight, part.on(0)), **_if(bias, part.on(0))}
    yield OpStrategy(wants, [part, whole.on(1), whole.on(1)], args)


# ---------------------------------------------------------------------------------------------- random numbers


def _mask(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """A mask drawn for the full tensor, the same on every rank as on one device; or a tensor filled with one number.

    Random numbers are drawn in memory order, so the tensor has the memory format of the full one.
    """
    x, out = node.args[0], node.outs[0]
    if x not in given or out is None:
        return
    op = node.op

    def draw(image: Any, *args: Any, **kwargs: Any) -> Any:
        return op(torch.empty_permuted(x.shape, x.order, dtype=image.dtype, device=image.device), *args, **kwargs)

    yield OpStrategy({x: given[x]}, [WHOLE], op=draw)


RULES: dict[Any, Rule] = {
    aten.convolution.default: _convolution,
    linear: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    BATCH_NORM_OVER: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_group_norm.default: _group_norm,
    aten.view.default: views.of_view,
    aten._unsafe_view.default: views.of_view,
    aten.reshape.default: views.of_view,
    **dict.fromkeys(
        (
            aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim,
            aten.squeeze.dims, aten.squeeze.default,
        ),
        views.of_move,
    ),
    **dict.fromkeys((aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default), views.of_move),
    aten.expand.default: views.of_expand,
    aten.slice.Tensor: views.of_slice,
    aten.cat.default: views.of_cat,
    **dict.fromkeys(
        (
            torch.ops.widefield.dropout_mask.default, aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default,
            aten.full_like.default, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
            aten.randint_like.low_dtype,
        ),
        _mask,
    ),
}  # fmt: skip
"""The rules of layers with weights, views and masks, by operation."""
