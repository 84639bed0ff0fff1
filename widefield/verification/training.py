"""Compares three optimizer steps of a model under a plan with three on one device.

For `widefield verify --plan`, and the tests of mixes of strategies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widefield import sharded_state
from widefield.comm.mesh import Mesh, World
from widefield.fallback import Fallback
from widefield.geometry.interval import even_cut, parts_of
from widefield.geometry.layout import Grid
from widefield.parallel.parallelize import choices, fallbacks, parallelize, share_states
from widefield.parallel.passes import backward_of, without_sync
from widefield.plans import Plan, check
from widefield.plans.replicas import check_steps_together
from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.tiled.api import tile, whole
from widefield.verification.verdict import TOLERANCE, Row, Verdict, rows_of

STEPS = 3


@dataclass
class TrainingResult:
    """Full tensors on rank 0: loss and gradients of each step, final weights, buffers and outputs.

    reasons, fallbacks: see parallelize.choices and parallelize.fallbacks.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


def compare_training(
    model: nn.Module,
    shape: Sequence[int],
    mesh: Mesh,
    *,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype = torch.float64,
    low: torch.dtype | None = None,
    lr: float = 0.1,
) -> Verdict:
    """Train `model` in `dtype` under the plan of `mesh` and on one device of its kind, and compare.  Every rank calls it.

    shape: of the whole batch, divided among the copies of the model.  low: a dtype for autocast.
    The loss is the mean squared difference from random targets, the optimizer SGD with momentum and weight decay.  Compared
    are losses and gradients of each step, and final weights, buffers and outputs in evaluation.
    A ValueError or NotImplementedError of the plan becomes the verdict's refusal.
    """
    model = copy.deepcopy(model).to(mesh.device)
    batches = _batches(model, tuple(shape), steps, dtype, mesh.device)
    autocast = partial(torch.autocast, mesh.device.type, dtype=low) if low is not None else nullcontext
    try:
        check(mesh.plan, ranks=mesh.size, samples_per_step=shape[0])
        check_steps_together(mesh.plan, "one device is what plans are compared with")
        got = learn(copy.deepcopy(model).to(dtype), batches, mesh, autocast=autocast, lr=lr)
    except (ValueError, NotImplementedError) as error:  # raised on every rank, before any message
        return Verdict(refusal=str(error))
    expected = learn(copy.deepcopy(model).to(dtype), batches, _one_device(mesh), autocast=autocast, lr=lr)
    rows: list[Row] = []
    if mesh.is_main:
        for kind in ("losses", "gradients", "weights", "buffers", "outputs"):
            rows += rows_of(kind.removesuffix("es" if kind == "losses" else "s"), getattr(got, kind), getattr(expected, kind))
    rows = mesh.gather_objects(rows)[0]
    zeros = sum(gradient is not None and not bool(gradient.any()) for gradient in expected.gradients.values())
    return Verdict(rows, None, tolerance, zeros, got.reasons, got.fallbacks)


Batches = list[tuple[Tensor, Any]]


def _one_device(mesh: Mesh) -> Mesh:
    """A mesh of this rank only, on its device."""
    return Mesh(Plan(), World(), mesh.device, grid=Grid(()))


def _batches(model: nn.Module, shape: tuple[int, ...], steps: int, dtype: torch.dtype, device: torch.device) -> Batches:
    """Images and random targets, the same on every rank and device."""
    generator = torch.Generator("cpu").manual_seed(7)

    def draw(size: Sequence[int]) -> Tensor:
        return torch.randn(tuple(size), generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)

    with torch.no_grad():
        outputs = copy.deepcopy(model).to(dtype).eval()(torch.zeros(shape, dtype=dtype, device=device))
    return [(draw(shape), tree_map(lambda output: draw(output.shape), outputs)) for _ in range(steps)]


def learn(
    model: nn.Module, batches: Batches, mesh: Mesh, *, autocast: Callable[[], Any] = nullcontext, lr: float = 0.1
) -> TrainingResult:
    """One step on each batch, of which this copy runs its part in `plan.accumulate` passes; full tensors on rank 0."""
    torch.manual_seed(3)
    model.train()
    image, _ = batches[0]
    mine = _bounds(len(image), mesh.copies, mesh.copy)
    sample = torch.empty_like(image[mine], device="meta")[: -(-(mine.stop - mine.start) // mesh.plan.accumulate)]
    with autocast():
        parallelize(model, mesh, trial_step=partial(_trial_step, model, batches[0], mine, mesh), sample=sample)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
    optimizer = share_states(optimizer, mesh)
    result = TrainingResult(reasons=choices(model), fallbacks=fallbacks(model))
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        optimizer.zero_grad()
        total = _pass_by_pass(model, batch, mine, mesh, autocast)
        result.losses[f"step {number}"] = mesh.sum_(total) * mesh.copies / mesh.size
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in sharded_state.gather_full_on_main(model, mesh, gradients).items():
            result.gradients[f"step {number}: {name}"] = gradient
        optimizer.step()
    with autocast():
        _evaluate(model, batches, mesh, result)
    return result


def _trial_step(model: nn.Module, batch: tuple[Tensor, Any], mine: slice, mesh: Mesh) -> Tensor:
    """A trial pass on one of this copy's images, twice."""
    image, target = tree_map(lambda tensor: torch.cat([tensor[mine][:1]] * 2), batch)
    return _loss_of(model(_tiled(image, mesh)), target)


def _pass_by_pass(model: nn.Module, batch: tuple[Tensor, Any], mine: slice, mesh: Mesh, autocast: Callable[[], Any]) -> Tensor:
    """Forward and backward of this copy's part of the batch; returns the sum of its losses."""
    passes, count, losses = mesh.plan.accumulate, len(batch[0]), []
    for place in range(passes):
        rows = _bounds(mine.stop - mine.start, passes, place, start=mine.start)
        image, target = tree_map(lambda tensor, rows=rows: tensor[rows], batch)
        with torch.enable_grad() if place == passes - 1 else without_sync(model):
            loss = backward_of(
                model,
                _tiled(image, mesh),
                target,
                loss_of=_loss_of,
                scaled=lambda loss: loss * (mesh.copies / count),
                autocast=autocast,
            )
        losses.append(loss)
    return torch.stack(losses).sum().double()


def _evaluate(model: nn.Module, batches: Batches, mesh: Mesh, result: TrainingResult) -> None:
    """Record outputs in evaluation mode, weights and buffers in `result`."""
    model.eval()
    with torch.no_grad():
        outputs = model(_tiled(batches[0][0], mesh))
    result.outputs = {str(n): whole(t) for n, t in enumerate(tree_leaves(outputs)) if isinstance(t, Tensor)}
    parameters = dict(model.named_parameters())
    for name, tensor in sharded_state.gather_full_on_main(
        model, mesh, {n: t.detach() for n, t in model.state_dict().items()}
    ).items():
        (result.weights if name in parameters else result.buffers)[name] = tensor


def _bounds(count: int, parts: int, place: int, start: int = 0) -> slice:
    part = parts_of(even_cut(count, parts))[place]
    return slice(start + part.start, start + part.stop)


def _tiled(image: Tensor, mesh: Mesh) -> Tensor:
    return tile(image, mesh) if mesh.grid.sizes else image


def _loss_of(output: Any, target: Any) -> Tensor:
    """The sum over samples of mean squared differences."""
    pairs = zip(tree_leaves(output), tree_leaves(target), strict=True)
    each = [(got - wanted).square().sum() / math.prod(got.shape[1:]) for got, wanted in pairs if got.is_floating_point()]
    return torch.stack(each).sum()
