"""How can one operation run on ranks that have parts of its tensors?

Here are layers whose weights are cut with their image, pointwise operations and masks; views of any set of indices are in
views.py.  For all others the rule in `ops/` decides (rule_strategies.py).  Without a strategy it runs on wholes, which is
always right; what is gathered for that is reported with its bytes (`Chosen.fallbacks`).
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
from widefield.tensor_parallel.op_strategy import ENTERED, SUM, WHOLE, Cutter, Given, OpStrategy, Placement, Rule, even
from widefield.tensor_parallel.placement import Shard, in_groups
from widefield.tensor_parallel.rule_strategies import by_rule, refusal_of

aten = torch.ops.aten


def strategies_of(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """All strategies of a node where the values in `given` are parts; that on wholes comes last."""
    rule = _rule_of(node)
    parts = {value: given[value] for value in node.reads if value in given}
    if rule is not None:
        yield from rule(node, parts, cutter)
    yield OpStrategy({}, [WHOLE] * len(node.outs))


def why_whole(node: Node, value: Value, part: Shard, cutter: Cutter) -> str:
    """Why an operation reads the whole of a value of which ranks hold parts."""
    if _rule_of(node) is None:
        return "no file in ops/ has a rule for it"
    if (refusal := refusal_of(node, value, part.dim)) is not None:
        return f"its rule refuses: {refusal.partition(';')[0]}"
    if len(list(strategies_of(node, {value: part}, cutter))) == 1:
        return f"its rule wants dim {part.dim} whole"
    return "its rule has no cheaper way to run on the parts that there are"


def _rule_of(node: Node) -> Rule | None:
    op = node.op
    if op in RULES:
        return RULES[op]
    if op in POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ()):
        return _pointwise
    return by_rule if rule_of(node) is not None else None


# ---------------------------------------------------------------------------------------------- pixel by pixel


def _pointwise(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    out = next(out for out in node.outs if out is not None)
    for value in dict.fromkeys(node.reads):
        if value in given:
            dim = given[value].dim + out.ndim - value.ndim
            part = given[value].on(dim)
            if value.shape[given[value].dim] == out.shape[dim]:
                yield OpStrategy(_aligned(node, out, part), [part] * len(node.outs))


def _aligned(node: Node, out: Value, part: Shard) -> dict[Value, Placement]:
    """What each operand of a broadcasting operation must be for the result to be a part."""
    wants: dict[Value, Placement] = {}
    for value in node.reads:
        dim = part.dim - (out.ndim - value.ndim)
        wants[value] = part.on(dim) if dim >= 0 and value.shape[dim] == out.shape[part.dim] else ENTERED
    return wants


# ---------------------------------------------------------------------------------------------- layers with weights


def _convolution(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    x, weight, bias, *_, transposed, _, groups = node.args
    out = node.outs[0]
    assert out is not None
    inputs, outputs = (0, 1) if transposed else (1, 0)
    if x is weight:  # it can be but one part
        return
    if groups > 1:
        yield from _grouped(node, given, cutter)
        return
    for part in cutter.tried(out, 1) if x not in given else []:
        yield OpStrategy({x: ENTERED, weight: part.on(outputs), **_if(bias, part.on(0))}, [part])
    held = [given[x]] if x in given and given[x].dim == 1 else []
    for part in held or even(x, 1, cutter):
        args = (x, weight, None, *node.args[3:])
        yield OpStrategy({x: part, weight: part.on(inputs)}, [SUM], lambda _, args=args: args, bias=bias, bias_dim=1)


def _grouped(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    x, weight, bias, *_, groups = node.args
    out = node.outs[0]
    assert out is not None
    held = [given[x]] if x in given and given[x].dim == 1 else []
    for part in held or cutter.tried(x, 1):
        whole = in_groups(part, groups)
        if whole is None:
            continue
        of_out = Shard(1, [_channels(indices, out.shape[1] // groups) for indices in whole.held])
        of_weight = Shard(0, [_channels(indices, weight.shape[0] // groups) for indices in whole.held])

        def args(rank: int, whole: Shard = whole) -> tuple:
            return (*node.args[:8], len(whole.held[rank]))

        yield OpStrategy({x: part, weight: of_weight, **_if(bias, of_out.on(0))}, [of_out], args)


def _channels(groups: Any, each: int) -> Any:
    return (groups[:, None] * each + torch.arange(each).numpy()).reshape(-1)


def _if(value: Value | None, layout: Placement) -> dict[Value, Placement]:
    return {} if value is None else {value: layout}


def _matrix(x: Value, weight: Value, bias: Value | None, node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """(..., C) times (C, K), and a bias of (K)."""
    out, last = node.outs[0], x.ndim - 1
    assert out is not None
    if x is weight:  # it can be but one part
        return
    if x in given and given[x].dim < last:
        yield OpStrategy({x: given[x]}, [given[x]])
        return
    for part in cutter.tried(out, last) if x not in given else []:
        yield OpStrategy({x: ENTERED, weight: part.on(1), **_if(bias, part.on(0))}, [part])
    for part in [given[x]] if x in given else even(x, last, cutter):
        op = linear if bias is not None else None
        args = (x, weight) if bias is not None else None
        given_args = None if args is None else (lambda _, args=args: args)
        yield OpStrategy({x: part, weight: part.on(0)}, [SUM], given_args, op, bias=bias, bias_dim=last)


def _linear(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    x, weight, *bias = node.args
    yield from _matrix(x, weight, bias[0] if bias else None, node, given, cutter)


def _addmm(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    bias, x, weight = node.args
    if not node.kwargs and bias.ndim == 1:
        yield from _matrix(x, weight, bias, node, given, cutter)


def _mm(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    yield from _matrix(*node.args, None, node, given, cutter)


# ---------------------------------------------------------------------------------------------- norms with weights


def _batch_norm(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    x, *others = node.args[:5]
    if x in given and given[x].dim == 1:
        part = given[x].on(0)
        yield OpStrategy(
            {x: given[x], **{v: part for v in others if isinstance(v, Value)}}, [given[x], *[part] * (len(node.outs) - 1)]
        )


def _group_norm(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """x (N, C, ...), weight, bias, N, C, pixels, groups, eps."""
    x, weight, bias, count, channels, pixels, groups, eps = node.args
    part = given.get(x)
    whole = in_groups(part, groups) if part is not None and part.dim == 1 else None
    if part is None or whole is None:
        return

    def args(rank: int) -> tuple:
        return x, weight, bias, count, len(part.held[rank]), pixels, len(whole.held[rank]), eps

    wants = {x: part, **_if(weight, part.on(0)), **_if(bias, part.on(0))}
    yield OpStrategy(wants, [part, whole.on(1), whole.on(1)], args)


# ---------------------------------------------------------------------------------------------- draws


def _mask(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """A mask that is drawn for the whole on every rank, alike, and so one device's; or what is filled with one number.

    Chance is drawn in the whole's order in memory.
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
"""Operations that have weights to be cut with the image, views of any set of indices, and draws."""
