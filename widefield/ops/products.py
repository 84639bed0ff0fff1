"""Matrix products: mm, bmm, mv, dot, and these plus a bias; linear, matmul and einsum arrive here as such.

A product is written as in einsum, `bnk,bkm->bnm`, and every axis of the grid is assigned to a letter.  An axis at a letter of
the output cuts the output; an axis at a summed letter gives every rank a part of the sum.  Where operands are cut along
different letters, the assignment is chosen that sends the fewest numbers.

In a backward a sum may stay a partial gradient, see `tiled/partial_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import meet, size_of
from widefield.geometry.interval import even_cut
from widefield.geometry.layout import Cut, Grid, Layout, layout_of
from widefield.rules import Meta, ShardedProduct, case, rule

aten = torch.ops.aten


def cheapest_layouts(letters: str, operands: Sequence[Meta]) -> tuple[list[Layout], Layout, tuple[int, ...]]:
    """The operands' layouts, the output's layout, and the axes along which ranks have parts of a sum; the cheapest choice.

    letters: as in einsum, "nk,km->nm".  An axis that cuts an operand is assigned to one of the letters that it cuts.
    """
    grid = next(meta.layout.grid for meta in operands if meta.layout is not None)
    terms, result = letters.split("->")[0].split(","), letters.split("->")[1]
    letters_of = [_letters_by_axis(term, meta) for term, meta in zip(terms, operands, strict=True)]
    axes = sorted({axis for found in letters_of for axis in found})
    choices = [sorted({found[axis] for found in letters_of if axis in found}) for axis in axes]
    plans = [_plan(terms, result, operands, dict(zip(axes, chosen, strict=True)), grid) for chosen in product(*choices)]
    best = min(plans, key=lambda plan: _cost(plan, operands))
    return best


def _letters_by_axis(term: str, meta: Meta) -> dict[int, str]:
    return {axis: term[dim] for dim, cut in enumerate(meta.cuts) if cut is not None for axis in cut.axes}


def _plan(terms: Sequence[str], result: str, operands: Sequence[Meta], letter_of: dict[int, str], grid: Grid):
    """The layouts that follow from an assignment of axes to letters, as `cheapest_layouts` returns them."""
    extents = {
        letter: n for term, meta in zip(terms, operands, strict=True) for letter, n in zip(term, meta.shape, strict=True)
    }
    cuts = {
        letter: _cut_of(letter, tuple(a for a in letter_of if letter_of[a] == letter), extents[letter], terms, operands, grid)
        for letter in set(letter_of.values())
    }
    layouts = [layout_of(meta.shape, tuple(map(cuts.get, term)), grid) for term, meta in zip(terms, operands, strict=True)]
    out = layout_of(tuple(extents[letter] for letter in result), tuple(map(cuts.get, result)), grid)
    return layouts, out, tuple(axis for axis, letter in letter_of.items() if letter not in result)


def _cut_of(letter: str, axes: tuple[int, ...], extent: int, terms: Sequence[str], operands: Sequence[Meta], grid: Grid) -> Cut:
    """The cut of a letter along `axes`: that of the largest operand that is cut so already, else an even one."""
    found = [
        (meta.cuts[term.index(letter)], torch.Size(meta.shape).numel())
        for term, meta in zip(terms, operands, strict=True)
        if letter in term
    ]
    same = [(cut, size) for cut, size in found if cut is not None and tuple(sorted(cut.axes)) == axes]
    if same:
        return max(same, key=lambda pair: pair[1])[0]
    return Cut(axes, even_cut(extent, grid.num_shards(axes)))


def _cost(plan, operands: Sequence[Meta]) -> int:
    """How many numbers all ranks together receive."""
    layouts, out, partial_axes = plan
    moved = sum(
        torch.Size(size_of(to)).numel() - torch.Size(size_of(meet(to, current))).numel()
        for meta, layout in zip(operands, layouts, strict=True)
        if meta.layout is not None
        for to, current in zip(layout.boxes, meta.layout.boxes, strict=True)
    )
    num_shards = out.grid.num_shards(partial_axes)
    summed = sum(torch.Size(size_of(box)).numel() for box in out.boxes) * 2 * (num_shards - 1) // num_shards
    return moved + summed


def _product(run: Callable, letters: str, a: Meta, b: Meta) -> ShardedProduct:
    layouts, out, partial_axes = cheapest_layouts(letters, [a, b])
    return ShardedProduct([a, b], layouts, run, out, partial_axes)


# ---------------------------------------------------------------------------------------------- products

rule(aten.dot.default)(partial(_product, aten.dot.default, "k,k->"))
rule(aten.vdot.default)(partial(_product, aten.vdot.default, "k,k->"))
rule(aten.mv.default)(partial(_product, aten.mv.default, "nk,k->n"))
rule(aten.mm.default)(partial(_product, aten.mm.default, "nk,km->nm"))
rule(aten.bmm.default)(partial(_product, aten.bmm.default, "bnk,bkm->bnm"))


# ---------------------------------------------------------------------------------------------- products plus a bias


def _added(run: Callable, letters: str, bias: Meta, a: Meta, b: Meta, *, beta=1, alpha=1) -> ShardedProduct:
    """beta * bias + alpha * product.  Where ranks have parts of a sum, one rank's part includes the bias."""
    is_cut = a.is_cut or b.is_cut
    layouts, out, partial_axes = cheapest_layouts(letters, [a, b]) if is_cut else _layouts_like_bias(letters, bias, a, b)
    missing = len(out.shape) - bias.ndim
    cuts = [cut if extent == out.shape[missing + dim] else None for dim, (extent, cut) in enumerate(_pairs(bias, out))]
    of_bias = layout_of(bias.shape, tuple(cuts), out.grid)
    if out.grid.place_on(partial_axes, out.grid.index) != 0:
        beta = 0
    call = partial(run, beta=beta, alpha=alpha) if (beta, alpha) != (1, 1) else run
    return ShardedProduct([bias, a, b], [of_bias, *layouts], call, out, partial_axes)


