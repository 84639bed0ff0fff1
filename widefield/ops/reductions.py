"""Sums, means, variances, norms and products over any dims.

Over uncut dims every tile is reduced by itself.  Over cut dims each rank sends its tile's part, in one small message, and all
merge the same parts.  The result is the same on every rank along those cuts, and keeps its other cuts.

Variances merge as (mean, sum of squared differences from it, count), without cancellation (Chan, Golub & LeVeque 1983).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.layout import Cuts, Layout
from widefield.rules import Description, Local, Meta, Reduced, Tile, case, composed, rule

aten = torch.ops.aten
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""The dtypes in which tiles' parts are computed and sent, so that merging them rounds no more than one device does."""


def dims_of(image: Meta, dim: int | Sequence[int] | None) -> list[int]:
    """The dims that a `dim` argument means, ascending; None and an empty list mean all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(image.ndim))
    return sorted(d % image.ndim for d in ([dim] if isinstance(dim, int) else dim))


def shrunk(layout: Layout, dims: Sequence[int], keepdim: bool) -> tuple[tuple[int, ...], Cuts]:
    """Shape and cuts of the result of reducing `dims`."""
    pairs = [(1, None) if d in dims else (layout.shape[d], layout.cuts[d]) for d in range(len(layout.shape))]
    left = [pair for d, pair in enumerate(pairs) if keepdim or d not in dims]
    return tuple(extent for extent, _ in left), tuple(cut for _, cut in left)


def reduced(
    image: Meta,
    dims: Sequence[int],
    keepdim: bool,
    local: Callable[[Tensor], Tensor],
    *,
    plain: Callable[[Tensor], Tensor | tuple],
    merge: Callable[[Tensor], Tensor] | None = None,
    finish: Callable | None = None,
    outs: int = 1,
    by_parts: bool = True,
) -> Description:
    """The rule of a reduction: `plain` on every tile where `dims` are uncut; else `local`, `merge` and `finish`."""
    layout = image.layout
    assert layout is not None
    if all(layout.cuts[d] is None for d in dims):
        return Local([image], lambda layout: [shrunk(layout, dims, keepdim)] * outs, lambda _, tile: plain(tile))
    tile = Tile(*shrunk(layout, dims, keepdim))
    return Reduced([image], dims, local, [tile] * outs, merge, finish, by_parts=by_parts)


def ranks_along(layout: Layout, dims: Sequence[int]) -> list[int]:
    """The ranks whose tiles differ from this one's along `dims` alone, in the order in which parts are gathered."""
    axes = {axis for d in dims for axis in (layout.cuts[d].axes if layout.cuts[d] else ())}
    grid = layout.grid
    others = [axis for axis in range(len(grid.sizes)) if axis not in axes]
    mine = grid.coordinate(grid.index)
    return [rank for rank in range(grid.size) if all(grid.coordinate(rank)[axis] == mine[axis] for axis in others)]


# ---------------------------------------------------------------------------------------------- sums and means


def _sum(image: Meta, dim=None, keepdim=False, *, dtype=None, op=aten.sum.dim_IntList, is_mean=False) -> Description:
    dims = dims_of(image, dim)
    out = dtype or (image.dtype if image.dtype.is_floating_point or image.dtype.is_complex else torch.int64)
    count = math.prod(image.shape[d] for d in dims)
    plain_op = aten.mean.dim if is_mean else op

    def finish(total: Tensor, *_) -> Tensor:
        return (total / count if is_mean else total).to(out)

    same = out not in WIDE and not is_mean
    return reduced(
        image,
        dims,
        keepdim,
        partial(op, dim=dims, keepdim=keepdim, dtype=WIDE.get(out, out)),
        plain=partial(plain_op, dim=dims, keepdim=keepdim, dtype=dtype),
        finish=None if same else finish,
    )


