"""Decompositions: operations that are recorded as others, so that each has a tile rule and random draws are separate nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from widefield.capture.ir import Graph, Node, Value
from widefield.private_torch.dispatcher import schema_of
from widefield.rules import COMPOSED, Local, Meta, Reduced
from widefield.tiled import sync_batch_norm as normalization  # noqa: F401  it registers an operation
from widefield.tiled.dispatch import load_rules
from widefield.tiled.redistribute import inverse, is_dense
from widefield.tiled.rng import with_gaps

aten = torch.ops.aten
load_rules()
from widefield.ops.normalization import batch_norm  # noqa: E402


@torch.library.custom_op("widefield::dropout_mask", mutates_args=())
def dropout_mask(image: Tensor, p: float, has_gaps: bool) -> Tensor:
    """The mask that `native_dropout` draws for an image of this shape and memory format; True where a number is kept.

    has_gaps: the image's memory has gaps or overlaps where the model runs on one device.
    """
    return aten.native_dropout.default(with_gaps(image) if has_gaps else image, p, True)[1]


@dropout_mask.register_fake
def _(image: Tensor, p: float, has_gaps: bool) -> Tensor:
    return torch.empty_like(image, dtype=torch.bool)


@torch.library.custom_op("widefield::rrelu_noise", mutates_args=())
def rrelu_noise(image: Tensor, lower: float, upper: float) -> Tensor:
    """The slopes that `rrelu` draws for an image, 1 where it is positive.  Row-major, as `rrelu`'s kernel assumes."""
    noise = torch.empty_like(image, memory_format=torch.contiguous_format)
    aten.rrelu_with_noise.default(image, noise, lower, upper, True)
    return noise


@rrelu_noise.register_fake
def _(image: Tensor, lower: float, upper: float) -> Tensor:
    return torch.empty_like(image, memory_format=torch.contiguous_format)


DRAWS = {torch.ops.widefield.dropout_mask.default, torch.ops.widefield.rrelu_noise.default}
"""Random operators of widefield; custom operators do not have torch's tag for them."""