def _pairs(bias: Meta, out: Layout) -> list[tuple[int, Cut | None]]:
    return list(zip(bias.shape, out.cuts[len(out.shape) - bias.ndim :], strict=True))


def _layouts_like_bias(letters: str, bias: Meta, a: Meta, b: Meta) -> tuple[list[Layout], Layout, tuple[int, ...]]:
    """The layouts where only the bias is cut: the product is cut like it."""
    terms, result = letters.split("->")[0].split(","), letters.split("->")[1]
    assert bias.layout is not None, "a product without a tiled tensor is plain"
    extents = dict(zip("".join(terms), (*a.shape, *b.shape), strict=True))
    short = result[len(result) - bias.ndim :]
    cuts = {x: cut for x, cut, n in zip(short, bias.cuts, bias.shape, strict=True) if cut is not None and n == extents[x]}
    layouts = [layout_of(m.shape, tuple(map(cuts.get, term)), bias.layout.grid) for term, m in zip(terms, (a, b), strict=True)]
    return layouts, layout_of(tuple(map(extents.__getitem__, result)), tuple(map(cuts.get, result)), bias.layout.grid), ()


rule(aten.addmm.default)(partial(_added, aten.addmm.default, "nk,km->nm"))
rule(aten.addmv.default)(partial(_added, aten.addmv.default, "nk,k->n"))
rule(aten.baddbmm.default)(partial(_added, aten.baddbmm.default, "bnk,bkm->bnm"))
rule(aten.addbmm.default)(partial(_added, aten.addbmm.default, "bnk,bkm->nm"))


# ---------------------------------------------------------------------------------------------- cases