rule(aten.sum.dim_IntList)(_sum)
rule(aten.sum.default)(lambda image, dtype=None: _sum(image, dtype=dtype))
rule(aten.mean.dim)(partial(_sum, is_mean=True))
rule(aten.mean.default)(lambda image, dtype=None: _sum(image, dtype=dtype, is_mean=True))
rule(aten.nansum.default)(partial(_sum, op=aten.nansum.default))


@rule(aten.count_nonzero.dim_IntList, aten.count_nonzero.default)
def count_nonzero(image: Meta, dim=None) -> Description:
    dims = dims_of(image, dim)
    local = partial(aten.count_nonzero.dim_IntList, dim=dims)
    return reduced(image, dims, False, local, plain=local)


def _any(image: Meta, dim=None, keepdim=False, *, is_all=False) -> Description:
    if isinstance(dim, (list, tuple)) and not dim:
        raise NotImplementedError("any or all over an empty list of dims has no rule on tiles; give dims, or None for all")
    dims = dims_of(image, dim)
    out = torch.uint8 if image.dtype is torch.uint8 else torch.bool

    def count(tile: Tensor) -> Tensor:
        return torch.sum((tile == 0) if is_all else (tile != 0), dims, keepdim, dtype=torch.int64)

    def finish(total: Tensor, *_) -> Tensor:
        return ((total == 0) if is_all else (total > 0)).to(out)

    return reduced(image, dims, keepdim, count, plain=lambda tile: finish(count(tile)), finish=finish)


rule(aten.any.default, aten.any.dim, aten.any.dims)(_any)
rule(aten.all.default, aten.all.dim, aten.all.dims)(partial(_any, is_all=True))


# ---------------------------------------------------------------------------------------------- variances


def _variance(image: Meta, dim=None, *, correction=None, keepdim=False, root=False, mean=False) -> Description:
    dims = dims_of(image, dim)
    correction = 1 if correction is None else correction
    counts = _counts(image, dims)
    count = math.prod(image.shape[d] for d in dims)
    outs = 2 if mean else 1

    def plain(tile: Tensor) -> Tensor | tuple:
        if count and not tile.numel():  # an empty tile, where torch would warn of too few values
            means = tile.sum(dims, keepdim)
            variances = means.to(image.dtype.to_real())
            return (variances, means) if mean else variances
        op = [aten.var, aten.std, aten.var_mean, aten.std_mean][root + 2 * mean].correction
        return op(tile, dims, correction=correction, keepdim=keepdim)

    def finish(total: Tensor, *_) -> Tensor | tuple:
        means, squares = total
        if image.dtype.is_complex:  # parts of real and imaginary values, stacked
            means, squares = torch.complex(*means), squares.sum(0)
        variance = squares / max(0, count - correction)
        variance = (_root(variance) if root else variance).to(image.dtype.to_real())
        return (variance, means.to(image.dtype)) if mean else variance

    def local(tile: Tensor) -> Tensor:
        if image.dtype.is_complex:
            parts = torch.view_as_real(tile).movedim(-1, 0)
            return _mean_and_squares(parts, dims=[d + 1 for d in dims], keepdim=keepdim)
        return _mean_and_squares(tile, dims=dims, keepdim=keepdim)

    return reduced(image, dims, keepdim, local, plain=plain, merge=partial(merge_moments, counts), finish=finish, outs=outs)


for number, overload in enumerate((aten.var, aten.std, aten.var_mean, aten.std_mean)):
    rule(overload.correction)(partial(_variance, root=bool(number % 2), mean=number > 1))


def _root(variance: Tensor) -> Tensor:
    """The square root of a variance, with a gradient of 0 where that is 0, as torch has it."""
    if not variance.requires_grad:
        return variance.sqrt()
    still = variance == 0
    return variance.masked_fill(still, 1.0).sqrt().masked_fill(still, 0.0)


def _counts(image: Meta, dims: Sequence[int]) -> list[int]:
    """For each tile along `dims`, how many of its pixels one number of the result is over."""
    assert image.layout is not None
    boxes = image.layout.boxes
    return [math.prod(len(boxes[rank][d]) for d in dims) for rank in ranks_along(image.layout, dims)]