def draws_numbers(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation draws random numbers.  Attention that drops nothing draws none, though torch's tag says it does."""
    if func in DRAWS:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    return argument_of(func, args, kwargs, "dropout_p") != 0.0


def argument_of(func: Any, args: tuple, kwargs: dict, name: str) -> Any:
    """What an operation is given for the argument of that name; its default where it is given none, None where it has none."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _dropout(image: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0 or image.numel() == 0:
        return aten.clone.default(image), aten.ones_like.default(image, dtype=torch.bool)
    mask = torch.ops.widefield.dropout_mask(image, p, not is_dense(image))
    kept = aten.mul.Tensor(image, mask)
    return aten.mul.Tensor(kept, 0.0 if p == 1 else 1 / (1 - p)), mask


def _rrelu(
    image: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    if not training:
        rows = image if image.is_contiguous() else aten.clone.default(image, memory_format=torch.contiguous_format)
        return aten.leaky_relu.default(rows, (lower + upper) / 2)  # row-major, as rrelu's kernel returns it
    if generator is not None:
        raise NotImplementedError("rrelu with a generator of its own cannot be streamed; leave the generator out")
    return aten.mul.Tensor(torch.ops.widefield.rrelu_noise(image, lower, upper), image)  # the result is row-major, as noise


def _rrelu_functional(image: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _rrelu(image, noise, *args, **kwargs), aten.clone.default(noise)


def _norm_in_evaluation(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return aten.native_batch_norm.default(x, weight, bias, mean, var, False, momentum, eps)


def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    extent = x.shape[dim]
    starts = range(0, extent, size) if extent else range(1)
    return [aten.slice.Tensor(x, dim, start, min(extent, start + size)) for start in starts]


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    if sum(sizes) != x.shape[dim]:
        return aten.split_with_sizes.default(x, sizes, dim)  # torch's own refusal
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [aten.slice.Tensor(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    extent = x.shape[dim]
    if not -extent <= index < extent:
        return aten.select.int(x, dim, index)  # torch's own refusal
    index %= extent
    return aten.squeeze.dim(aten.slice.Tensor(x, dim, index, index + 1), dim)


def _unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    if 0 in repeats:
        return aten.repeat.default(x, repeats)
    for _ in range(len(repeats) - x.ndim):
        x = aten.unsqueeze.default(x, 0)
    for dim, times in enumerate(repeats):
        x = aten.cat.default([x] * times, dim) if times > 1 else x
    return aten.clone.default(x) if all(times == 1 for times in repeats) else x


def _slice_scatter(
    x: Tensor, part: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    pixels = range(*slice(start, end, step).indices(x.shape[dim]))
    if step != 1 or not len(pixels):
        return aten.slice_scatter.default(x, part, dim, start, end, step)
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: (-strides[d], d))  # a write keeps the memory format
    is_moved = order != sorted(order) and is_dense(x)
    if is_moved:
        x, part, dim = aten.permute.default(x, order), aten.permute.default(part, order), order.index(dim % x.ndim)
    around = [(0, pixels.start), (pixels.stop, x.shape[dim])]
    before, after = ([aten.slice.Tensor(x, dim, a, b)] if a < b else [] for a, b in around)
    pieces = [*before, part, *after]
    row_major = torch.contiguous_format
    out = aten.cat.default(pieces, dim) if len(pieces) > 1 else aten.clone.default(part, memory_format=row_major)
    return aten.permute.default(out, inverse(order)) if is_moved else out


def _select_scatter(x: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    index %= x.shape[dim]
    return _slice_scatter(x, aten.unsqueeze.default(part, dim), dim, index, index + 1)


def _resize_as(x: Tensor, like: Tensor, *, memory_format: Any = None) -> Tensor:
    """torch's own has no derivative, which would be needed where `like` requires a gradient."""
    if x.shape != like.shape or memory_format is not None:
        return aten.resize_as.default(x, like, memory_format=memory_format)
    return aten.clone.default(x)


DECOMPOSITIONS: dict[Any, Callable] = {
    aten.native_dropout.default: _dropout,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_functional.default: _rrelu_functional,
    aten._native_batch_norm_legit_no_training.default: _norm_in_evaluation,
    aten.split.Tensor: _split,
    aten.unsafe_split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.repeat.default: _repeat,
    aten.resize_as.default: _resize_as,
    **{op: COMPOSED[op] for op in (aten.stack.default, aten.rot90.default, aten.roll.default)},
}
"""The decomposition of each operation that has one."""


# ---------------------------------------------------------------------------------------------- compositions


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., C) times (C, K).  torch computes it as a product of two matrices, whose rows join all pixels and have no boxes."""
    out = x @ weight
    return out if bias is None else out + bias


def _linear_rule(x: Meta, weight: Meta, bias: Meta | None = None) -> Local:
    if weight.is_cut or (bias is not None and bias.is_cut):
        raise NotImplementedError("a product with a matrix that is cut into tiles")
    return Local(
        [x],
        lambda layout: [((*x.shape[:-1], weight.shape[1]), (*layout.cuts[:-1], None))],
        lambda _, *tensors: linear(*tensors),
        whole=[x.ndim - 1],
    )


BATCH_NORM_OVER = torch.ops.widefield.batch_norm_over.default


def _norm_over(
    image: Meta, weight: Meta | None, bias: Meta | None, running_mean: Meta | None, running_var: Meta | None,
    momentum: float, eps: float, group_name: str, num_replicas: int, is_inactive: bool,
) -> Reduced:  # fmt: skip
    """The rule of torch's batch norm; the caller must reduce its sums over the group."""
    d = batch_norm(image, weight, bias, running_mean, running_var, True, momentum, eps, "s")
    assert d.finish is not None
    finish = d.finish

    def without_saved(total: Tensor, *tensors: Tensor) -> tuple:
        out, _, _, *new = finish(total, *tensors)
        return out, *(value for value in new if value is not None)

    return replace(d, outs=[d.outs[0], *[None] * (running_mean is not None) * 2], finish=without_saved)


OWN_RULES: dict[Any, Callable] = {linear: _linear_rule, BATCH_NORM_OVER: _norm_over}
"""Tile rules of operations that are recorded in place of torch's."""

_VIEWS = (aten.view.default, aten._unsafe_view.default)


def with_linears(graph: Graph) -> Graph:
    """Replace view, mm or addmm, and view back, of a tensor of more than 2 dims, by one `linear` node."""
    returned = set(graph.results)
    for node in graph.nodes:
        operands = _rows_and_weight(node)
        if operands is None or node.outs[0] in returned:
            continue
        rows, weight, bias = operands
        image, out = rows.maker.reads[0], node.outs[0]  # type: ignore[union-attr]
        assert out is not None
        node.op, node.args, node.kwargs = linear, (image, weight, *([] if bias is None else [bias])), {}
        seen = out.users[0].outs[0]
        for view in out.users:
            view.op, view.args = aten.alias.default, (seen,)  # the first view's result becomes that of `linear`
        out.users[0].outs, node.outs = [None], [seen]
    return graph


def _rows_and_weight(node: Node) -> tuple[Value, Value, Value | None] | None:
    if node.op is aten.mm.default:
        (rows, weight), bias = node.args, None
    elif node.op is aten.addmm.default and not node.kwargs and len(node.args) == 3:
        bias, rows, weight = node.args
    else:
        return None
    out, maker = node.outs[0], rows.maker
    if out is None or maker is None or maker.op not in _VIEWS or not out.users or (bias is not None and bias.ndim != 1):
        return None
    lead = maker.reads[0].shape[:-1]
    is_rows = maker.reads[0].ndim > 2 and maker.reads[0].shape[-1] == rows.shape[-1]
    shapes = [user.outs[0].shape if user.op in _VIEWS and user.outs[0] is not None else None for user in out.users]
    return (rows, weight, bias) if is_rows and all(shape == (*lead, weight.shape[1]) for shape in shapes) else None
