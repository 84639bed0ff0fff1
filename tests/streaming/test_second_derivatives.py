"""Losses of a stream's gradients, as R1 and WGAN-GP penalize them, are those of the whole run, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from devices import here, on_gpu_too
from marks import few
from ranks import on_ranks
from streaming.both import IMAGE, Doing, conv, image, made
from streaming.test_cases import FAMILIES, REFUSED, TILES, CaseModule, _differences, cases_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_leaves

import widefield as wf
from widefield.plans import Plan
from widefield.streaming.api import stream
from widefield.streaming.storage.offload_buffer import OffloadBuffer

# ---------------------------------------------------------------------------------------------- losses


def gradient_of(module: Callable[..., Any], x: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
    """The mean score of each output, summed over samples, and its gradient at x, which may be differentiated again."""
    outputs = [leaf for leaf in tree_leaves(module(x, *more)) if isinstance(leaf, Tensor)]
    score = torch.stack([out.flatten(1).mean(1).sum() for out in outputs]).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score, slope


def norms(slope: Tensor) -> Tensor:
    return slope.square().flatten(1).sum(1)


def r1(module: Callable[..., Any], x: Tensor, *more: Tensor) -> Tensor:
    return norms(gradient_of(module, x, *more)[1]).mean()


def wgan_gp(module: Callable[..., Any], x: Tensor, *more: Tensor) -> Tensor:
    """With the scores themselves, so that a usual backward follows in the same graph."""
    score, slope = gradient_of(module, x, *more)
    return (norms(slope).add(1e-12).sqrt() - 1).square().mean() + score


def of_a_curved_score(module: Callable[..., Any], x: Tensor) -> Tensor:
    """What comes back to the stream's output depends on the output, and weights' gradients are penalized too."""
    score = module(x).sin().square().sum()
    wanted = [x, *(weight for weight in module.parameters() if weight.requires_grad)]
    slopes = torch.autograd.grad(score, wanted, create_graph=True, allow_unused=True)
    return torch.stack([slope.sin().mean() for slope in slopes if slope is not None]).sum()


LOSSES = {"R1": r1, "WGAN-GP": wgan_gp, "curved": of_a_curved_score}


def numbers_of(module: nn.Module, loss: Callable[..., Tensor], *given: Tensor, steps: int = 2) -> dict[str, Tensor | None]:
    """The loss, all gradients and buffers of some steps of plain SGD."""
    torch.manual_seed(1)
    found: dict[str, Tensor | None] = {}
    for step in range(steps):
        x = given[0].clone().requires_grad_()
        for weight in module.parameters():
            weight.grad = None
        value = loss(module, x, *given[1:])
        value.backward()
        found |= {f"{step}: loss": value.detach(), f"{step}: image": x.grad}
        found |= {f"{step}: {name}": None if w.grad is None else w.grad.clone() for name, w in module.named_parameters()}
        with torch.no_grad():
            for weight in module.parameters():
                if weight.grad is not None:
                    weight -= 1e-3 * weight.grad
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert {k for k, v in got.items() if v is None} == {k for k, v in expected.items() if v is None}
    largest = max(v.abs().max().item() for k, v in expected.items() if v is not None and ":" in k)
    for name, value in expected.items():
        if value is not None:
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12 * largest, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------------- networks


def patches() -> nn.Module:
    """As a discriminator of patches: instance norms, leaky rectifiers, spectral norms that iterate in each forward."""
    return nn.Sequential(
        spectral_norm(conv()), nn.LeakyReLU(0.2), nn.Conv2d(4, 6, 4, 2, 1), nn.InstanceNorm2d(6, affine=True), nn.SiLU(),
        spectral_norm(nn.Conv2d(6, 1, 3)),
    )  # fmt: skip


def batch_statistics() -> nn.Module:
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3), nn.Conv2d(4, 2, 3, 2), nn.Softplus())


def in_evaluation() -> nn.Module:
    module = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3), nn.Conv2d(4, 1, 3))
    module[1].running_mean.uniform_(-1, 1)
    module[1].running_var.uniform_(0.5, 2)
    return module.eval()


def frozen_and_unused() -> nn.Module:
    """The first convolution does not learn, nor does a norm; a layer has no part in the output."""
    module = nn.Sequential(conv(), nn.GroupNorm(2, 4), nn.ELU(), nn.Conv2d(4, 1, 3))
    for weight in [*module[0].parameters(), module[1].weight]:
        weight.requires_grad_(False)
    return Doing(lambda self, x: self.net(x), net=module, idle=nn.Linear(2, 2))


def pyramid() -> nn.Module:
    """A U: pooling, upsampling, a join, attention over channels, and a head on what all pixels give."""

    def forward(self, x):
        fine = self.first(x).relu()
        coarse = F.interpolate(self.inner(F.max_pool2d(fine, 2)).sigmoid(), size=fine.shape[2:], mode="bilinear")
        joined = torch.cat([fine, coarse], 1)
        return self.last(joined * joined.mean((2, 3), keepdim=True).softmax(1)), self.head(joined.mean((2, 3))).tanh()

    return Doing(forward, first=conv(), inner=nn.Conv2d(4, 4, 3, padding=1), last=nn.Conv2d(8, 1, 3), head=nn.Linear(8, 2))


NETWORKS = {make.__name__: make for make in (patches, batch_statistics, in_evaluation, frozen_and_unused, pyramid)}


@on_gpu_too
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_gradients_are_those_of_the_whole(name, loss):
    if name == "pyramid" and loss == "curved":
        pytest.skip("it has two outputs")
    make = NETWORKS[name]
    given = IMAGE.to(here())
    expected = numbers_of(made(make), LOSSES[loss], given)
    assert any(value is not None and value.abs().max() > 1e-6 for key, value in expected.items() if "weight" in key)
    assert_same(numbers_of(made(make, tiles=(2, 2)), LOSSES[loss], given), expected)


@pytest.mark.parametrize(("tiles", "keep"), [((3, 5), "file"), ((1, 4), "host"), ((17, 1), "device")])
def test_any_tiles_and_places_give_the_same(tiles, keep):
    torch.manual_seed(0)
    plain = batch_statistics().double()
    streamed = stream(copy.deepcopy(plain), tiles=tiles, keep=keep)
    assert_same(numbers_of(streamed, wgan_gp, IMAGE), numbers_of(plain, wgan_gp, IMAGE))


def test_volumes_and_a_second_image_that_is_not_differentiated():
    def forward(self, x, y):
        return self.last(self.norm(self.first(torch.cat([y, x], 1))).tanh())

    make = partial(
        Doing, forward, first=nn.Conv3d(3, 4, 3, padding=1), norm=nn.InstanceNorm3d(4, affine=True), last=nn.Conv3d(4, 1, 2)
    )
    given = image(2, 1, 7, 8, 9), image(2, 2, 7, 8, 9, seed=8)
    torch.manual_seed(0)
    plain = make().double()
    streamed = stream(copy.deepcopy(plain), tiles=(2, 1, 3))
    assert_same(numbers_of(streamed, r1, *given), numbers_of(plain, r1, *given))


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
def test_compiled_operations_are_run_one_by_one_where_gradients_are_differentiated():
    torch.manual_seed(0)
    plain = nn.Sequential(conv(), nn.Tanh(), nn.Softplus(), nn.Conv2d(4, 1, 3)).double()
    streamed = stream(copy.deepcopy(plain), tiles=(2, 2), compile=True)
    assert_same(numbers_of(streamed, r1, IMAGE, steps=1), numbers_of(plain, r1, IMAGE, steps=1))


# ---------------------------------------------------------------------------------------------- every rule's cases

NO_GRADIENT = {"amax of equal ones", "normal around pixels", "sum in another dtype", "in float32"}
"""Cases whose gradient does not depend on anything: torch gives it without a history, and a stream's has zeros."""