def _mean_and_squares(tile: Tensor, *, dims: Sequence[int], keepdim: bool) -> Tensor:
    """(2, ...): the mean, and the sum of squared differences from it.  In float64, for merging subtracts means."""
    count = math.prod(tile.shape[d] for d in dims)
    if not tile.numel():
        empty = tile.sum(dims, keepdim, dtype=torch.float64)
        return torch.stack([empty, empty])
    tile = tile.to(WIDE.get(tile.dtype, tile.dtype))
    variance, mean = torch.var_mean(tile, dims, correction=0, keepdim=True)
    exact = mean.double()
    if tile.dtype is not torch.float64:  # float32 rounds a mean of 100 to 4e-6, too coarse for differences of means
        exact += (tile - mean).mean(dims, keepdim=True)
    parts = torch.stack([exact, variance.double() * count])
    return parts if keepdim else parts.squeeze([dim + 1 for dim in dims])


def merge_moments(counts: Sequence[int], parts: Tensor) -> Tensor:
    """(2, ...): mean and squares of the whole, from (tiles, 2, ...), those of tiles that have `counts` pixels."""
    count = parts.new_tensor(counts).view(-1, *[1] * (parts.ndim - 2))
    means, squares = parts[:, 0], parts[:, 1]
    mean = (means * count).sum(0) / sum(counts)
    return torch.stack([mean, (squares + count * (means - mean) ** 2).sum(0)])


# ---------------------------------------------------------------------------------------------- norms, products, logsumexp


def _norm(image: Meta, ord=2, dim=None, keepdim=False, *, dtype=None) -> Description:
    dims = dims_of(image, dim)
    wide, nothing = dtype or image.dtype, math.inf if ord < 0 else 0.0
    out = wide.to_real()

    def local(tile: Tensor) -> Tensor:
        tile = tile.to(WIDE.get(wide, wide))
        if 0 in tile.shape:
            return tile.sum(dims, keepdim).abs() + nothing
        return torch.linalg.vector_norm(tile, ord, dims, keepdim)

    def merge(parts: Tensor) -> Tensor:  # the norm of the tiles' norms; norm 0 is a count
        return parts.sum(0) if ord == 0 else torch.linalg.vector_norm(parts, ord, 0)

    plain = partial(aten.linalg_vector_norm.default, ord=ord, dim=dims, keepdim=keepdim, dtype=dtype)
    by_parts = not math.isinf(ord)  # equal extremes share the gradient; a part does not say how many it has
    finish = lambda total, *_: total.abs().to(out)  # noqa: E731
    return reduced(image, dims, keepdim, local, plain=plain, merge=merge, finish=finish, by_parts=by_parts)


rule(aten.linalg_vector_norm.default)(_norm)


@rule(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype)
def norm(image: Meta, p=2, dim=None, keepdim=False, *, dtype=None) -> Description:
    return _norm(image, 2 if p is None else p, dim, keepdim, dtype=dtype)


@rule(aten.prod.dim_int)
def product(image: Meta, dim=None, keepdim=False, *, dtype=None) -> Description:
    dims = dims_of(image, dim)
    out = dtype or (image.dtype if image.dtype.is_floating_point or image.dtype.is_complex else torch.int64)

    def local(tile: Tensor) -> Tensor:
        tile = tile.to(WIDE.get(out, out))
        for d in reversed(dims):
            tile = tile.prod(d, keepdim=keepdim)
        return tile

    return reduced(
        image, dims, keepdim, local, plain=lambda tile: local(tile).to(out), merge=partial(torch.prod, dim=0),
        finish=lambda total, *_: total.to(out),
    )  # fmt: skip


rule(aten.prod.default)(lambda image, dtype=None: product(image, dtype=dtype))


