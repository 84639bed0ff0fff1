"""Is every gradient one device's, whatever a backward is?  Ways to use a model that differ from one forward and one backward.

Each program runs on one device for each copy's samples in turn, and on ranks for this copy's alone; gradients of each step and
the weights after three are compared.  Ranks start once per plan for all programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from marks import few
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import widefield as wf
from widefield.geometry.interval import even_cut, parts_of
from widefield.parallel.parallelize import share_states, without_sync
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)  # float64, sums of 1e3 products in another order
SHAPE = (5, 2, 13, 9)
STEPS = 3


class Net(nn.Module):
    """Convolutions, two heads, a layer that nobody calls, and options."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(2, 4, 3, 2, 1), nn.Sequential(nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), nn.SiLU())
        self.first, self.second, self.never = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.positions = nn.Parameter(torch.randn(1, 4, 7, 5))
        self.table = nn.Parameter(torch.randn(5, 5))

    def features(self, x: Tensor) -> Tensor:
        return self.body(self.stem(x)) * self.scale

    def forward(self, x: Tensor, heads: str = "both") -> Any:
        x = self.features(x)
        if heads == "both":
            return self.first(x), self.second(x)
        return (self.first if heads == "first" else self.second)(x)


class Normed(nn.Module):
    """Statistics that are frozen in evaluation mode, and dropout that does nothing there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Tied(nn.Module):
    """One weight in two places, and a list of layers that are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return x


Body = Callable[[nn.Module, Tensor, int, float, int], None]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Body]] = {}
ON_THE_WHOLE = {
    "a penalty on gradients of weights", "gradients of weights, used at once", "weights that depend on the image",
}  # fmt: skip
"""Programs in which samples meet, so that one device runs them on all samples together."""
ON_TILES_ALONE = {"a hook that is not linear", "a hook that is not linear, of a weight in two places"}
"""Programs that see the gradient of this copy's samples, where there are several copies."""
NEEDS_WHOLE_WEIGHTS = ON_THE_WHOLE | ON_TILES_ALONE | {
    "called by parts", "a checkpoint that runs backward inside", "a gradient with a history", "a hook that is linear",
    "backward into some inputs",
}  # fmt: skip
"""Programs that FSDP2 refuses, or that name weights which lie in parts there."""


def program(name: str, make: Callable[[], nn.Module] = Net) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        PROGRAMS[name] = make, body
        return body

    return register


def energy(outputs: Any) -> Tensor:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((output.square().sum() + output.sin().sum() for output in outputs), torch.zeros(()))  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- programs


@program("both heads")
def both_heads(model, x, place, scale, step):
    (energy(model(x)) * scale).backward()


@program("one head")
def one_head(model, x, place, scale, step):
    (energy(model(x, "first")) * scale).backward()


@program("a head on some copies")
def a_head_on_some_copies(model, x, place, scale, step):
    (energy(model(x, "first" if place else "both")) * scale).backward()


@program("another head on each copy")
def another_head_on_each_copy(model, x, place, scale, step):
    (energy(model(x, "first" if place % 2 else "second")) * scale).backward()


@program("a head in some steps")
def a_head_in_some_steps(model, x, place, scale, step):
    (energy(model(x, "both" if step == 1 else "first")) * scale).backward()


@program("a head in some steps on some copies")
def a_head_in_some_steps_on_some_copies(model, x, place, scale, step):
    (energy(model(x, "both" if step == 1 and place else "first")) * scale).backward()


@program("a part of the outputs")
def a_part_of_the_outputs(model, x, place, scale, step):
    (energy(model(x)[0]) * scale).backward()


@program("evaluation mode", Normed)
def evaluation_mode(model, x, place, scale, step):
    (energy(model.eval()(x)) * scale).backward()


@program("two forwards, one backward")
def two_forwards(model, x, place, scale, step):
    a, b = model(x, "first"), model(x.flip(1), "first")
    ((a - b).square().sum() * scale).backward()


@program("one forward, two backwards")
def two_backwards(model, x, place, scale, step):
    loss = energy(model(x)) * scale
    loss.backward(retain_graph=True)
    loss.backward()


@program("a backward for each head")
def a_backward_for_each_head(model, x, place, scale, step):
    a, b = model(x)
    (energy(a) * scale).backward(retain_graph=True)
    (energy(b) * scale).backward()


@program("two passes, all of them sent")
def two_passes(model, x, place, scale, step):
    (energy(model(x, "first")) * scale).backward()
    (energy(model(x * 0.5, "second")) * scale).backward()