def twice(module: nn.Module, wholes: list[Tensor]) -> dict[str, Tensor | None] | Exception | None:
    images = {n: whole.clone().requires_grad_() for n, whole in enumerate(wholes) if n in module.case.tiled}
    torch.manual_seed(1)
    draw = torch.Generator().manual_seed(2)
    try:
        outs = [out for out in tree_leaves(module(*images.values())) if isinstance(out, Tensor) and out.requires_grad]
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        if not outs or not [*images, *weights]:
            return None
        score = sum((out.square() * torch.randn(out.shape, generator=draw)).sum() for out in outs)
        found = torch.autograd.grad(score, [*images.values(), *weights], create_graph=True, allow_unused=True)
        found = [slope for slope in found if slope is not None and slope.requires_grad]
        if not found:
            return None
        sum((slope * torch.randn(slope.shape, generator=draw)).sum() for slope in found).backward()
    except Exception as error:
        return error
    return {f"image {n}": x.grad for n, x in images.items()} | {name: weight.grad for name, weight in module.plain.items()}


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's advice on speed, of even kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives_of_every_rule_s_cases(family):
    torch.set_default_dtype(torch.float64)
    problems = []
    try:
        for case in cases_of(family):
            if f"{family}: {case.name}" in REFUSED:
                continue
            torch.manual_seed(0)
            wholes = [torch.randn(shape) for shape in case.shapes]
            plain = CaseModule(case, wholes)
            got, expected = twice(stream(copy.deepcopy(plain), tiles=TILES[0]), wholes), twice(plain, wholes)
            if isinstance(expected, Exception):
                continue  # torch itself has none
            if isinstance(got, Exception) or (got is None) != (expected is None):
                problems += [] if case.name in NO_GRADIENT else [f"{case.name}: {got!r} for {expected!r}"]
            for name, value in (expected or {}).items():
                problems += [f"{case.name}: {name} {problem}" for problem in _differences((got or {}).get(name), value)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert problems == [], "\n".join(problems)


# ---------------------------------------------------------------------------------------------- several ranks


def mean_gradients(mesh: Any, module: nn.Module) -> list[Tensor | None]:
    grads = [weight.grad for weight in module.parameters()]
    return [None if grad is None else mesh.sum_(grad.clone()) / mesh.size for grad in grads]


def assert_close(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    largest = max(value.abs().max().item() for value in expected if value is not None)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12 * largest)


def in_space(mesh: Any, loss: str) -> None:
    """A stream inside of a tile in space."""
    for make in (patches, batch_statistics):
        alone, cut = made(make), made(make, tiles=(2, 2))
        whole, part = IMAGE.clone().requires_grad_(), IMAGE.clone().requires_grad_()
        torch.manual_seed(1)
        expected = LOSSES[loss](alone, whole)
        torch.manual_seed(1)
        own = wf.tile(part.detach(), mesh).requires_grad_()
        got = LOSSES[loss](cut, own)
        expected.backward(), got.backward()
        assert_close([wf.whole(got.detach())], [expected.detach()])
        assert_close([*mean_gradients(mesh, cut), wf.whole(own.grad)], [*(w.grad for w in alone.parameters()), whole.grad])


@pytest.mark.parametrize("loss", few(["R1", "WGAN-GP"], "WGAN-GP"))
def test_a_stream_inside_of_tiles_in_space_is_differentiated_twice(loss):
    on_ranks(2, in_space, loss, plan=Plan(space=[2, 1]))


def over_copies(mesh: Any) -> None:
    """Statistics over copies, each of which streams its own images."""
    alone, streamed = made(lambda: batch_statistics_without_draws()), made(lambda: batch_statistics_without_draws())
    call = wf.parallelize(wf.stream(streamed, tiles=(2, 2)), mesh)
    x = image(2 * mesh.size, 3, 17, 13)
    whole, own = x.clone().requires_grad_(), x[2 * mesh.rank : 2 * mesh.rank + 2].clone().requires_grad_()
    r1(alone, whole).backward()
    r1(call, own).backward()
    assert_close(mean_gradients(mesh, streamed), [weight.grad for weight in alone.parameters()])


def batch_statistics_without_draws() -> nn.Module:
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.SiLU())


