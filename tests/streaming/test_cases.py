"""Every rule's cases tile after tile: a stream gives the whole run's outputs and gradients in float64, or refuses in words."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import devices
import pytest
import torch
from case_module import CaseModule
from devices import on_gpu_too
from marks import LONG_ON_CPU, SWEEP
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from widefield import ops
from widefield.capture.ir import Value
from widefield.geometry.layout import Layout
from widefield.rules import RuleCase
from widefield.streaming.api import stream
from widefield.streaming.tile_planner import TracedOp

FAMILIES = sorted(found.name for found in pkgutil.iter_modules(ops.__path__))
TILES = [(2, 2), (3, 5), (3,)]
"""How many along the last dims: (3,) cuts vectors and matrices, too."""
SHORT = ("attention", "convolution", "ordering", "products", "views")
"""The families that `make test` cuts into (3,)."""

TOLERANCE = 1e-10
"""Relative to the largest value: float64 summed in another order, as of rules on tiles in space."""

ASKS = r"cannot be streamed: aten\.\w+\.default in it asks for values of a tensor"
SHOWN = r"writes to \[.*\] px that aten\.{}\.default shows, and a stream cannot tell"
INSIDE = r"a backward \(.*\) runs inside of the forward"
REFUSED = {
    "cross_entropy: cross entropy, label smoothing and class weights, second gradients": INSIDE,
    "group_norm: group, gradient penalty": INSIDE,
    "indexing: index by a mask of channels": ASKS,
    "indexing: index by a plain mask": ASKS,
    "indexing: index by a plain mask of pixels": ASKS,
    "indexing: picked by a mask": ASKS,
    "indexing: masked_select": ASKS,
    "indexing: nonzero": ASKS,
    "indexing: argwhere": ASKS,
    "indexing: where one is": ASKS,
    "indexing: counts": ASKS,
    "layer_norm: whole image, gradient penalty": INSIDE,
    "losses: Gauss": ASKS,  # it asks whether a variance is below 0
    "normalization: batch, gradient penalty": INSIDE,
    "normalization: cuDNN's": "aten.cudnn_batch_norm.default writes to running statistics unseen",  # which a stream takes here
    "patches: written to windows": SHOWN.format("unfold"),
    "patches: written to windows of windows": SHOWN.format("unfold"),
    "patches: windows and their tensor written in turn": SHOWN.format("detach"),
    "patches: written to windows that overlap": SHOWN.format("unfold"),
    "random: a generator of one's own": r"its forward seeds a generator \(torch.Generator.manual_seed\(\)\)",
    "reductions: equality": ASKS,
    "slices: second gradients": INSIDE,
    "slices: split where a tensor says": "cannot be streamed: an operation in it asks for values of a tensor",
    "slices: a row and its tensor written in turn": SHOWN.format("detach"),
    "slices: written to a detached row": SHOWN.format("detach"),
    "slices: written to unbound rows": SHOWN.format("detach"),
}
"""The cases that a stream refuses though the whole run gives something, and in which words."""

UNDEFINED = {
    "attention: fused, one batch of keys for all",  # torch's kernel writes beyond its memory, and the process ends
}
"""What is not asked of a stream, as the whole run itself gives nothing to compare with."""

NOT_ON_GPUS = {
    *(f"{family}: {name}" for family, name in devices.NOT_ON_GPUS),
    "normalization: legit in evaluation",  # gives statistics that nobody reads, of another size on each kind of device
}
"""Beginnings of the names of cases that torch cannot run whole on a GPU, or of which it gives something else there."""

if torch.__version__ < "2.14":  # so with 2.11, and mended by 2.14
    REFUSED["ordering: quantile along a cut dim"] = ASKS  # torch compares its numbers first, on a CPU
    UNDEFINED.add("slices: a row that is not there")  # followed, it raises where the case can no longer catch it

REFUSED_ON_CPUS = {"ordering: quantile along a cut dim"}
"""Those of REFUSED that a GPU's kernels do not need to refuse."""

ON_THE_WHOLE = {
    "_scaled_dot_product_flash_attention_for_cpu", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
    "bmm", "baddbmm", "addbmm", "mm", "addmm", "mv", "linalg_vector_norm",
    "index", "index_select", "index_add", "index_fill", "index_copy", "index_put", "embedding", "masked_scatter",
    "fractional_max_pool2d", "upsample_bilinear2d", "upsample_bicubic2d",
    "amax", "amin", "aminmax", "max", "min", "median", "nanmedian", "histc", "any", "_safe_softmax",
    "view", "_unsafe_view", "transpose", "squeeze", "as_strided", "unfold", "im2col", "diagonal", "diagonal_scatter",
    "slice_scatter", "native_layer_norm", "nll_loss2d_forward",
}  # fmt: skip
"""All operations that in some case run once, on the whole of an image whose rows and columns are cut: any other that did
would hold images in memory without a word."""


