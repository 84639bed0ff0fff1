"""How can one operation run on ranks that have parts of its tensors?

A Way says what each tensor must be (whole, entered, a Shard) and what comes out.  An operation that is not known here runs on
wholes, which is always right.
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
from widefield.tensor_parallel.op_strategy import ENTERED, SUM, WHOLE, Cutter, Given, OpStrategy, Placement, Rule, even
from widefield.tensor_parallel.placement import Shard, in_groups

aten = torch.ops.aten


def ways_of(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """All ways in which a node can run where the values in `given` are parts; that on wholes comes last."""
    rule = _rule_of(node)
    parts = {value: given[value] for value in node.reads if value in given}
    if rule is not None:
        yield from rule(node, parts, cutter)
    yield OpStrategy({}, [WHOLE] * len(node.outs))


def _rule_of(node: Node) -> Rule | None:
    op = node.op
    if op in RULES:
        return RULES[op]
    if op in POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ()):
        return _pointwise
    name = schema_of(op).name.removeprefix("aten::") if isinstance(op, OpOverload) else ""
    return next((rule for start, rule in BY_NAME.items() if name.startswith(start)), None)


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


def _bmm(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """(B, M, K) times (B, K, N)."""
    a, b = node.args
    for value, other, free in ((a, b, 1), (b, a, 2)):
        part = given.get(value)
        if part is None:
            continue
        if part.dim == 0:
            yield OpStrategy({value: part, other: part}, [part])
        elif a is b:  # it can be but one part
            return
        elif part.dim == free:
            yield OpStrategy({value: part, other: ENTERED}, [part])
        else:
            yield OpStrategy({value: part, other: part.on(3 - part.dim)}, [SUM])


# ---------------------------------------------------------------------------------------------- norms and attention


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


def _layer_norm(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    x, shape = node.args[:2]
    if x in given and given[x].dim < x.ndim - len(shape):
        yield OpStrategy({x: given[x]}, [given[x]] * len(node.outs))


def _attention(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """query, key, value (B, heads, T, D), and maybe a bias that is broadcast: each head by itself."""
    first, out = node.args[:3], node.outs[0]
    part = next((given[value] for value in first if value in given and given[value].dim < 2), None)
    extra = [other for other in node.outs[1:] if other is not None and other.ndim < 2]
    if part is None or out is None or extra:
        return
    wants: dict[Value, Placement] = dict.fromkeys(first, part)
    for bias in node.reads[3:]:
        dim = part.dim - (4 - bias.ndim)
        wants[bias] = part.on(dim) if dim >= 0 and bias.shape[dim] == out.shape[part.dim] else ENTERED
    yield OpStrategy(wants, [part] * len(node.outs))


def _softmax(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    x, dim = node.args[:2]
    if x in given and given[x].dim != dim % x.ndim:
        yield OpStrategy({x: given[x]}, [given[x]])


# ---------------------------------------------------------------------------------------------- each channel by itself


def _over_pixels(dims: int) -> Rule:
    """Operations on the last `dims` dims."""

    def rule(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
        x = node.args[0]
        if len(node.reads) == 1 and x in given and given[x].dim < x.ndim - dims:
            yield OpStrategy({x: given[x]}, [given[x]] * len(node.outs))

    return rule


def _pad(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    yield from _over_pixels(len(node.args[1]) // 2)(node, given, cutter)


def _reduce(node: Node, given: Given, cutter: Cutter) -> Iterator[OpStrategy]:
    """Over dims of which none is cut."""
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
"""What is known of an operation, all but pointwise ones."""

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
"""The same, by how the operation's name begins."""


def flops_of(node: Node) -> float:
    """Multiplications and additions of a forward of a convolution or product; 0 for what is cheap."""
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