@rule(aten.logsumexp.default)
def logsumexp(image: Meta, dim, keepdim=False) -> Description:
    dims = dims_of(image, dim)
    out = image.dtype if image.dtype.is_floating_point or image.dtype.is_complex else torch.get_default_dtype()

    def local(tile: Tensor) -> Tensor:
        part = exponentials(tile.to(WIDE.get(out, out)), dims)
        return part if keepdim else part.squeeze([d + 1 for d in dims])

    def finish(total: Tensor, *_) -> Tensor:
        top = _real(total[0].detach())
        return torch.where(top == math.inf, total[0], total[1].log() + _finite(top)).to(out)

    plain = partial(torch.logsumexp, dim=dims, keepdim=keepdim)
    return reduced(image, dims, keepdim, local, plain=plain, merge=merge_exponentials, finish=finish)


def exponentials(tile: Tensor, dims: Sequence[int]) -> Tensor:
    """(2, ...), with `dims` of extent 1: the maximum, and the sum of exp(value - maximum).

    The maximum has no gradient: results of these two do not depend on what is subtracted.
    """
    pixels = _real(tile.detach())
    has_pixels = all(tile.shape[d] for d in dims)
    top = pixels.amax(dims, keepdim=True) if has_pixels else pixels.sum(dims, keepdim=True) - math.inf
    return torch.stack([top.to(tile.dtype), (tile - _finite(top)).exp_().sum(dims, keepdim=True)])


def merge_exponentials(parts: Tensor) -> Tensor:
    """(2, ...) of the whole, from the (tiles, 2, ...) of `exponentials`; Milakov & Gimelshein 2018, arXiv:1805.02867."""
    tops, sums = _real(parts[:, 0].detach()), parts[:, 1]
    top = tops.amax(0)
    return torch.stack([top.to(parts.dtype), (sums * (tops - _finite(top)).exp()).sum(0)])


def _real(values: Tensor) -> Tensor:
    """The real part of complex values, by which they are compared; others as they are."""
    return values.real if values.is_complex() else values


def _finite(top: Tensor) -> Tensor:
    """The maximum, and 0 in place of -inf, which cannot be subtracted."""
    return top.masked_fill(top == -math.inf, 0.0)


# ---------------------------------------------------------------------------------------------- comparisons


@composed(aten.equal.default)
def equal(a: Tensor, b: Tensor) -> bool:
    """torch.equal; the same answer on every rank."""
    return a.shape == b.shape and bool((a == b).all())


