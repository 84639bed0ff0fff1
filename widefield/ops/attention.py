"""Scaled dot-product attention: every query attends to every key, and no rank ever has all keys.

Queries stay where they are.  Keys and values that are cut along their tokens pass around the ring of ranks, a tile per step;
the steps' results merge by their log-sum-exps (kernels/attention.py; Ring Attention, arXiv:2310.01889).  Keys that are uncut,
or cut along batch or heads, do not move.  Backward: the rank that has a tile of keys in a step computes its part of their
gradient, from the log-sum-exp over all keys, and sends it to their owner.

The math backend arrives here as products and a softmax, which have their own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.interval import Interval, even_cut
from widefield.geometry.layout import Cut, Layout, layout_of, uncut
from widefield.kernels.attention import Block, Cpu, Efficient, Flash, mask_lse, merged
from widefield.rules import Meta, Ring, case, rule
from widefield.tiled.redistribute import move_cuts

aten = torch.ops.aten
TOKENS, WIDTH = 2, 3


# ---------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class _Layouts:
    """The layouts of what an attention reads.

    ring_axes: the axes along which keys are cut like queries, and pass around.  query_axes: axes that cut queries alone.
    """

    query: Layout
    key: Layout
    value: Layout
    bias: Layout | None
    ring_axes: tuple[int, ...]
    query_axes: tuple[int, ...]

    @property
    def rows(self) -> Interval:
        """This rank's queries, as an interval of the tokens."""
        return self.query.box[TOKENS]


def layouts_for(query: Meta, key: Meta, value: Meta, bias: Meta | None, causal: bool) -> _Layouts:
    """Layouts by which queries keep their cuts of batch, heads and tokens, and keys, values and bias follow.

    NotImplementedError: shapes that have no rule.
    """
    _refuse_shapes(query, key, value, causal)
    base = _queries_layout(query, key, value, bias)
    batch, heads, rows, _ = base.cuts
    tokens = None if rows is None else _keys_cut(query, key, value, rows, causal)
    cuts = (batch, heads, tokens, None)
    of_bias = None if bias is None else _bias_layout(bias, (*base.shape[:3], key.shape[TOKENS]), (*base.cuts[:3], None), base)
    axes = () if rows is None else rows.axes
    return _Layouts(
        base,
        layout_of(key.shape, cuts, base.grid),
        layout_of(value.shape, cuts, base.grid),
        of_bias,
        axes if tokens is not None else (),
        axes if tokens is None else (),
    )


def _refuse_shapes(query: Meta, key: Meta, value: Meta, causal: bool) -> None:
    if query.ndim != 4 or key.shape[0] != query.shape[0] or value.shape[:3] != key.shape[:3]:
        raise NotImplementedError(
            f"attention of queries {query.shape} to keys {key.shape} and values {value.shape} has no rule on tiles; give all "
            "three the dims (batch, heads, tokens, width) with one batch size, and keys and values the same heads and tokens"
        )
    if causal and query.shape[TOKENS] != key.shape[TOKENS]:
        raise NotImplementedError(
            f"causal attention of {query.shape[TOKENS]} queries to {key.shape[TOKENS]} keys has no rule on tiles; it wants as "
            "many of both, or a mask in place of is_causal"
        )


def _queries_layout(query: Meta, key: Meta, value: Meta, bias: Meta | None) -> Layout:
    """The queries' own layout, or where they are uncut one like the keys'.  Heads that share keys stay whole."""
    whole = (WIDTH,) if key.shape[1] == query.shape[1] else (1, WIDTH)
    if query.is_cut:
        assert query.layout is not None
        return move_cuts(query.layout, whole)
    source = next((meta.layout for meta in (key, value) if meta.is_cut), None)
    if source is None:
        grid = next(m.layout.grid for m in (query, key, value, bias) if m is not None and m.layout is not None)
        return uncut(query.shape, grid)
    of_keys = move_cuts(source, whole)
    batch, heads, tokens, _ = of_keys.cuts
    rows = None if tokens is None else Cut(tokens.axes, even_cut(query.shape[TOKENS], source.grid.num_shards(tokens.axes)))
    return layout_of(query.shape, (batch, heads, rows, None), source.grid)


def _keys_cut(query: Meta, key: Meta, value: Meta, rows: Cut, causal: bool) -> Cut | None:
    """The cut of the keys' tokens: along the axes of the queries' tokens, if keys or values are cut along one of these."""
    if not any(set(rows.axes) & set(meta.layout.axes) for meta in (key, value) if meta.layout is not None):
        return None
    own = key.cuts[TOKENS]
    if own is not None and own.axes == rows.axes and not causal:
        return own
    if query.shape[TOKENS] == key.shape[TOKENS]:
        return rows
    return Cut(rows.axes, even_cut(key.shape[TOKENS], len(rows.bounds) - 1))


