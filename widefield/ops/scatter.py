"""Gather, scatter and embedding: every pixel has its own index, so index tensors are cut like the image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.layout import Layout, layout_of, uncut
from widefield.ops.indexing import in_place, labels
from widefield.rules import Local, Meta, ShardedProduct, case, composed, rule
from widefield.tiled.redistribute import move_cuts

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- gather and scatter


def _layouts_along(dim: int, *tensors: Meta) -> list[Layout]:
    """A layout per tensor: `dim` is whole, dims of equal extents are cut the same; all whole if one tensor has no dims."""
    main = next(meta for meta in tensors if meta.is_cut)
    if len({meta.ndim for meta in tensors}) > 1:
        return [uncut(meta.shape, main.layout.grid) for meta in tensors]  # type: ignore[union-attr]
    agree = [d for d in range(main.ndim) if d != dim and len({meta.shape[d] for meta in tensors}) == 1]
    layout = move_cuts(main.layout, [d for d in range(main.ndim) if d not in agree])  # type: ignore[arg-type]
    return [layout_of(meta.shape, layout.cuts, layout.grid) for meta in tensors]


@rule(aten.gather.default)
def gather(x: Meta, dim: int, index: Meta, sparse_grad: bool = False) -> Local:
    dim %= max(1, x.ndim)
    layouts = _layouts_along(dim, x, index)
    out = index.shape, layouts[1].cuts
    return Local([x, index], lambda _: [out], lambda _, tile, places: aten.gather.default(tile, dim, places), layouts=layouts)


def _scatter(operation: Any) -> Any:
    """The rule of a scatter operation with the arguments (x, dim, index, source or value, ...)."""

    def scatter(x: Meta, dim: int, index: Meta, source: Any, *how: Any, **options: Any) -> Local:
        dim %= max(1, x.ndim)
        reads = [x, index, source] if isinstance(source, Meta) else [x, index]
        layouts = _layouts_along(dim, *reads)

        def run(_: Layout, tile: Tensor, places: Tensor, *given: Tensor) -> Tensor:
            return operation(tile, dim, places, *(given or (source,)), *how, **options)

        return Local(reads, lambda _: [(x.shape, layouts[0].cuts)], run, layouts=layouts)

    return scatter


for _operation, _written in {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
}.items():
    rule(_operation)(_scatter(_operation))
    composed(_written)(in_place(_operation))


# ---------------------------------------------------------------------------------------------- embedding


@rule(aten.embedding.default)
def embedding(
    weight: Meta, indices: Meta, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Local:
    if weight.is_cut:
        raise NotImplementedError("an embedding whose weight is cut into tiles has no rule; take widefield.whole(weight)")
    if scale_grad_by_freq or sparse:
        raise NotImplementedError(
            "an embedding of tiles counts no frequencies and has no sparse gradient; leave both options off"
        )

    def run(_: Layout, table: Tensor, places: Tensor) -> Tensor:
        return aten.embedding.default(table, places, padding_idx)

    out = (*indices.shape, weight.shape[1]), (*indices.cuts, None)
    return Local([indices, weight], lambda _: [out], run, layouts=[indices.layout, None])


@rule(aten.embedding_dense_backward.default, plain_outputs=(0,))
def embedding_dense_backward(
    grad: Meta, indices: Meta, count: int, padding_idx: int, scale_grad_by_freq: bool
) -> ShardedProduct:
    layout = indices.layout if indices.is_cut else layout_of(indices.shape, grad.cuts[:-1], grad.layout.grid)  # type: ignore
    of_grad = layout_of(grad.shape, (*layout.cuts, None), layout.grid)  # type: ignore[union-attr]
    out = layout_of((count, grad.shape[-1]), (None, None), layout.grid)  # type: ignore[union-attr]

    def run(tile: Tensor, places: Tensor) -> Tensor:
        return aten.embedding_dense_backward.default(tile, places, count, padding_idx, scale_grad_by_freq)

    return ShardedProduct([grad, indices], [of_grad, layout], run, out, layout.axes, is_partial_gradient=True)  # type: ignore


# ---------------------------------------------------------------------------------------------- cases

_IMAGE = (2, 3, 11, 7)

CASES = [
    case(
        "gather",
        lambda x: [x.gather(1, labels(x[:, :1], 3)) ** 2, x.gather(1, labels(x, 3)), x.gather(2, labels(x, 11)).sin()],
        _IMAGE,
    ),
    case("gather of few", lambda x, y: x.gather(1, labels(y, 3)) ** 2, _IMAGE, (1, 4, 11, 5)),
    case("gather with plain", lambda x, y: y.gather(1, labels(x, 4)) ** 2, _IMAGE, (2, 4, 11, 7)),
    case(
        "gather and scatter of numbers",
        lambda x, n: [
            x.gather(0, torch.tensor(3)),
            x[4].gather(0, labels(x, 1)),
            x.gather(0, labels(x[:0, None], 1)),
            x.scatter(0, torch.tensor(3), n[0]) * x,
            n[0].scatter(0, labels(x[:1], 1), x[:1]),
            x.scatter_add(0, torch.tensor(1), n[1]),
        ],
        (13,),
        (2,),
    ),
    case("take_along_dim", lambda x: torch.take_along_dim(x, x.detach().argsort(1), 1) ** 2, _IMAGE),
    case(
        "scatter",
        lambda x, y: [x.scatter(1, labels(x[:, :1], 3), y), x.scatter(1, labels(x[:, :1], 3), 2.0) ** 2],
        _IMAGE,
        (2, 1, 11, 7),
        tiled=(0, 1),
    ),
    case("scatter along a cut dim", lambda x, y: x.scatter_add(2, labels(y, 11), y) ** 2, _IMAGE, (2, 3, 4, 7), tiled=(0, 1)),
    case("scatter with reduce", lambda x: [x.detach().scatter(1, labels(x[:, :2], 3), 2.0, reduce="add")], _IMAGE),
    case(
        "scatter_reduce",
        lambda x, y: x.scatter_reduce(1, labels(y, 3), y, "sum", include_self=False) ** 2,
        _IMAGE,
        (2, 3, 11, 7),
        tiled=(0, 1),
    ),
    case(
        "scatter in place",
        lambda x, y: (z := x * 1, z.scatter_add_(1, labels(y, 3), y), z[:, 1:].scatter_(1, labels(y[:, :1], 2), 9.0), z * z)[
            -1
        ],
        _IMAGE,
        (2, 3, 11, 7),
        tiled=(0, 1),
    ),
    case("one hot", lambda x: F.one_hot(labels(x, 5), 5).double() * x[..., None], _IMAGE),
    case("embedding", lambda x, w: F.embedding(labels(x, 5), w) * x[..., None], _IMAGE, (5, 4)),
    case(
        "embedding with padding",
        lambda x, w: F.embedding(labels(x, 5), w, padding_idx=2) ** 2 * x[..., None],
        (2, 3, 13),
        (5, 4),
    ),
    case("embedding, then tokens", lambda x, w: F.embedding(labels(x, 5), w).movedim(-1, 1).sin(), (2, 9, 6), (5, 4)),
    case(
        "embedding of a cut table",
        lambda x, w: F.embedding(labels(x, 5), w),
        _IMAGE,
        (5, 4),
        tiled=(0, 1),
        refuses="weight is cut",
    ),
    case(
        "embedding by frequency",
        lambda x, w: F.embedding(labels(x, 5), w, scale_grad_by_freq=True),
        _IMAGE,
        (5, 4),
        refuses="frequencies",
    ),
    case(
        "embedding with a sparse gradient",
        lambda x, w: F.embedding(labels(x, 5), w, sparse=True),
        _IMAGE,
        (5, 4),
        refuses="no sparse gradient",
    ),
]