ON_THE_WHOLE_IN = {
    "convolution: weight and bias are images": {"convolution"},
    "convolution: weight is an image": {"convolution"},
    "convolution: grouped weight is an image": {"convolution"},
    "convolution: transposed, weight is an image": {"convolution"},
    "cross_entropy: cross entropy, label smoothing and class weights, classes and batch cut": {"gather", "nll_loss_forward"},
    "pooling: avg of integers": {"avg_pool2d"},
    "resize: twice the size, another step": {"upsample_nearest2d"},
    "padding: replicate, all of a dim cut away": {"replication_pad2d"},
}
"""The cases in which operations run on the whole that elsewhere do not."""


@dataclass
class Ran:
    """What a case gave, tensors by name, or what it raised.

    on_the_whole: operations that a stream ran on whole images; told: those that it says it did.
    """

    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    error: Exception | None = None
    on_the_whole: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)


def cases_of(family: str) -> list[RuleCase]:
    cases = importlib.import_module(f"{ops.__name__}.{family}").CASES
    return [case for case in cases if f"{family}: {case.name}" not in UNDEFINED]


def plain_and_streamed(case: RuleCase, tiles: tuple[int, ...]) -> tuple[Ran, Ran]:
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in case.shapes]
    plain = CaseModule(case, wholes)
    streamed = stream(copy.deepcopy(plain), tiles=tiles)
    return _ran(plain, wholes), _ran(streamed, wholes)


def _ran(module: nn.Module, wholes: list[Tensor]) -> Ran:
    images = {n: whole.clone().requires_grad_() for n, whole in enumerate(wholes) if n in module.case.tiled}
    torch.manual_seed(1)
    try:
        with devices.tensors_lie_here():  # a case's own
            found = module(*images.values())
        outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        _pull([out for out in outputs if out.requires_grad])
    except Exception as error:
        return Ran(error=error)
    found = {f"output {n}": out.detach() for n, out in enumerate(outputs)}
    found |= {f"the gradient of input {n}": image.grad for n, image in images.items()}
    found |= {f"the gradient of weight {name}": weight.grad for name, weight in module.plain.items()}
    told = (
        {one.operation for one in module._stream.fallbacks if one.kind == "run whole"} if hasattr(module, "_stream") else set()
    )
    return Ran(found, on_the_whole=_on_the_whole(module), told=told)


def _on_the_whole(module: nn.Module) -> set[str]:
    programs = [program for program, *_ in module._stream.known.values()] if hasattr(module, "_stream") else []
    units = [(unit, program.layouts) for program in programs for stage in program.stages for unit in stage.once]
    return {unit.node.name for unit, layouts in units if not unit.node.draws and _reads_pixels(unit, layouts)}


def _reads_pixels(unit: TracedOp, layouts: Mapping[Value, Layout]) -> bool:
    """Whether it wants the whole of a value that has more than one pixel where it is cut."""
    wide = [unit.reads[number] for number in unit.wide if unit.reads[number].bytes]
    cuts = [zip(value.shape, layouts[value].cuts, strict=True) for value in wide]
    return any(extent > 1 for each in cuts for extent, cut in each if cut is not None)


def _pull(outputs: list[Tensor]) -> None:
    draw = torch.Generator().manual_seed(2)
    if outputs:
        torch.autograd.backward(outputs, [torch.randn(out.shape, generator=draw) for out in outputs])


def problems_of(case: RuleCase, name: str, tiles: tuple[int, ...]) -> Iterator[str]:
    """What is wrong, a text each.  name: under which the tables have it."""
    plain, streamed = plain_and_streamed(case, tiles)
    refused = None if devices.here().type == "cuda" and name in REFUSED_ON_CPUS else REFUSED.get(name)
    whole = ON_THE_WHOLE | ON_THE_WHOLE_IN.get(name, set())
    if refused is not None:
        yield from _not_refused(plain, streamed, refused)
    elif plain.error is not None or streamed.error is not None:
        yield from _unlike_errors(plain.error, streamed.error)
    elif plain.tensors.keys() != streamed.tensors.keys():
        yield f"gives {list(streamed.tensors)} and should give {list(plain.tensors)}"
    else:
        for what, expected in plain.tensors.items():
            yield from (f"{what} {problem}" for problem in _differences(streamed.tensors[what], expected))
        on_cpu = devices.here().type == "cpu"  # torch takes others apart for a GPU
        unknown = streamed.on_the_whole - whole if len(tiles) == 2 and on_cpu else set()
        yield from (f"{name} runs on the whole image" for name in sorted(unknown))
        yield from (
            f"{name} runs on the whole image and nothing says so" for name in sorted(streamed.on_the_whole - streamed.told)
        )