def _bias_layout(bias: Meta, shape: Sequence[int], cuts: Sequence[Cut | None], base: Layout) -> Layout:
    """The layout of a mask or bias that broadcasts against `shape`, which has `cuts`."""
    missing = len(shape) - bias.ndim
    pairs = zip(bias.shape, shape[missing:], cuts[missing:], strict=True)
    return layout_of(bias.shape, tuple(cut if extent == full else None for extent, full, cut in pairs), base.grid)


# ---------------------------------------------------------------------------------------------- forward


def _blocks(found: _Layouts, at: Interval, causal: bool) -> list[tuple[slice, bool]]:
    """The keys of the tile `at` that this rank's queries attend to: slices of the tile, and whether each is causal."""
    rows = found.rows
    if found.query.is_empty or not len(at):
        return []
    if not causal:
        return [(slice(0, len(at)), False)]
    before, same = at & Interval(0, rows.start), at & rows  # causal: keys before this rank's queries, and their own
    runs = [(before, False), (same, True)]
    return [(slice(run.start - at.start, run.stop - at.start), flag) for run, flag in runs if len(run)]


def _in_rows(*tensors: Tensor) -> list[Tensor]:
    """Each tensor with a token's numbers adjacent in memory, as kernels need; torch checked the whole's strides alone."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _bias_of(bias: Tensor | None, at: Interval, run: slice) -> Tensor | None:
    if bias is None or bias.shape[-1] == 1:
        return bias
    return bias[..., at.start + run.start : at.start + run.stop]


def _forward(
    kernel: Any, query: Meta, key: Meta, value: Meta, bias: Meta | None, dropout: float, causal: bool, scale, outs: Callable
):
    """The forward by `kernel`.  outs(output, log-sum-exp, seeds): the operation's outputs, in its own order."""
    _refuse_dropout(dropout)
    found = layouts_for(query, key, value, bias, causal)
    reads, layouts = _reads(found, query, key, value, bias)
    output = layout_of((*query.shape[:3], value.shape[WIDTH]), found.query.cuts, found.query.grid)
    rows = layout_of(query.shape[:3], found.query.cuts[:3], found.query.grid)

    def step(state: Block | None, tensors: Sequence[Tensor], rotated: Sequence[Tensor], at: Interval):
        q, (k, v) = tensors[query.number], rotated
        for run, flag in _blocks(found, at, causal):
            part = _bias_of(None if bias is None else tensors[bias.number], at, run)
            got = kernel.forward(*_in_rows(q, k[:, :, run], v[:, :, run]), part, flag, scale)
            state = merged(state, mask_lse(got, part))
        return state, ()

    def finish(state: Block | None, tensors: Sequence[Tensor], sums: Any) -> tuple:
        q = tensors[query.number]
        if state is None:
            wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
            state = (q.new_zeros(output.tile_shape), q.new_zeros(rows.tile_shape, dtype=wide))
        out, lse, *seeds = state
        lse = lse.masked_fill(lse == -torch.inf, 0.0) if bias is not None else lse
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        return outs(out.to(q.dtype), lse, seeds or [none, none])

    count = len(outs(None, None, [None, None]))
    return Ring(
        reads, layouts, (key.number, value.number), TOKENS, found.ring_axes, step, finish, _outputs(output, rows, count)
    )


def _outputs(output: Layout, rows: Layout, count: int) -> list[Layout | None]:
    return [output, rows, *[None] * (count - 2)]


def _reads(found: _Layouts, query: Meta, key: Meta, value: Meta, bias: Meta | None) -> tuple[list[Meta], list[Layout]]:
    reads, layouts = [query, key, value], [found.query, found.key, found.value]
    if bias is not None:
        assert found.bias is not None
        reads, layouts = [*reads, bias], [*layouts, found.bias]
    return reads, layouts


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError(
            f"fused attention with dropout {dropout} would draw other numbers on tiles than on one device; use no dropout in "
            "it, or torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose draws are exact"
        )


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def cpu(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None) -> Ring:
    return _forward(Cpu, query, key, value, attn_mask, dropout_p, is_causal, scale, lambda out, lse, seeds: (out, lse))


@rule(aten._scaled_dot_product_flash_attention.default)
def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> Ring:
    return _forward(Flash, query, key, value, None, dropout_p, is_causal, scale, _nine(query, key))


