"""Every rule's cases: what tiles give together equals the whole, values and gradients, in float64."""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings

import devices
import pytest
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU, SWEEP
from ranks import on_ranks

from widefield import ops
from widefield.comm.mesh import Mesh
from widefield.geometry.interval import even_cut
from widefield.geometry.layout import Cut, Layout, layout_of
from widefield.plans import Plan
from widefield.rules import RuleCase
from widefield.tiled import dispatch
from widefield.tiled.api import _Tile, whole
from widefield.tiled.executors import windowed
from widefield.tiled.partial_gradient import partial_of
from widefield.tiled.redistribute import move_cuts
from widefield.tiled.tensor import TiledTensor

FAMILIES = sorted(found.name for found in pkgutil.iter_modules(ops.__path__))
HOW = {
    "even": 0.25, "uneven": 10.0, "last tile empty": 0.25, "gradient cut elsewhere": 0.25, "cut elsewhere": 0.25,
    "plain, its gradient cut": 0.25, "plain, its gradient partial": 0.25,
}  # fmt: skip
"""How inputs are cut, and up to which share edges are computed apart from the tile; with 10 they always are.

What is plain and meets an image later, as a branch that sees no pixel does, has a gradient of the image's kind.
"""
NOT_REFUSED = "not refused"
GRIDS = [(2,), (3,), (2, 2), (4,)]
LONG = (
    "attention", "cross_entropy", "indexing", "joins", "layer_norm", "losses", "normalization", "pooling", "products",
    "random", "resize", "sampling", "slices",
)  # fmt: skip
"""Families that have the most to run: `make test` leaves them out, and has the others on (2,)."""
SHORT = {(3,): ("convolution", "patches", "reductions"), (2, 2): ("convolution", "reductions"), (4,): ()}
"""Of further tiles, the families that are cut into them before a change lands: those that read beyond a tile, write beyond it
or add up over all, with corners.  The others are sweeps; the ways of (4,) are those of (3,)."""
FEWER = {(3,): ("uneven", "last tile empty"), (4,): ("uneven", "last tile empty")}
"""Of more tiles along one dim, the ways that show what two do not: tiles between others, and halos from beyond the next."""


def cases_of(family: str) -> list[RuleCase]:
    return importlib.import_module(f"{ops.__name__}.{family}").CASES


def marks_of(family: str, grid: tuple[int, ...]) -> list[pytest.MarkDecorator]:
    if grid == (2,):
        return [LONG_ON_CPU] * (family in LONG)
    if family not in SHORT[grid]:
        return [pytest.mark.cpu, *SWEEP]
    return [pytest.mark.cpu, *[pytest.mark.long] * (grid == (2, 2))]


@on_gpu_too
@pytest.mark.parametrize(
    ("family", "grid"),
    [pytest.param(family, grid, marks=marks_of(family, grid)) for family in FAMILIES for grid in GRIDS],
    ids=str,
)
def test_tiles_together_equal_the_whole(family, grid):
    ranks = torch.Size(grid).numel()
    problems = on_ranks(ranks, _problems_of, family, plan=Plan(space=list(grid)), timeout_seconds=600)
    assert problems[0] == [] and all(found == problems[0] for found in problems), "\n".join(problems[0])


def _problems_of(mesh: Mesh, family: str) -> list[str]:
    """What is wrong with any case under any cut, a line each; cases after a failed one still run."""
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", "Using padding='same'", UserWarning)  # torch's advice on speed, of even kernels
    return [
        f"{family}: {case.name}, {how}: {problem}"
        for case in cases_of(family)
        for how, small in HOW.items()
        if how in FEWER.get(mesh.grid.sizes, HOW)
        if not (case.refuses and how not in ("even", "uneven"))  # what refuses a cut image may run where others are cut
        if (problem := _said(family, case, mesh, how, small)) is not None
    ]


def _said(family: str, case: RuleCase, mesh: Mesh, how: str, small: float) -> str | None:
    reason = next((why for (of, name), why in devices.NOT_ON_GPUS.items() if of == family and case.name.startswith(name)), None)
    if reason is not None and mesh.device.type == "cuda":
        return _problem_of_torch(case, mesh, reason)
    dispatch._CACHE.clear()
    windowed.SMALL_SHARE = small
    try:
        return _problem_of(case, mesh, how)
    except (NotImplementedError, AssertionError) as error:  # raised on every rank alike, before any message
        if how == "cut elsewhere" and isinstance(error, NotImplementedError):
            return None  # batch and channels are cut by moves inside a net alone; there a refusal will do
        return f"{type(error).__name__}: {error}"