def test_statistics_over_copies_are_differentiated_twice():
    on_ranks(2, over_copies, plan=Plan(replicate=2))


def of_weights_in_space(mesh: Any) -> str:
    module = made(patches, tiles=(2, 2))
    own = wf.tile(IMAGE, mesh).requires_grad_()
    (slope,) = torch.autograd.grad(module(own).sum(), module[2].weight, create_graph=True)
    with pytest.raises(NotImplementedError) as caught:
        slope.square().sum().backward()
    return str(caught.value)


def test_losses_of_weights_gradients_in_space_are_refused_on_every_rank():
    for told in on_ranks(2, of_weights_in_space, plan=Plan(space=[2, 1])):
        assert told.startswith("a loss of gradients of weights (2.weight) wants second derivatives of a stream on 2 ranks")


# ---------------------------------------------------------------------------------------------- refusals


def test_a_third_derivative_is_refused():
    x = IMAGE.clone().requires_grad_()
    _, slope = gradient_of(made(patches, tiles=(2, 2)), x)
    with pytest.raises(NotImplementedError, match="a stream is differentiated twice, not three times"):
        torch.autograd.grad(slope.square().sum(), x, create_graph=True)


def test_an_operation_without_a_second_derivative_is_named_before_a_tile_runs(monkeypatch):
    x = IMAGE.clone().requires_grad_()
    score = made(lambda: nn.Sequential(conv(), nn.Hardsigmoid(), nn.Conv2d(4, 1, 3)), tiles=(2, 2))(x).mean()
    monkeypatch.setattr(OffloadBuffer, "add", None)  # nothing is added to a gradient
    told = r"needs second derivatives, and 1's hardsigmoid has none in torch; take another operation there"
    with pytest.raises(NotImplementedError, match=told):
        torch.autograd.grad(score, x, create_graph=True)


def test_each_gradient_is_differentiated_once():
    x = IMAGE.clone().requires_grad_()
    _, slope = gradient_of(made(patches, tiles=(2, 2)), x)
    loss = slope.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a stream's backward was called twice"):
        loss.backward()


@pytest.mark.parametrize("what", ["weight", "image"])
def test_what_the_second_backward_reads_may_not_be_written_to(what):
    module, x = made(patches, tiles=(2, 2)), IMAGE.clone().requires_grad_()
    _, slope = gradient_of(module, x)
    with torch.no_grad():
        (module[2].weight if what == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        slope.square().sum().backward()