@composed(aten.allclose.default)
def allclose(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """torch.allclose; the same answer on every rank."""
    return bool(torch.isclose(a, b, rtol, atol, equal_nan).all())


_X = (2, 3, 11, 7)
CASES = [
    case("sum", lambda x: x.sum(), _X),
    case("sum over rows", lambda x: x.sum(2), _X),
    case("sum over columns, kept", lambda x: x.sum(-1, keepdim=True), _X),
    case("sum over channels", lambda x: x.sum(1), _X),
    case("sum over batch and rows, kept", lambda x: x.sum((0, 2), keepdim=True), _X),
    case("sum of all dims, kept", lambda x: x.sum((0, 1, 2, 3), keepdim=True), _X),
    case("sum, 3-D", lambda x: x.sum((2, 4)), (2, 3, 9, 7, 5)),
    case("sum, 1-D", lambda x: x.sum(2), (2, 3, 11)),
    case(
        "sum in another dtype",
        lambda x: (x.round().sum((2, 3), dtype=torch.float32), x.round().sum(dtype=torch.float32)),
        (2, 3, 4, 4),
    ),
    case("sum of truths", lambda x: ((x > 0).sum((2, 3)), (x > 0).sum(), (x > 0).sum(1)), _X),
    case("sum in half precision", lambda x: (x * 0 + 1).half().sum((2, 3)).double(), (1, 2, 60, 50)),
    case("mean", lambda x: x.mean(), _X),
    case("mean over pixels", lambda x: x.mean((2, 3)), _X),
    case("mean over pixels, kept, in use", lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), _X),
    case("mean over rows", lambda x: x.mean(2), _X),
    case("mean over channels and columns", lambda x: x.mean((1, 3)), _X),
    case("mean in float32", lambda x: (x.round().mean((1, 2), dtype=torch.float32), (x * 0 + 1).mean()), (2, 4, 8, 4)),
    case("nansum", lambda x: x.masked_fill(x > 1, torch.nan).nansum((2, 3)), _X),
    case("nanmean", lambda x: x.masked_fill(x > 1, torch.nan).nanmean(2), _X),
    case("count_nonzero", lambda x: (x.relu().count_nonzero((2, 3)), x.relu().count_nonzero(), x.relu().count_nonzero(1)), _X),
    case("any", lambda x: [(x > b).any() for b in (0, 2, 9)] + [(x > 2).any(2), (x > 2).any(1, keepdim=True)], _X),
    case("any over dims", lambda x: ((x > 2).any((2, 3)), torch.any(x > 2, (1, 3))), _X),
    case("all", lambda x: [(x > b).all() for b in (0, -2, -9)] + [(x > -2).all(2), (x > -2).all((2, 3))], _X),
    case("any over no dims", lambda x: torch.any(x > 0, ()), _X, refuses="(?i)empty list of dims"),
    case("var", lambda x: x.var(), _X),
    case("var over pixels, biased", lambda x: x.var((2, 3), correction=0), _X),
    case("var over channels", lambda x: x.var(1, keepdim=True), _X),
    case("var over rows, correction 2", lambda x: x.var(2, correction=2), _X),
    case("var of large means", lambda x: (100 + 0.01 * x).var((2, 3)) * 1e4, _X),
    case("std", lambda x: (x.std(), x.std((1, 2), keepdim=True)), _X),
    case("var_mean", lambda x: torch.var_mean(x, (2, 3), correction=0), _X),
    case("std_mean", lambda x: torch.std_mean(x, 3, keepdim=True), _X),
    case("std_mean of all", lambda x: torch.std_mean(x), (2, 3, 5, 6, 3)),
    case("norm", lambda x: x.norm(), _X),
    case("norms over pixels", lambda x: [x.norm(p, dim=(2, 3)) for p in (0.5, 1, 2, 3, math.inf, -math.inf, -2)], _X),
    case("norm 0", lambda x: torch.linalg.vector_norm(x.relu(), 0, dim=(2, 3)).detach(), _X),
    case("norm over channels", lambda x: F.normalize(x, dim=1), _X),
    case("norm over rows", lambda x: F.normalize(x, p=3.0, dim=2), _X),
    case("Frobenius norm", lambda x: torch.norm(x, p="fro", dim=(2, 3), keepdim=True), _X),
    case("pairwise distance", lambda x, y: F.pairwise_distance(x, y), _X, _X, tiled=(0, 1)),
    case("product over rows", lambda x: x.prod(2), _X),
    case("product", lambda x: x.prod(), (2, 3, 5, 3)),
    case("product over channels", lambda x: x.prod(1, keepdim=True), _X),
    case("logsumexp over pixels", lambda x: x.logsumexp((2, 3)), _X),
    case("logsumexp over channels", lambda x: x.logsumexp(1, keepdim=True), _X),
    case("logsumexp of great numbers", lambda x: (1e3 * x).logsumexp(2), _X),
    case("equality", lambda x: torch.tensor([torch.equal(x, x * 1), torch.equal(x, -x), torch.allclose(x, x + 1e-9)]), _X),
    case("of a matrix", lambda x: (x.sum(0), x.mean(1), x.var(1), x.norm(dim=1, keepdim=True), x.logsumexp(0)), (6, 11)),
    case("of a line", lambda x: (x.sum(), x.mean(0, keepdim=True), x.var(), x.norm(3)), (11,)),
    case("with a cut batch", lambda x: [x.transpose(0, 2).mean(dims) for dims in (0, (2, 3), (0, 3))], _X),
]
