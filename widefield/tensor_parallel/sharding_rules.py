"""Sharding rules: the strategies with which each operation can run on sharded tensors.

An OpStrategy says the placement of each tensor that is read and of each result.  An operation without a rule runs on full
tensors, with the same numbers; what is gathered for it is reported with its bytes (`ShardedGraph.fallbacks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from widefield.capture.decompositions import BATCH_NORM_OVER, linear
from widefield.capture.ir import Node, Value
from widefield.capture.recorder import POINTWISE
from widefield.private_torch.dispatcher import OpOverload, schema_of
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

aten = torch.ops.aten


def strategies_of(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """The strategies of a node, if the values in `given` are available as these shards; the last one takes full tensors."""
    rule = _rule_of(node)
    parts = {value: given[value] for value in node.reads if value in given}
    if rule is not None:
        yield from rule(node, parts, candidates)
    yield OpStrategy({}, [WHOLE] * len(node.outs))


def has_rule(node: Node) -> bool:
    """Whether an operation has a sharding rule."""
    return _rule_of(node) is not None


def _rule_of(node: Node) -> Rule | None:
    op = node.op
    if op in RULES:
        return RULES[op]
    if op in POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ()):
        return _pointwise
    name = schema_of(op).name.removeprefix("aten::") if isinstance(op, OpOverload) else ""
    return next((rule for start, rule in BY_NAME.items() if name.startswith(start)), None)


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
    held = [given[x]] if x in given and given[x].dim == 1 else []
    for part in held or even(x, 1, candidates):
        args = (x, weight, None, *node.args[3:])
        yield OpStrategy({x: part, weight: part.on(inputs)}, [PARTIAL], lambda _, args=args: args, bias=bias, bias_dim=1)


def _grouped(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, weight, bias, *_, groups = node.args
    out = node.outs[0]
    assert out is not None
    held = [given[x]] if x in given and given[x].dim == 1 else []
    for part in held or candidates.shards(x, 1):
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


def _bmm(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """(B, M, K) times (B, K, N)."""
    a, b = node.args
    for value, other, free in ((a, b, 1), (b, a, 2)):
        part = given.get(value)
        if part is None:
            continue
        if part.dim == 0:
            yield OpStrategy({value: part, other: part}, [part])
        elif a is b:  # one value cannot have two placements
            return
        elif part.dim == free:
            yield OpStrategy({value: part, other: PARTIAL_GRADIENT}, [part])
        else:
            yield OpStrategy({value: part, other: part.on(3 - part.dim)}, [PARTIAL])


# ---------------------------------------------------------------------------------------------- norms and attention


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


def _layer_norm(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, shape = node.args[:2]
    if x in given and given[x].dim < x.ndim - len(shape):
        yield OpStrategy({x: given[x]}, [given[x]] * len(node.outs))


def _attention(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """query, key, value (B, heads, T, D), and maybe a bias that is broadcast; sharded along B or heads."""
    first, out = node.args[:3], node.outs[0]
    part = next((given[value] for value in first if value in given and given[value].dim < 2), None)
    extra = [other for other in node.outs[1:] if other is not None and other.ndim < 2]
    if part is None or out is None or extra:
        return
    wants: dict[Value, Placement] = dict.fromkeys(first, part)
    for bias in node.reads[3:]:
        dim = part.dim - (4 - bias.ndim)
        wants[bias] = part.on(dim) if dim >= 0 and bias.shape[dim] == out.shape[part.dim] else PARTIAL_GRADIENT
    yield OpStrategy(wants, [part] * len(node.outs))


def _softmax(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    x, dim = node.args[:2]
    if x in given and given[x].dim != dim % x.ndim:
        yield OpStrategy({x: given[x]}, [given[x]])


# ---------------------------------------------------------------------------------------------- each channel by itself


def _over_pixels(dims: int) -> Rule:
    """Operations on the last `dims` dims, which must not be sharded."""

    def rule(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
        x = node.args[0]
        if len(node.reads) == 1 and x in given and given[x].dim < x.ndim - dims:
            yield OpStrategy({x: given[x]}, [given[x]] * len(node.outs))

    return rule


def _pad(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    yield from _over_pixels(len(node.args[1]) // 2)(node, given, candidates)


def _reduce(node: Node, given: Given, candidates: Candidates) -> Iterator[OpStrategy]:
    """Reductions over dims that are not sharded."""
    x, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    keeps = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim"))
    if x not in given or not dims:
        return
    over = {dim % x.ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    part = given[x]
    if part.dim not in over:
        yield OpStrategy(
            {x: part}, [part.on(part.dim - (0 if keeps else sum(dim < part.dim for dim in over)))] * len(node.outs)
        )


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
    aten.bmm.default: _bmm,
    BATCH_NORM_OVER: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten.constant_pad_nd.default: _pad,
    aten.mean.dim: _reduce,
    aten.sum.dim_IntList: _reduce,
    aten.amax.default: _reduce,
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
"""The rules of all operations but pointwise ones and those in BY_NAME."""

BY_NAME: dict[str, Rule] = {
    "_scaled_dot_product": _attention,
    **{
        start + str(dims) + "d": _over_pixels(dims)
        for dims in (1, 2, 3)
        for start in (
            "max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive_max_pool", "upsample_nearest", "_upsample_nearest_exact",
            "reflection_pad", "replication_pad",
        )
    },
    "upsample_linear1d": _over_pixels(1),
    "upsample_bilinear2d": _over_pixels(2),
    "upsample_bicubic2d": _over_pixels(2),
    "_upsample_bilinear2d_aa": _over_pixels(2),
    "_upsample_bicubic2d_aa": _over_pixels(2),
    "upsample_trilinear3d": _over_pixels(3),
    "pixel_shuffle": _over_pixels(3),
}  # fmt: skip
"""Rules by the beginning of the operation's name."""


def flops_of(node: Node) -> float:
    """FLOPs of a forward of a convolution or matrix product; 0 for other operations."""
    out = next((out for out in node.outs if out is not None), None)
    if out is None:
        return 0.0
    if node.op is aten.convolution.default:
        weight, transposed = node.args[1], node.args[6]
        size = math.prod(node.args[0].shape[2:] if transposed else out.shape[2:])
        return 2.0 * math.prod(weight.shape) * size * out.shape[0]
    if node.op in (linear, aten.mm.default, aten.addmm.default, aten.bmm.default):
        x = node.args[1] if node.op is aten.addmm.default else node.args[0]
        return 2.0 * math.prod(out.shape) * x.shape[-1]
    return 0.0