def _problem_of(case: RuleCase, mesh: Mesh, how: str) -> str | None:
    torch.manual_seed(0)
    wholes = [torch.randn(shape).requires_grad_() for shape in case.shapes]
    given = [w.detach().clone().requires_grad_() for w in wholes]
    cut = () if how.startswith("plain") else case.tiled
    inputs = [_Tile.apply(x, _layout(x, mesh, how)) if n in cut else x for n, x in enumerate(given)]
    if case.refuses is not None:
        said = _problem_of_refusal(case, inputs, mesh)
        if said != NOT_REFUSED or mesh.device.type == "cpu":
            return said  # a GPU has kernels of its own: what it does not refuse must be right
    torch.manual_seed(1)
    expected = tensors_of(_ran(case, wholes, mesh))
    torch.manual_seed(1)
    got = tensors_of(_ran(case, inputs, mesh))
    pairs = enumerate(zip(got, expected, strict=True))
    problems = [_difference(whole(a).detach(), b.detach(), f"output {n}") for n, (a, b) in pairs]
    weights = [torch.randn_like(out) for out in expected if out.requires_grad]
    if weights:
        try:
            _pull(expected, weights)
        except RuntimeError as error:
            return f"torch cannot go back through the whole: {error}"
        _pull(got, [_like(w, g, mesh, how) for w, g in zip(weights, _with_grad(got), strict=True)])
        for n, (a, b) in enumerate(zip(given, wholes, strict=True)):
            assert a.grad is None or type(a.grad) is torch.Tensor
            grad = None if a.grad is None else _mean(a.grad, mesh, n in cut)
            problems.append(_difference(grad, b.grad, f"gradient {n}"))
    return next((problem for problem in problems if problem), None)


def _problem_of_torch(case: RuleCase, mesh: Mesh, reason: str) -> str | None:
    try:
        outputs = tensors_of(_ran(case, [torch.randn(shape).requires_grad_() for shape in case.shapes], mesh))
        _pull(outputs, [torch.ones_like(out) for out in _with_grad(outputs)])
    except (NotImplementedError, RuntimeError) as error:
        return None if reason in str(error) else f"torch has other words on a GPU: {error}"
    return "torch runs this on a GPU by now; take it out of NOT_ON_GPUS"


def _ran(case: RuleCase, inputs: list, mesh: Mesh):
    """What a case gives.  Its own tensors lie on the device; operations on tiles see nothing of that default."""
    with devices.tensors_lie_here():
        return case.run(*inputs)


def _problem_of_refusal(case: RuleCase, inputs: list, mesh: Mesh) -> str | None:
    assert case.refuses is not None
    try:
        _ran(case, inputs, mesh)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return None if re.search(case.refuses, str(error)) else f"refused with other words: {error}"
    return NOT_REFUSED


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in (value.values() if isinstance(value, dict) else value) for tensor in tensors_of(part)]


def _with_grad(tensors):
    return [tensor for tensor in tensors if tensor.requires_grad]


def _like(weight: torch.Tensor, output: torch.Tensor, mesh: Mesh, how: str) -> torch.Tensor:
    """The gradient of an output, cut as it is, or on other dims; of a plain one cut, or each rank's part of a mean."""
    if how == "plain, its gradient cut" and weight.ndim:
        return _Tile.apply(weight, _layout(weight, mesh, "uneven"))
    if how == "plain, its gradient partial":
        return partial_of(weight * (1.0 + mesh.grid.index - (mesh.grid.size - 1) / 2), mesh.grid)
    if type(output) is not TiledTensor:
        return weight
    cut_dims = [dim for dim, cut in enumerate(output.tile_layout.cuts) if cut is not None]
    return _Tile.apply(
        weight, move_cuts(output.tile_layout, cut_dims) if how == "gradient cut elsewhere" else output.tile_layout
    )


def _pull(outputs, weights) -> None:
    """Last to first: a GPU's backward begins while the others are handed to it, and ranks must begin with the same."""
    torch.autograd.backward(_with_grad(outputs)[::-1], weights[::-1])


def _mean(grad: torch.Tensor, mesh: Mesh, tiled: bool) -> torch.Tensor:
    """Plain weights' gradients are averaged as DDP does; a tiled image's gradient is whole on every rank."""
    return grad if tiled else mesh.sum_(grad.clone(memory_format=torch.contiguous_format)) / mesh.size


def _layout(x: torch.Tensor, mesh: Mesh, how: str) -> Layout:
    grid, cuts = mesh.grid, [None] * x.ndim
    first = min(2, x.ndim - 1)
    for axis, size in enumerate(grid.sizes):
        dim = first + axis if how != "cut elsewhere" else 1 - axis
        if dim < x.ndim:
            cuts[dim] = Cut((axis,), _bounds(x.shape[dim], size, how))
    return layout_of(tuple(x.shape), tuple(cuts), grid)


def _bounds(extent: int, parts: int, how: str) -> tuple[int, ...]:
    if how in ("even", "gradient cut elsewhere", "cut elsewhere") or extent < 2:
        return even_cut(extent, parts)
    if how == "uneven":
        inner = sorted(min(extent, round(extent * (part / parts) ** 1.4)) for part in range(1, parts))
        return (0, *inner, extent)
    return (*even_cut(extent, parts - 1), extent) if parts > 1 else (0, extent)


def _difference(got, expected, what: str) -> str | None:
    if got is None or expected is None:
        same = (got is None or not got.any()) and (expected is None or not expected.any())
        return None if same else f"{what} is {'missing' if got is None else 'there'} on tiles only"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{what} is {tuple(got.shape)} {got.dtype} and should be {tuple(expected.shape)} {expected.dtype}"
    if not got.is_floating_point():
        return None if torch.equal(got, expected) else f"{what} differs at {(got != expected).sum()} places"
    error = (got - expected).abs().max().item() if got.numel() else 0.0
    size = max(1.0, expected[expected.isfinite()].abs().max().item()) if expected.isfinite().any() else 1.0
    return f"{what} is off by {error:.2e} of {size:.2e}" if not error <= 1e-10 * size else None
