"""What modules do, and get one device's numbers for tile after tile: views, constants, tied weights, other inputs, autocast."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from streaming.both import IMAGE, Doing, assert_alike, conv, image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from widefield.streaming.api import stream

LABELS = torch.randint(0, 5, (2, 17, 13), generator=torch.Generator().manual_seed(7))
KERNEL = image(4, 3, 3, 3)
same = partial(nn.Conv2d, 3, 3, 3, padding=1)


def _detached(self, x):
    return self.a(x) * self.b(x).detach()


def _without_gradients(self, x):
    y = self.a(x)
    with torch.no_grad():
        scale = y.relu() * 2
    return y * scale


def _written_without_gradients(self, x):
    y = self.a(x)
    with torch.no_grad():
        y.mul_(2)
    return y * y


def _written_to_parts_without_gradients(self, x):
    y, z = self.a(x), self.a(x) * 2
    rows = y[:, :, 2:9]
    with torch.no_grad():
        rows.mul_(3)
        y[..., 0] = 1.5
        y[:, 1:].masked_fill_(y[:, :1] > 0, -1.0)
        z.mT.add_(torch.linspace(0, 1, x.shape[2]))
        z[:, :, 1:].normal_()
    return y * z, rows.sin()


def _detached_in_place(self, x):
    made = self.a(x)
    scale, mean = torch.std_mean(made, (2, 3), keepdim=True)
    scale.detach_()
    y = made + 1
    doubled = y * 2
    y.detach_()
    y.add_(1)
    return made * scale + mean, doubled * y, y, (y * 1).detach_().requires_grad_() * made


def _drawn(self, x):
    y = self.a(x)
    around = torch.normal(y, 0.1) + torch.normal(y.mean(1, keepdim=True), y.square())
    return around, torch.poisson(y.abs()), torch.bernoulli(y.sigmoid()), (y * 1).normal_(), (y * 2).bernoulli_(y.sigmoid())


def _turned_back(self, x):
    """A mix of channels that has an inverse, as flows have (Kingma and Dhariwal 2018), and what torch checks of it."""
    mix = self.mix @ self.mix.mT + torch.eye(3, dtype=x.dtype)
    return torch.einsum("bchw,cd->bdhw", x, torch.linalg.inv(mix)) * torch.linalg.slogdet(mix)[1], torch.linalg.cholesky(mix)


def _shaped_alike(self, x):
    y = self.a(x)
    copied = (y * 1).copy_(torch.ones_like(y))
    return torch.zeros_like(y), y.new_ones(y.shape), torch.empty_like(y).fill_(2.0) * y.detach(), copied, y.sign()


def _written_to_views(self, x):
    y = self.a(x)
    y[:, :, 2:5].mul_(3)
    y[..., 0] = 1.5
    y[:, 1].transpose(1, 2)[:, 3] += x.mean()
    return y


def _written_to_a_skip(self, x):
    y = self.a(x)
    skip = y * 1
    y = self.b(y)
    y += skip
    return y.relu_() + skip


def _nested(self, x):
    y = self.a(x)
    return {"mask": y, "more": (x.mean((2, 3)), [x * 2, None, 3, "a word"]), "again": y}


def _with_its_own(self, x):
    return x, self.a(x), x, self.a.weight, torch.ones(3)


def _several(self, x, small, *, scale, factor=1.0):
    return self.a(x) * scale * factor + small.mean()


def _averaged(self, x):
    """A buffer that is written to, and then read."""
    with torch.no_grad():
        self.mean.lerp_(x.mean((0, 2, 3)), 0.1)
    return x - self.mean[:, None, None]


def _quantized(self, x):
    """Pixels by the nearest of six codes, with the gradient of what they were."""
    y = self.a(x).permute(0, 2, 3, 1)
    nearest = (y.unsqueeze(-2) - self.codes.weight).pow(2).sum(-1).argmin(-1)
    code = self.codes(nearest)
    return y + (code - y).detach(), (code - y.detach()).pow(2).mean() + (code.detach() - y).pow(2).mean(), nearest


def _again_and_again(self, x):
    state, outputs = x.new_zeros(len(x), 4, *x.shape[2:]), []
    for _ in range(3):
        state = torch.tanh(self.a(torch.cat([x, state], 1)))
        outputs.append(state.mean(1))
    return torch.stack(outputs, 1)


def _with_places(self, x):
    rows, columns = (torch.linspace(-1, 1, extent, dtype=x.dtype) for extent in x.shape[2:])
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(len(x), 2, *x.shape[2:])
    return self.a(torch.cat([x, places], 1)) * self.place


def _masked(self, x, mask, style):
    return self.a(x) * F.interpolate(mask, scale_factor=2) + style[:, :, None, None]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = same(), same()
        self.b.weight = self.a.weight
        self.c = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def _spectral_by_hooks() -> nn.Module:
    return nn.Sequential(torch.nn.utils.spectral_norm(conv()), nn.Tanh(), torch.nn.utils.spectral_norm(nn.Conv2d(4, 2, 3)))


def _weight_norm_by_hooks() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has parametrizations in its place
        return torch.nn.utils.weight_norm(conv().double())


def _parametrized(norm: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(norm(conv()), nn.Tanh(), norm(nn.Conv2d(4, 2, 3)))


def _hooked_inside() -> nn.Module:
    net = nn.Sequential(conv(), nn.Tanh())
    net[0].register_forward_hook(lambda module, inputs, output: output * 2)
    net[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    return net


def _recomputed(self, x):
    return checkpoint(self.a, x, use_reentrant=False) * 2


def _recurrent(self, x):
    return self.a(x.flatten(2).transpose(1, 2))[0]


def _loss(self, x, target):
    return F.cross_entropy(self.a(x), target)


MAY: dict[str, tuple[Callable[[], nn.Module], list, dict]] = {
    "detach": (lambda: Doing(_detached, a=conv(), b=conv()), [IMAGE], {}),
    "turn gradients off": (lambda: Doing(_without_gradients, a=conv()), [IMAGE], {}),
    "write without gradients": (lambda: Doing(_written_without_gradients, a=conv()), [IMAGE], {}),
    "write to parts without gradients": (lambda: Doing(_written_to_parts_without_gradients, a=conv()), [IMAGE], {}),
    "detach in place": (lambda: Doing(_detached_in_place, a=conv()), [IMAGE], {}),
    "draw around what learns": (lambda: Doing(_drawn, a=conv()), [IMAGE], {}),
    "draw from Gamma": (lambda: Doing(lambda self, x: torch._standard_gamma(self.a(x).abs() + 0.5), a=conv()), [IMAGE], {}),
    "invert a matrix": (lambda: Doing(_turned_back, mix=nn.Parameter(torch.randn(3, 3))), [IMAGE], {}),
    "make what is shaped alike": (lambda: Doing(_shaped_alike, a=conv()), [IMAGE], {}),
    "write to views": (lambda: Doing(_written_to_views, a=conv()), [IMAGE], {}),
    "write to skip connections": (lambda: Doing(_written_to_a_skip, a=conv(), b=nn.Conv2d(4, 4, 3, padding=1)), [IMAGE], {}),
    "have ReLUs in place": (lambda: nn.Sequential(conv(), nn.ReLU(True), nn.Conv2d(4, 4, 3), nn.ReLU(True)), [IMAGE], {}),
    "know constants": (lambda: Doing(lambda self, x: F.conv2d(x, KERNEL) + KERNEL.mean()), [IMAGE], {}),
    "know an image": (lambda: Doing(lambda self, x: x * IMAGE[:1] + self.far, far=IMAGE * 2), [IMAGE + 1], {}),
    "give nested outputs": (lambda: Doing(_nested, a=conv()), [IMAGE], {}),
    "give its input back": (lambda: Doing(lambda self, x: x), [IMAGE], {}),
    "give what it was given": (lambda: Doing(_with_its_own, a=conv()), [IMAGE], {}),
    "give a window": (lambda: Doing(lambda self, x: (x[:, :, 2:9, ::2], x.transpose(2, 3)[:, 1])), [IMAGE], {}),
    "read several inputs": (lambda: Doing(_several, a=conv()), [IMAGE, image(2, 5, 9, 8)], {"scale": image(4, 1, 1)}),
    "read numbers": (lambda: Doing(_several, a=conv()), [IMAGE, IMAGE], {"scale": 2, "factor": 0.5}),
    "read lists": (lambda: Doing(lambda self, xs: self.a(xs[0]) - self.a(xs[1]["b"]), a=conv()), [[IMAGE, {"b": IMAGE}]], {}),
    "read classes": (lambda: Doing(lambda self, t: self.a(t).permute(0, 3, 1, 2), a=nn.Embedding(5, 4)), [LABELS], {}),
    "read bytes": (lambda: Doing(lambda self, x: self.a(x.double() / 255), a=conv()), [(IMAGE * 40 + 128).byte()], {}),
    "give a loss": (lambda: Doing(_loss, a=nn.Conv2d(3, 5, 3, padding=1)), [IMAGE, LABELS], {}),
    "run a layer twice": (lambda: Doing(lambda self, x: self.a(self.a(x)), a=same()), [IMAGE], {}),
    "tie weights": (_Tied, [IMAGE], {}),
    "average into a buffer": (lambda: Doing(_averaged, mean=nn.Buffer(torch.zeros(3))), [IMAGE], {}),
    "choose among codes": (lambda: Doing(_quantized, a=conv(), codes=nn.Embedding(6, 4)), [IMAGE], {}),
    "go round": (lambda: Doing(_again_and_again, a=nn.Conv2d(7, 4, 3, padding=1)), [IMAGE], {}),
    "know places": (
        lambda: Doing(_with_places, a=nn.Conv2d(5, 4, 3, padding=1), place=nn.Parameter(torch.randn(4, 17, 13))),
        [IMAGE],
        {},
    ),
    "read smaller images": (lambda: Doing(_masked, a=conv()), [image(2, 3, 18, 14), image(2, 1, 9, 7), image(2, 4)], {}),
    "norm spectra by hooks": (_spectral_by_hooks, [IMAGE], {}),
    "norm spectra": (lambda: _parametrized(parametrizations.spectral_norm), [IMAGE], {}),
    "norm weights by hooks": (_weight_norm_by_hooks, [IMAGE], {}),
    "norm weights": (lambda: _parametrized(parametrizations.weight_norm), [IMAGE], {}),
    "have orthogonal weights": (lambda: _parametrized(parametrizations.orthogonal), [IMAGE], {}),
    "hook layers inside": (_hooked_inside, [IMAGE], {}),
    "recompute": (lambda: Doing(_recomputed, a=nn.Sequential(conv(), nn.Dropout(0.5), nn.Tanh())), [IMAGE], {}),
    "run along pixels": (lambda: Doing(_recurrent, a=nn.LSTM(3, 4, batch_first=True)), [image(2, 3, 5, 4)], {}),
    "have no batch": (lambda: nn.Sequential(conv(), nn.ReLU()), [IMAGE[0]], {}),
    "read an empty batch": (lambda: nn.Sequential(conv(), nn.ReLU()), [IMAGE[:0]], {}),
}
"""Modules by what they do, and their inputs."""


@pytest.mark.parametrize("does", MAY)
def test_a_module_may(does):
    make, args, kwargs = MAY[does]
    assert_alike(make, *args, times=2, **kwargs)


@pytest.mark.parametrize("tiles", [(1, 1), (1,), (3,), (1, 4), (20, 20)], ids=str)
def test_any_number_of_tiles_will_do(tiles):
    assert_alike(lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, 2)), IMAGE, tiles=tiles)


# ---------------------------------------------------------------------------------------------- autocast


class _Casts(TorchDispatchMode):
    """Counts casts to bfloat16 by the shape of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and type(out) is Tensor:
            self.shapes.append(tuple(out.shape))
        return out


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 5))