@program("a pass that is not sent")
def a_pass_that_is_not_sent(model, x, place, scale, step):
    with without_sync(model):
        (energy(model(x, "first")) * scale).backward()
    (energy(model(x * 0.5, "second")) * scale).backward()


@program("a forward without a backward")
def a_forward_without_a_backward(model, x, place, scale, step):
    model(x)
    with torch.no_grad():
        model(x)
    (energy(model(x)) * scale).backward()


@program("called by parts")
def called_by_parts(model, x, place, scale, step):
    (energy(model.first(model.features(x))) * scale).backward()


@program("a checkpoint")
def a_checkpoint(model, x, place, scale, step):
    (energy(checkpoint(model, x, use_reentrant=False)) * scale).backward()


class Checkpointed(Net):
    def features(self, x: Tensor) -> Tensor:
        x = checkpoint(self.stem, x, use_reentrant=True)
        return checkpoint(self.body, x, use_reentrant=True) * self.scale


@program("a checkpoint that runs backward inside", Checkpointed)
def a_reentrant_checkpoint(model, x, place, scale, step):
    x = x.detach().requires_grad_()
    (energy(model(x, "first")) * scale).backward()


@program("a frozen layer")
def a_frozen_layer(model, x, place, scale, step):
    model.stem.requires_grad_(False)
    (energy(model(x)) * scale).backward()


class HalfFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.body.requires_grad_(False)


@program("unfrozen after it was laid out", HalfFrozen)
def unfrozen(model, x, place, scale, step):
    model.requires_grad_(True)
    (energy(model(x)) * scale).backward()


@program("frozen and unfrozen in turns")
def in_turns(model, x, place, scale, step):
    model.first.requires_grad_(step % 2 == 0)
    model.stem.requires_grad_(step % 2 == 1)
    (energy(model(x)) * scale).backward()


@program("one weight in two places", Tied)
def tied(model, x, place, scale, step):
    (energy(model(x)) * scale).backward()


@program("a penalty on gradients of images")
def penalty_on_images(model, x, place, scale, step):
    x = x.detach().requires_grad_()
    output = model(x, "first")
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    ((energy(output) + slope.square().sum()) * scale).backward()


@program("a penalty on gradients of weights")
def penalty_on_weights(model, x, place, scale, step):
    loss = energy(model(x, "first")) * scale
    slopes = torch.autograd.grad(loss, [model.stem.weight, model.first.bias], create_graph=True)
    (loss + 0.01 * sum(slope.square().sum() for slope in slopes)).backward()


@program("gradients of weights, used at once")
def gradients_of_weights(model, x, place, scale, step):
    loss = energy(model(x, "first")) * scale
    slopes = torch.autograd.grad(loss, [model.stem.weight, model.first.bias], retain_graph=True)
    (loss * (1 + 0.01 * sum(slope.square().sum() for slope in slopes))).backward()


@program("a gradient with a history")
def with_history(model, x, place, scale, step):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        (energy(model(x)) * scale).backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad.detach()


@program("backward into some inputs")
def some_inputs(model, x, place, scale, step):
    (energy(model(x)) * scale).backward(inputs=[p for n, p in model.named_parameters() if n.startswith("first")])


@program("a hook that is linear")
def a_linear_hook(model, x, place, scale, step):
    handle = model.stem.weight.register_hook(lambda gradient: gradient * 2.0)
    (energy(model(x)) * scale).backward()
    handle.remove()


@program("a hook that is not linear")
def a_hook(model, x, place, scale, step):
    handle = model.stem.weight.register_hook(lambda gradient: gradient.clone() / (1e-3 + gradient.norm()))
    (energy(model(x)) * scale).backward()
    handle.remove()


class Weighted(Net):
    """Weights that depend on the image."""

    def forward(self, x: Tensor, heads: str = "both") -> Any:
        x = self.stem(x)
        x = F.conv2d(x, self.never.weight * x.mean())
        x = F.conv2d(x, self.body[1].weight / (1 + x.std()), self.body[1].bias, padding=1)
        routes = torch.softmax(x.mean((0, 2, 3))[:2], 0)
        return F.conv2d(x, routes[0] * self.first.weight + routes[1] * self.first.weight.roll(1, 0), self.first.bias)


@program("weights that depend on the image", Weighted)
def weights_of_the_image(model, x, place, scale, step):
    (energy(model(x)) * scale).backward()


