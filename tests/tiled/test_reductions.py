"""Reductions and losses on tiles: what they hold in memory, send and round.  Their values are held by rules/test_cases.py."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn import functional as F

from widefield.comm import halo
from widefield.comm.mesh import Mesh
from widefield.ops.reductions import merge_moments
from widefield.plans import Plan
from widefield.tiled.api import tile, whole
from widefield.tiled.tensor import TiledTensor

TWO = Plan(space=[2, 1])


def _image(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("sizes", [(7, 4, 9), (1, 19), (0, 20), (5, 0, 15)], ids=str)
def test_moments_of_tiles_merge_into_those_of_the_whole(sizes):
    x = 100 + 0.01 * _image(3, 20)
    parts = []
    for part in x.split(sizes, 1):
        mean = part.mean(1) if part.shape[1] else torch.zeros(3, dtype=x.dtype)
        parts.append(torch.stack([mean, (part - mean[:, None]).pow(2).sum(1)]))
    mean, squares = merge_moments(sizes, torch.stack(parts))
    torch.testing.assert_close(mean, x.mean(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(squares, x.var(1) * 19, rtol=1e-10, atol=0)  # 100 / 0.01 times float64's 2e-16, and room


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dims", [(2, 3), (2,), (1, 2, 3)], ids=str)
def test_the_gradient_of_a_mean_never_fills_an_image(dims):
    assert on_ranks(2, _bytes_of_a_spread_gradient, dims, plan=TWO) == [_spread_numbers(dims) * 8] * 2


def _spread_numbers(dims: tuple[int, ...]) -> int:
    return torch.Size(extent for dim, extent in enumerate((2, 3, 16, 12)) if dim not in dims).numel()


def _bytes_of_a_spread_gradient(mesh: Mesh, dims: tuple[int, ...]) -> int:
    x = tile(_image(2, 3, 16, 12).requires_grad_(), mesh, [[0, 7, 16], None])
    sizes: list[int] = []
    x.register_hook(lambda grad: sizes.append((grad * 2 + 1).local.untyped_storage().nbytes()))
    x.mean(dims).pow(2).sum().backward()
    return sizes[0]


def test_a_hook_may_write_on_a_spread_gradient():
    assert on_ranks(2, _written_gradients, plan=TWO) == [[]] * 2


def _written_gradients(mesh: Mesh) -> list[str]:
    pixels = _image(2, 3, 16, 12).exp()
    hooks = {
        "number": lambda grad: (grad * 2).mul_(3.0).clamp_(max=0.1),
        "channels": lambda grad: (grad * 2).add_(pixels[:1, :, :1, :1]),
        "pixels": lambda grad: (grad * 2).add_(pixels).mul_(pixels),
    }
    return [name for name, hook in hooks.items() if not _same_with(hook, mesh)]


def _same_with(hook, mesh: Mesh) -> bool:
    grads = []
    for cut in (False, True):
        leaf = _image(2, 3, 16, 12).requires_grad_()
        x = (tile(leaf, mesh, [[0, 7, 16], None]) if cut else leaf) * 1
        x.register_hook(hook)
        x.mean((2, 3)).pow(2).sum().backward()
        grads.append(leaf.grad)
    return torch.allclose(*grads, rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------- messages

CALLS = {
    "mean over pixels": (lambda x: x.mean((2, 3)), 2 * 5),
    "mean over channels": (lambda x: x.mean(1), None),
    "variance over pixels": (lambda x: x.var((2, 3)), 2 * 2 * 5),
    "softmax over channels": (lambda x: x.softmax(1), None),
    "softmax over cut rows": (lambda x: x.softmax(2), 2 * 2 * 5 * 12),
    "largest row": (lambda x: x.max(2), 2 * 2 * 5 * 12),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(2, 16, 12, dtype=torch.long)), 2),
    "squared error": (lambda x: F.mse_loss(x, x * 2), 1),
}


def test_a_reduction_sends_one_message_of_its_own_size_or_none():
    expected = {name: (0, 0) if numbers is None else (1, 8 * numbers) for name, (_, numbers) in CALLS.items()}
    assert on_ranks(2, _sums_sent, plan=TWO) == [expected] * 2


def _sums_sent(mesh: Mesh) -> dict[str, tuple[int, int]]:
    x = tile(_image(2, 5, 16, 12), mesh, [[0, 7, 16], None])
    sent = {}
    for name, (call, _) in CALLS.items():
        halo.TRAFFIC.clear()
        call(x)
        assert halo.TRAFFIC.pixel_messages == 0, f"{name} moved pixels"
        sent[name] = (halo.TRAFFIC.sum_messages, halo.TRAFFIC.sum_bytes)
    return sent


# ---------------------------------------------------------------------------------------------- rounding


def test_low_precision_rounds_no_more_than_twice_what_torch_does():
    assert on_ranks(2, _badly_rounded, plan=TWO) == [[]] * 2


def _badly_rounded(mesh: Mesh) -> list[str]:
    """At mean 100 and deviation 0.01, float32 squares cancel to nothing; torch's own error is that of its input's rounding."""
    calls = {
        "var": lambda x: x.var((2, 3)),
        "std": lambda x: x.std((2, 3)),
        "mean": lambda x: x.mean((2, 3)),
        "sum": lambda x: x.sum((0, 2, 3)),
        "norm": lambda x: x.norm(dim=(2, 3)),
        "logsumexp": lambda x: x.logsumexp((2, 3)),
        "softmax": lambda x: x.softmax(2),
    }
    bad = []
    for dtype, mean, deviation in ((torch.float32, 100, 0.01), (torch.bfloat16, 10, 0.1), (torch.float16, 10, 0.1)):
        x = (mean + deviation * _image(2, 3, 40, 30)).to(dtype)
        tiled = tile(x, mesh, [[0, 13, 40], None])
        for name, call in calls.items():
            exact = call(x.double())
            error, own = ((got.double() - exact).abs().max().item() for got in (whole(call(tiled)), call(x)))
            if not error <= 2 * own + torch.finfo(dtype).eps * exact.abs().max().item():
                bad.append(f"{name} in {dtype}: {error:.1e}, torch {own:.1e}")
    return bad


def test_a_sum_in_bfloat16_is_rounded_once():
    assert on_ranks(2, _roundings, plan=TWO) == [True] * 2


def _roundings(mesh: Mesh) -> bool:
    """Each error is within half of the last place; where parts were rounded too, some of 128 channels are past it."""
    x = _image(1, 128, 40, 30, dtype=torch.bfloat16).exp()
    exact = x.double().sum((2, 3))
    half_place = torch.finfo(torch.bfloat16).eps / 2
    got = whole(tile(x, mesh, [[0, 13, 40], None]).sum((2, 3)))
    return bool(((got.double() - exact).abs() <= exact * half_place * 1.001).all())


def test_a_result_without_pixels_is_a_plain_number_and_others_are_tiled():
    assert on_ranks(2, _kinds, plan=TWO) == [[False, False, False, True, True, True, True]] * 2


def _kinds(mesh: Mesh) -> list[bool]:
    x = tile(_image(2, 5, 16, 12), mesh)
    loss = F.cross_entropy(x, torch.zeros(2, 16, 12, dtype=torch.long))
    results = [x.sum(), x.argmax(), loss, x.mean((2, 3)), x.sum((0, 1, 2, 3), keepdim=True), x.amax(1), x.max(2).indices]
    return [type(result) is TiledTensor for result in results]