def _not_refused(plain: Ran, streamed: Ran, pattern: str) -> Iterator[str]:
    if plain.error is not None:
        yield f"the whole run raises, too, so there is nothing to refuse: {plain.error!r}"
    if not isinstance(streamed.error, NotImplementedError) or not re.search(pattern, str(streamed.error)):
        yield f"should be refused in the words {pattern!r} and gave {streamed.error!r}"


def _unlike_errors(expected: Exception | None, got: Exception | None) -> Iterator[str]:
    """What torch refuses of the whole a stream refuses, too: in torch's words of tensors without pixels, or in a rule's."""
    if expected is None:
        yield f"raises {got!r}"
    elif got is None or (not isinstance(got, (RuntimeError, ValueError)) and _is_ours(got)):
        yield f"gave {got!r} where the whole run raises {expected!r}"


def _is_ours(error: Exception) -> bool:
    """Whether it is raised in this package, and not in torch, which asserts where it could say."""
    return str(Path(ops.__file__).parents[1]) in traceback.extract_tb(error.__traceback__)[-1].filename


def _differences(got: Tensor | None, expected: Tensor | None) -> Iterator[str]:
    if got is None or expected is None:
        there = expected if got is None else got
        if there is not None and there.any():
            yield f"is {'missing' if got is None else 'there'} in the stream alone"
    elif got.shape != expected.shape or got.dtype != expected.dtype or got.layout != expected.layout:
        yield f"is {tuple(got.shape)} {got.dtype} and should be {tuple(expected.shape)} {expected.dtype}"
    elif not got.is_floating_point():
        if not torch.equal(got, expected):
            yield f"differs at {(got != expected).sum()} places"
    else:
        yield from _far_apart(got.to_dense(), expected.to_dense())


def _far_apart(got: Tensor, expected: Tensor) -> Iterator[str]:
    finite = expected.isfinite()
    size = max(1.0, expected[finite].abs().max().item()) if finite.any() else 1.0
    same = torch.isclose(got, expected, rtol=0, atol=TOLERANCE * size, equal_nan=True)
    if not same.all():
        error = (got - expected)[~same].abs().max().item()
        yield f"is off by {error:.2e} of {size:.2e} at {(~same).sum()} of {same.numel()} places"


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same'", UserWarning)  # torch's advice on speed, of even kernels
        yield
    torch.set_default_dtype(torch.float32)


def marks_of(family: str, tiles: tuple[int, ...]) -> list[pytest.MarkDecorator]:
    if tiles == TILES[0]:
        return [LONG_ON_CPU] * (family == "resize")
    if family == "resize":
        return [pytest.mark.cpu, *SWEEP]
    return [pytest.mark.cpu, *[pytest.mark.long] * (tiles == TILES[1] or family not in SHORT)]


@on_gpu_too
@pytest.mark.parametrize(
    ("family", "tiles"),
    [pytest.param(family, tiles, marks=marks_of(family, tiles)) for family in FAMILIES for tiles in TILES],
    ids=str,
)
@pytest.mark.usefixtures("in_float64")
def test_tile_after_tile_equals_the_whole(family, tiles):
    problems = []
    for case in cases_of(family):
        name = f"{family}: {case.name}"
        if devices.here().type == "cuda" and name.startswith(tuple(NOT_ON_GPUS)):
            continue
        problems += [f"{name}: {problem}" for problem in problems_of(case, name, tiles)]
    assert problems == [], "\n".join(problems)


def test_the_tables_name_cases_that_there_are():
    names = {f"{family}: {c.name}" for family in FAMILIES for c in importlib.import_module(f"{ops.__name__}.{family}").CASES}
    assert set(REFUSED) | UNDEFINED | set(ON_THE_WHOLE_IN) <= names
    assert set(REFUSED).isdisjoint(UNDEFINED)