class Standardized(Net):
    """A weight that goes through plain operations, a product and a pointwise one; a branch that sees no image."""

    def forward(self, x: Tensor, heads: str = "both") -> Any:
        weight = self.stem.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 0.1)
        x = F.conv2d(x, weight, self.stem.bias, 2, 1)
        branch = F.conv2d(F.avg_pool2d(self.positions, 3, 1, 1).tanh(), self.body[1].weight, padding=1)
        x = x + branch * self.scale + self.positions
        return F.linear(x, self.table[: x.shape[3], : x.shape[3]]) * self.table[0, 0] + self.positions.sum(1, keepdim=True) * x


@program("plain branches and weights", Standardized)
def plain_branches(model, x, place, scale, step):
    (energy(model(x)) * scale).backward()


class Both(nn.Module):
    """A parameter that is used in a product and pixel by pixel, in both orders."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 9))
        self.image = nn.Parameter(torch.randn(13, 9))
        self.rows = nn.Parameter(torch.randn(13, 13))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.table) * self.image + x * self.table[0]
        x = x + (self.rows @ x) * self.rows[:, :9] + F.linear(x, self.image[:9])
        return x * self.image


@program("a parameter in a product and pixel by pixel", Both)
def both_ways(model, x, place, scale, step):
    (energy(model(x)) * scale).backward()


@program("a hook that is not linear, of a weight in two places", Both)
def a_hook_of_both(model, x, place, scale, step):
    handle = model.table.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    (energy(model(x)) * scale).backward()
    handle.remove()


# ---------------------------------------------------------------------------------------------- on ranks and on one device


def images(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def rows_of(copies: int) -> list[slice]:
    return [slice(part.start, part.stop) for part in parts_of(even_cut(SHAPE[0], copies))]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double().train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.01)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(name: str, copies: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    make, body = PROGRAMS[name]
    model, found = built(make), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = [slice(None)] if name in ON_THE_WHOLE else rows_of(copies)
        for place, mine in enumerate(rows):
            body(model, images(step)[mine], place, 1 / SHAPE[0], step)
        found.append(gradients_of(model))
        optimizer.step()
    return found, dict(model.state_dict())


def one_program(mesh: Any, name: str, *, rehearsed: bool) -> list[str]:
    """What differs, in order; ranks go on together."""
    make, body = PROGRAMS[name]
    wrong: list[str] = []
    expected, weights = alone(name, mesh.copies)
    model, mine = built(make), rows_of(mesh.copies)[mesh.copy]
    laid = lambda image: wf.tile(image[mine], mesh)  # noqa: E731
    wf.parallelize(model, mesh, trial_step=(lambda: energy(model(laid(images(9).requires_grad_())))) if rehearsed else None)
    optimizer = share_states(optimizer_of(model), mesh)
    for step in range(STEPS):
        optimizer.zero_grad()
        body(model, laid(images(step)), mesh.copy, mesh.copies / SHAPE[0], step)
        wrong += difference(mesh, gather_full_on_main(model, mesh, gradients_of(model)), expected[step], f"step {step}")
        optimizer.step()
    return wrong + difference(mesh, gather_full_on_main(model, mesh, dict(model.state_dict())), weights, "the weights")


def difference(mesh: Any, found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> list[str]:
    try:
        close(found if mesh.is_main else expected, expected)
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []


def every_program(mesh: Any, names: list[str], rehearsed: bool) -> list[str]:
    return [f"{name}, {text}" for name in names for text in one_program(mesh, name, rehearsed=rehearsed)[:1]]


def programs_for(plan: Plan) -> list[str]:
    names = set(PROGRAMS)
    if plan.replicate * plan.shard > 1:
        names -= ON_TILES_ALONE
    if plan.shard > 1 and plan.sharding.zero > 1:
        names -= NEEDS_WHOLE_WEIGHTS
    return sorted(names)


def zero(stage: int, **axes: Any) -> Plan:
    return Plan(shard=2, sharding={"zero": stage}, **axes)


PLANS = [
    Plan(replicate=2), Plan(replicate=3), Plan(space=[2, 1]), Plan(space=[1, 3]), Plan(replicate=2, space=[2, 1]),
    Plan(space=[2, 2]), zero(1), zero(2), zero(3), zero(3, space=[2, 1]),
]  # fmt: skip


FIRST = [(PLANS[0], True), (PLANS[2], False), (PLANS[6], False)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("plan", "rehearsed"),
    few([(plan, rehearsed) for plan in PLANS for rehearsed in (False, True)], *FIRST, is_sweep=True),
    ids=str,
)
def test_gradients_are_one_devices_whatever_the_backward(plan, rehearsed):
    wrong = on_ranks(plan.ranks, every_program, programs_for(plan), rehearsed, plan=plan)[0]
    assert not wrong, "\n\n".join(wrong)