def _cast_run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().pow(2).mean().backward()
    return y, torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.ndim > 1])


def test_autocast_gives_what_it_gives_of_the_whole():
    """bfloat16 has 8 binary digits, so one rounding is 2 ** -9 of a value; gradients are sums of many that are rounded."""
    torch.manual_seed(0)
    plain, x = _net(), torch.randn(2, 3, 33, 29)
    (y, slopes), (got, got_slopes) = _cast_run(plain, x), _cast_run(stream(copy.deepcopy(plain).train(), tiles=(2, 2)), x)
    assert got.dtype == y.dtype == torch.bfloat16
    torch.testing.assert_close(got, y, rtol=2**-7, atol=2**-7 * y.abs().max().item())
    assert (got_slopes - slopes).norm() < 2**-6 * slopes.norm()


def test_a_region_without_autocast_stays_so():
    """A loss in float32 inside of a net in bfloat16, as models write it."""

    def forward(self, x):
        y = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(y.float().permute(0, 2, 3, 1))

    torch.manual_seed(0)
    plain, x = Doing(forward, a=conv(), b=nn.Linear(4, 2)), torch.randn(2, 3, 17, 13)
    streamed = stream(copy.deepcopy(plain), tiles=(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = plain(x), streamed(x)
    assert got.dtype == expected.dtype == torch.float32
    (expected.pow(2).mean() + got.pow(2).mean()).backward()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # float32's own rounding, where bfloat16's is 4e-3
    torch.testing.assert_close(streamed.b.weight.grad, plain.b.weight.grad, rtol=1e-5, atol=1e-6)


def test_autocast_casts_each_weight_once():
    torch.manual_seed(0)
    module = stream(_net(), tiles=(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(2, 3, 33, 29))
        with _Casts() as casts:
            module(torch.randn(2, 3, 33, 29))
    weights = [tuple(weight.shape) for weight in module.parameters() if weight.ndim > 1]
    assert sorted(shape for shape in casts.shapes if shape in weights) == sorted(weights)