@rule(aten._scaled_dot_product_efficient_attention.default)
def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None) -> Ring:
    outs = lambda out, lse, seeds: (out, lse, *seeds)  # noqa: E731
    return _forward(Efficient, query, key, value, attn_bias, dropout_p, is_causal, scale, outs)


@rule(aten._scaled_dot_product_cudnn_attention.default)
def cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> Ring:
    """Runs the memory-efficient kernel: blocks can be merged by its log-sum-exp."""
    return _forward(Efficient, query, key, value, attn_bias, dropout_p, is_causal, scale, _nine(query, key))


def _nine(query: Meta, key: Meta) -> Callable:
    """The nine outputs of flash and cuDNN attention, without sequence lengths and debug mask."""
    longest = (query.shape[TOKENS], key.shape[TOKENS])
    return lambda out, lse, seeds: (out, lse, None, None, *longest, *seeds, None)


# ---------------------------------------------------------------------------------------------- backward


def _backward(kernel: Any, grad, query, key, value, bias, out, lse, seeds, dropout: float, causal: bool, scale, outs: int = 3):
    """The backward by `kernel`.  outs: the number of gradients; 4 includes the bias's."""
    _refuse_dropout(dropout)
    found = layouts_for(query, key, value, bias, causal)
    reads, layouts = _reads(found, query, key, value, bias)
    grid, cuts = found.query.grid, found.query.cuts
    reads += [grad, out, lse]
    layouts += [layout_of(grad.shape, cuts, grid), layout_of(out.shape, cuts, grid), layout_of(query.shape[:3], cuts[:3], grid)]
    all_bias = layout_of((*query.shape[:3], key.shape[TOKENS]), (*cuts[:3], None), grid)
    saved = [(bias.number if bias is not None else None), grad.number, out.number, lse.number]
    numbers = [seed.number if isinstance(seed, Meta) else None for seed in seeds]

    def step(state: list[Tensor] | None, tensors: Sequence[Tensor], rotated: Sequence[Tensor], at: Interval):
        q, (k, v) = tensors[query.number], rotated
        b, g, o, s = (None if number is None else tensors[number] for number in saved)
        if state is None:
            state = [torch.zeros_like(q), *([q.new_zeros(all_bias.tile_shape)] if outs == 4 else [])]
        parts = (torch.zeros_like(k), torch.zeros_like(v))
        of_seeds = [None if number is None else tensors[number] for number in numbers]
        for run, flag in _blocks(found, at, causal):
            block = _bias_of(b, at, run)
            read = *_in_rows(g, q, k[:, :, run], v[:, :, run], o), s
            got = kernel.backward(*read, block, flag, scale, of_seeds, outs == 4)
            state[0] += got[0]
            parts[0][:, :, run] += got[1]
            parts[1][:, :, run] += got[2]
            if outs == 4:
                state[1][..., at.start + run.start : at.start + run.stop] = got[3]
        return state, parts

    def finish(state: list[Tensor], tensors: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple:
        return state[0], *sums, *state[1:]

    layout = [found.query, found.key, found.value, all_bias][:outs]
    return Ring(
        reads, layouts, (key.number, value.number), TOKENS, found.ring_axes, step, finish, layout, sum_axes=found.query_axes
    )  # fmt: skip


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def cpu_backward(grad_out, query, key, value, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None) -> Ring:
    return _backward(Cpu, grad_out, query, key, value, attn_mask, out, lse, (), dropout_p, is_causal, scale)


@rule(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(
    grad_out, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
) -> Ring:
    return _backward(Flash, grad_out, query, key, value, None, out, lse, (seed, offset), dropout_p, is_causal, scale)


@rule(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(
    grad_out, query, key, value, attn_bias, out, lse, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
) -> Ring:
    outs = 4 if grad_input_mask[3] and attn_bias is not None else 3
    got = _backward(
        Efficient, grad_out, query, key, value, attn_bias, out, lse, (seed, offset), dropout_p, is_causal, scale, outs
    )
    return got if outs == 4 else _with_none(got)


def _with_none(d: Ring) -> Ring:
    """The rule with None as one more output, in place of the bias's gradient."""
    finish = lambda state, tensors, sums: (*d.finish(state, tensors, sums), None)  # noqa: E731
    return Ring(d.reads, d.layouts, d.rotating, d.dim, d.axes, d.step, finish, [*d.outs, None], d.sum_axes)


@rule(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(
    grad_out, query, key, value, out, lse, seed, offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    *, scale=None,
) -> Ring:  # fmt: skip
    return _backward(Efficient, grad_out, query, key, value, attn_bias, out, lse, (seed, offset), dropout_p, is_causal, scale)


# ---------------------------------------------------------------------------------------------- cases


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def _of_pixels(x: Tensor, w: Tensor) -> Tensor:
    """Self-attention among the pixels of an image, with 2 heads."""
    qkv = F.conv2d(x, w).flatten(2).unflatten(1, (3, 2, -1)).transpose(-1, -2)
    return F.scaled_dot_product_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2]).transpose(-1, -2).flatten(1, 2).view_as(x)


def _masked(q: Tensor, k: Tensor, v: Tensor, *, heads: int = 1) -> Tensor:
    """One key in three is masked; for query 2 the first half of the keys, too."""
    n, m = q.shape[2], k.shape[2]
    allowed = (torch.arange(n)[:, None] + torch.arange(m)) % 3 > 0
    allowed[2, : m // 2] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.expand(1, heads, n, m))


_Q, _K, _BIAS = (2, 3, 9, 4), (2, 3, 11, 4), (1, 3, 9, 11)

CASES = [
    case("self", _attend, _Q, _Q, _Q, tiled=(0, 1, 2)),
    case("other keys", _attend, _Q, _K, _K, tiled=(0, 1, 2)),
    case("values of another width, as products", _attend, _Q, _K, (2, 3, 11, 6), tiled=(0, 1, 2)),
    case("plain keys and values", _attend, _Q, _K, _K),
    case("plain keys", _attend, _Q, _K, _K, tiled=(0, 2)),
    case("plain queries and keys", _attend, _Q, _K, _K, tiled=(2,)),
    case("plain queries", _attend, _Q, _K, _K, tiled=(1, 2)),
    case("few plain queries", _attend, (2, 3, 1, 4), _K, _K, tiled=(1, 2)),
    case("a scale", lambda q, k, v: _attend(q, k, v, scale=0.3), _Q, _K, _K, tiled=(0, 1, 2)),
    case("causal", lambda q, k, v: _attend(q, k, v, is_causal=True), _Q, _Q, _Q, tiled=(0, 1, 2)),
    case("causal, plain keys", lambda q, k, v: _attend(q, k, v, is_causal=True), _Q, _Q, _Q),
    case("causal, other keys", lambda q, k, v: _attend(q, k, v, is_causal=True), _Q, _K, _K, tiled=(0, 1), refuses="as many"),
    case("a mask", _masked, _Q, _K, _K, tiled=(0, 1, 2)),
    case("a mask of each head", lambda q, k, v: _masked(q, k, v, heads=3), _Q, _K, _K, tiled=(0, 1, 2)),
    case("a mask, plain keys", _masked, _Q, _K, _K),
    case("a learned bias", lambda q, k, v, b: _attend(q, k, v, attn_mask=b), _Q, _K, _K, (3, 9, 11), tiled=(0, 1, 2)),
    case(
        "a cut mask", lambda q, k, v, b: _attend(q, k, v, attn_mask=b.detach()), _Q, _K, _K, (1, 3, 9, 11), tiled=(0, 1, 2, 3)
    ),
    case(
        "shared keys",
        lambda q, k, v: _attend(q, k, v, enable_gqa=True),
        (2, 4, 9, 4),
        (2, 2, 9, 4),
        (2, 2, 9, 4),
        tiled=(0, 1, 2),
    ),
    case("heads cut", lambda q, k, v: _attend(*(x.transpose(1, 2) for x in (q, k, v))), *((2, 9, 4, 5),) * 3, tiled=(0, 1, 2)),
    case("windows", lambda q, k, v: _attend(*(x.transpose(0, 2) for x in (q, k, v))), *((4, 3, 8, 5),) * 3, tiled=(0, 1, 2)),
    case("three dims", lambda q, k, v: _attend(q, k, v), (2, 9, 4), (2, 11, 4), (2, 11, 4), tiled=(0, 1, 2)),
    case("pixels", _of_pixels, (2, 4, 5, 6), (12, 4, 1, 1)),
    case("dropout", lambda q, k, v: _attend(q, k, v, dropout_p=0.3), _Q, _K, _K, tiled=(0, 1, 2)),
    case(
        "fused, dropout",
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.3),
        _Q,
        _K,
        _K,
        refuses="attention with dropout 0.3 would draw other numbers",
    ),
    case("one batch of keys for all", _attend, _Q, (1, 3, 11, 4), (1, 3, 11, 4)),
    case(
        "fused, one batch of keys for all",
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        _Q,
        (1, 3, 11, 4),
        (1, 3, 11, 4),
        refuses="with one batch size",
    ),
]
