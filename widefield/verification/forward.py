"""Compares one pass of a model on whole images with one on tiles: layers, outputs, gradients, buffers.

With tiles in space and in time, each rank streams its tile.
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
    """`verify` on the ranks and devices of `mesh`.  Every rank calls it with the same model, and gets the same verdict."""
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=torch.float64, device="cpu").to(mesh.device)
    plain, cut, streamed_copy = (copy.deepcopy(model).to(mesh.device).double().train(train) for _ in range(3))
    cut_image = partial(tile, mesh=mesh, cuts=cuts) if mesh.grid.sizes or not stream else None
    expected = _run(plain, image.clone().requires_grad_(train))
    try:
        run = streamed(cut, tiles=stream) if stream else cut
        with GatherWatch(cut) as watch:
            got = _run(run, image.clone().requires_grad_(train), cut_image, weights=expected.weights, records=not stream)
    except NotImplementedError as error:  # raised on every rank, before any message
        return Verdict(refusal=str(error))
    rows = [] if stream else rows_of("layer", got.layers, expected.layers)
    rows += rows_of("output", got.outputs, expected.outputs)
    rows += rows_of("gradient", _mean_over(mesh, got.gradients), expected.gradients)
    rows += rows_of("buffer", dict(cut.named_buffers()), dict(plain.named_buffers()))
    worst = _worst(mesh, rows)
    if stream and any(row.error > tolerance for row in worst):
        layers = _streamed_layers(streamed_copy, image, cut_image, stream)
        worst = _worst(mesh, rows_of("layer", layers, expected.layers)) + worst
    zeros = sum(gradient is not None and not bool(gradient.any()) for gradient in expected.gradients.values())
    streamed_whole = run._stream.fallbacks if isinstance(run, Streamed) else []
    return Verdict(worst, None, tolerance, zeros, [], [*streamed_whole, *watch.found])


def _worst(mesh: Mesh, rows: list[Row]) -> list[Row]:
    """For each row, the one with the largest error over ranks."""
    return [max(same, key=lambda row: row.error) for same in zip(*mesh.gather_objects(rows), strict=True)]


@dataclass
class _RecordedPass:
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
    records: bool = True,
) -> _RecordedPass:
    """Forward, and backward with fixed random gradients of the outputs.  records: also the outputs of each layer."""
    layers: dict[str, Tensor] = {}
    torch.manual_seed(1)
    with _recording(model, layers) if records else nullcontext(), torch.set_grad_enabled(model.training):
        output = model(image if cut is None else cut(image))
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    outputs = {str(n): whole(t).detach() for n, t in enumerate(tensors)}
    differentiable = [t for t in tensors if t.requires_grad]
    generator = torch.Generator("cpu").manual_seed(2)
    if weights is None:
        weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype, device="cpu").to(t.device) for t in differentiable]
    if differentiable:  # reversed: a GPU starts while others are handed over, and all ranks must start with the same
        gradients_of = [_like(weight, t) for weight, t in zip(weights, differentiable, strict=True)]
        torch.autograd.backward(differentiable[::-1], gradients_of[::-1])
    gradients: dict[str, Tensor | None] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return _RecordedPass(outputs, gradients | {"the image": image.grad}, layers, weights)


class _LayerOutputs(nn.Module):
    """A model that returns the outputs of all layers: a stream calls no modules, so hooks cannot record them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        layers: dict[str, Tensor] = {}
        with _recording(self.model, layers):
            self.model(image)
        return layers


def _streamed_layers(
    model: nn.Module, image: Tensor, cut: Callable[[Tensor], Tensor] | None, stream: Sequence[int]
) -> dict[str, Tensor]:
    """The outputs of the layers of a streamed model, from one more forward."""
    torch.manual_seed(1)
    with torch.no_grad():
        layers = streamed(_LayerOutputs(model), tiles=stream)(image if cut is None else cut(image))
    return {name: whole(tensor) for name, tensor in layers.items()}


@contextmanager
def _recording(model: nn.Module, layers: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the outputs of each layer of `model` are written into `layers`."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(_record, layers, name)).remove)
        yield


def _record(layers: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    for number, tensor in enumerate(t for t in tree_leaves(output) if isinstance(t, Tensor)):
        layers[f"{name or 'the model'} ({type(module).__name__}) {number}"] = whole(tensor.detach()).clone()


def _like(weight: Tensor, tensor: Tensor) -> Tensor:
    """`weight`, a whole tensor, in the layout of `tensor`."""
    return cut_by(weight, tensor.tile_layout) if type(tensor) is TiledTensor else weight


def _mean_over(mesh: Mesh, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The gradients of weights averaged over ranks, as DDP would; the image's is whole on every rank."""
    means: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            gradient = whole(gradient)
            if name != "the image":
                gradient = mesh.sum_(gradient.clone()) / mesh.size
        means[name] = gradient
    return means
