"""Does a model give one device's numbers when its images are cut?  Run it whole and on tiles, and compare everything.

Tests run `compare` on ranks they have.  Tiles in time need no ranks, so it runs here; with both, each rank streams its tile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widefield.comm.mesh import Mesh
from widefield.private_torch.pytree import tree_leaves
from widefield.streaming.api import Streamed
from widefield.streaming.api import stream as streamed
from widefield.tiled.api import cut_by, tile, whole
from widefield.tiled.gather_watch import GatherWatch
from widefield.tiled.tensor import TiledTensor
from widefield.verification.verdict import TOLERANCE, Row, Verdict, rows_of


def compare(
    model: nn.Module,
    shape: tuple[int, ...],
    mesh: Mesh,
    *,
    stream: Sequence[int] = (),
    cuts: Sequence[Sequence[int] | None] | None = None,
    train: bool = True,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """`verify` on the ranks of `mesh` and their devices; every rank calls it with the same model, and gets the same verdict."""
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=torch.float64, device="cpu").to(mesh.device)
    alone, cut, spare = (copy.deepcopy(model).to(mesh.device).double().train(train) for _ in range(3))
    lay = partial(tile, mesh=mesh, cuts=cuts) if mesh.grid.sizes or not stream else None
    expected = _run(alone, image.clone().requires_grad_(train))
    try:
        run = streamed(cut, tiles=stream) if stream else cut
        with GatherWatch(cut) as watch:
            got = _run(run, image.clone().requires_grad_(train), lay, weights=expected.weights, notes=not stream)
    except NotImplementedError as error:  # raised on every rank alike, before any message
        return Verdict(refusal=str(error))
    rows = [] if stream else rows_of("layer", got.layers, expected.layers)
    rows += rows_of("output", got.outputs, expected.outputs)
    rows += rows_of("gradient", _mean_over(mesh, got.gradients), expected.gradients)
    rows += rows_of("buffer", dict(cut.named_buffers()), dict(alone.named_buffers()))
    worst = _worst(mesh, rows)
    if stream and any(row.error > tolerance for row in worst):
        worst = _worst(mesh, rows_of("layer", _told(spare, image, lay, stream), expected.layers)) + worst
    zeros = sum(gradient is not None and not bool(gradient.any()) for gradient in expected.gradients.values())
    streamed_whole = run._stream.fallbacks if isinstance(run, Streamed) else []
    return Verdict(worst, None, tolerance, zeros, [], [*streamed_whole, *watch.found])


def _worst(mesh: Mesh, rows: list[Row]) -> list[Row]:
    """Of each row that with the largest error over all ranks."""
    return [max(same, key=lambda row: row.error) for same in zip(*mesh.gather_objects(rows), strict=True)]


@dataclass
class _Ran:
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    layers: dict[str, Tensor]
    weights: list[Tensor]


def _run(
    model: nn.Module,
    image: Tensor,
    cut: Callable[[Tensor], Tensor] | None = None,
    weights: list[Tensor] | None = None,
    *,
    notes: bool = True,
) -> _Ran:
    """Forward, and backward of the outputs weighted by fixed random numbers.  notes: what each layer gives, too."""
    layers: dict[str, Tensor] = {}
    torch.manual_seed(1)
    with _noting(model, layers) if notes else nullcontext(), torch.set_grad_enabled(model.training):
        output = model(image if cut is None else cut(image))
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    outputs = {str(n): whole(t).detach() for n, t in enumerate(tensors)}
    pulled = [t for t in tensors if t.requires_grad]
    generator = torch.Generator("cpu").manual_seed(2)
    if weights is None:
        weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu").to(t.device) for t in pulled]
    if pulled:  # last to first: a GPU's backward begins while the others are handed to it, and ranks must begin with the same
        torch.autograd.backward(pulled[::-1], [_like(w, t) for w, t in zip(weights, pulled, strict=True)][::-1])
    gradients: dict[str, Tensor | None] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return _Ran(outputs, gradients | {"the image": image.grad}, layers, weights)


class _Telling(nn.Module):
    """What every layer of a model gives, by name: of a stream, which runs no layer as such, it can be had only as outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        layers: dict[str, Tensor] = {}
        with _noting(self.model, layers):
            self.model(image)
        return layers


def _told(model: nn.Module, image: Tensor, cut: Callable[[Tensor], Tensor] | None, stream: Sequence[int]) -> dict[str, Tensor]:
    """What the layers of a streamed model give, from a forward that is run to learn it."""
    torch.manual_seed(1)
    with torch.no_grad():
        layers = streamed(_Telling(model), tiles=stream)(image if cut is None else cut(image))
    return {name: whole(tensor) for name, tensor in layers.items()}


@contextmanager
def _noting(model: nn.Module, layers: dict[str, Tensor]) -> Iterator[None]:
    """Inside, what each layer of `model` gives is written into `layers`."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(_note, layers, name)).remove)
        yield


def _note(layers: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    for number, tensor in enumerate(t for t in tree_leaves(output) if isinstance(t, Tensor)):
        layers[f"{name or 'the model'} ({type(module).__name__}) {number}"] = whole(tensor.detach()).clone()


def _like(weight: Tensor, tensor: Tensor) -> Tensor:
    """A gradient laid out as the tensor it is for."""
    return cut_by(weight, tensor.tile_layout) if type(tensor) is TiledTensor else weight


def _mean_over(mesh: Mesh, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Weights' gradients as DDP would leave them; the image's is whole on every rank."""
    means: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            gradient = whole(gradient)
            if name != "the image":
                gradient = mesh.sum_(gradient.clone()) / mesh.size
        means[name] = gradient
    return means