def _rows(x: Tensor) -> Tensor:
    """(pixels, channels) from an image (B, C, H, W)."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _gram(x: Tensor) -> Tensor:
    rows = x.flatten(2)
    return torch.bmm(rows, rows.transpose(1, 2)) / rows.shape[2]


CASES = [
    case("linear over channels", lambda x, w, b: F.linear(x.permute(0, 2, 3, 1), w, b), (2, 3, 13, 9), (4, 3), (4,)),
    case("linear without bias", lambda x, w: F.linear(x.permute(0, 2, 3, 1), w), (2, 3, 13, 9), (4, 3)),
    case("linear of one row per pixel", lambda x, w, b: F.linear(_rows(x), w, b), (2, 3, 9, 7), (5, 3), (5,)),
    case("linear over a cut dim", lambda x, w, b: F.linear(x, w, b), (2, 3, 9, 13), (4, 13), (4,)),
    case("flatten and linear", lambda x, w, b: F.linear(x.flatten(1), w, b), (2, 3, 9, 7), (5, 189), (5,)),
    case("flatten, linear, linear", lambda x, w, v: (x.flatten(1) @ w).relu() @ v, (2, 3, 9, 7), (189, 6), (6, 4)),
    case("linear of a mean", lambda x, w, b: F.linear(x.mean((2, 3)), w, b), (2, 3, 9, 7), (4, 3), (4,)),
    case("a square weight", lambda x, w: x @ w, (5, 5), (5, 5)),
    case("one pixel", lambda x, w, b: F.linear(x, w, b), (2, 3, 1), (4, 1), (4,)),
    case("mm, rows cut", torch.mm, (4, 9), (9, 5), tiled=(1,)),
    case("mm, columns cut", torch.mm, (4, 9), (9, 5), tiled=(0,)),
    case("mm, both cut", torch.mm, (4, 9), (9, 5), tiled=(0, 1)),
    case("mm, the other is transposed", lambda a, b: torch.mm(a, b.t()), (4, 9), (5, 9), tiled=(0, 1)),
    case("mm, rows cut both", lambda a, b: torch.mm(a.t(), b.t()), (9, 4), (5, 9), tiled=(0, 1)),
    case("bmm, tokens of both cut", lambda a, b: torch.bmm(a, b.transpose(1, 2)), (2, 4, 13), (2, 5, 13), tiled=(0, 1)),
    case("bmm, outer dims cut both", lambda a, b: torch.bmm(a.transpose(1, 2), b), (2, 4, 13), (2, 4, 9), tiled=(0, 1)),
    case("bmm, one plain", lambda a, b: torch.bmm(a.transpose(1, 2), b), (2, 4, 13), (2, 4, 3)),
    case("bmm, the first plain", lambda a, b: torch.bmm(a, b), (2, 5, 4), (2, 4, 13), tiled=(1,)),
    case("gram matrix", _gram, (2, 3, 9, 7)),
    case("matmul, 4 dims", lambda a, b: a @ b.transpose(2, 3), (2, 3, 9, 4), (2, 3, 11, 4), tiled=(0, 1)),
    case("matmul, shared second", lambda a, b: a @ b, (2, 3, 9, 7), (7, 4)),
    case("matmul, shared first", lambda a, b: b @ a, (2, 3, 9, 7), (4, 9)),
    case("matmul with a vector", lambda a, b: a @ b, (2, 3, 9, 7), (7,)),
    case("mv, rows cut", lambda a, b: torch.mv(a.t(), b), (4, 9), (4,)),
    case("mv, columns cut", torch.mv, (4, 9), (9,)),
    case("mv, the vector cut", torch.mv, (4, 9), (9,), tiled=(1,)),
    case("dot", torch.dot, (13,), (13,), tiled=(0, 1)),
    case("dot with a plain one", torch.dot, (13,), (13,)),
    case("outer", torch.outer, (13,), (5,)),
    case("einsum over channels", lambda x, w: torch.einsum("bchw,oc->bohw", x, w), (2, 3, 9, 7), (5, 3)),
    case("einsum over rows", lambda x, w: torch.einsum("bchw,hk->bckw", x, w), (2, 3, 9, 7), (9, 4)),
    case("einsum over pixels", lambda x, y: torch.einsum("bchw,bchw->bc", x, y), (2, 3, 9, 7), (2, 3, 9, 7), tiled=(0, 1)),
    case("einsum of every pair", lambda x, y: torch.einsum("bct,bcs->bts", x, y), (2, 3, 9), (2, 3, 7), tiled=(0, 1)),
    case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (5,), (9, 4), (4, 5), tiled=(1,)),
    case("addmm over a cut dim", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (5,), (4, 9), (9, 5), tiled=(1,)),
    case("addmm, all cut", lambda c, a, b: torch.addmm(c, a.t(), b), (9, 5), (4, 9), (4, 5), tiled=(0, 1, 2)),
    case("addmm, only the addend cut", torch.addmm, (9, 5), (9, 4), (4, 5), tiled=(0,)),
    case("addmm of one row", torch.addmm, (1, 5), (9, 4), (4, 5), tiled=(0, 2)),
    case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), (2, 9, 11), (2, 9, 4), (2, 4, 11), tiled=(0, 1, 2)),
    case("baddbmm, a broadcast addend", torch.baddbmm, (1, 1, 11), (2, 9, 4), (2, 4, 11), tiled=(2,)),
    case("addbmm", lambda c, a, b: torch.addbmm(c, a, b, beta=2.0), (4, 5), (3, 4, 9), (3, 9, 5), tiled=(1,)),
    case("addmv", lambda c, a, b: torch.addmv(c, a, b, alpha=0.5), (4,), (4, 9), (9,), tiled=(1,)),
    case(
        "addmv of integers by a fraction, over a cut dim",
        lambda c, a, b: torch.addmv(*((7 * x).long() for x in (c, a, b)), beta=1.5, alpha=2.5),
        (4,),
        (4, 9),
        (9,),
        tiled=(1,),
    ),
    case("chain", lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (9, 4), (4, 5), (5, 3), tiled=(0,)),
    case("tensordot", lambda a, b: torch.tensordot(a, b, 2), (3, 9, 7), (9, 7, 4)),
]
