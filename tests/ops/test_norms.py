"""What the cases cannot say of norms on tiles: low precision, messages, and running statistics that ranks share."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch import nn

from widefield.comm.halo import TRAFFIC
from widefield.plans import Plan
from widefield.tiled import dispatch
from widefield.tiled.api import tile, whole
from widefield.tiled.partial_gradient import manage
from widefield.tiled.tensor import TiledTensor

ON_ROWS = Plan(space=[2, 1])
SHAPE = (2, 8, 23, 17)
NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "group": lambda: nn.GroupNorm(4, 8),
    "layer": lambda: nn.LayerNorm(SHAPE[1:]),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
}


def layer_of(kind, dtype=torch.float32):
    layer = NORMS[kind]().to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2.0, layer.weight.numel()).view_as(layer.weight))
        layer.bias.copy_(torch.linspace(-1.0, 1.0, layer.bias.numel()).view_as(layer.bias))
    return layer


# ---------------------------------------------------------------------------------------------- low precision


def trained(layer, x, grad, mesh=None):
    """Output, input gradient and running statistics; whole, from tiles of 5 and 18 rows where there is a mesh."""
    x = x.clone().requires_grad_()
    given = x if mesh is None else tile(x, mesh, [[0, 5, 23], None])
    y = layer(given)
    y.backward(grad if mesh is None else tile(grad, mesh, [[0, 5, 23], None]))
    buffers = [buffer.clone() for name, buffer in layer.named_buffers() if "running" in name]
    return [whole(y).detach(), x.grad, *buffers]


def errors(mesh, kind, dtype, mean, std, memory_format):
    """Largest errors against float64, (tiles', torch's on the whole image), and how far float32 rounds such a number."""
    draw = torch.randn(2, *SHAPE, dtype=torch.float64)
    x, grad = (draw[0] * std + mean).to(dtype).contiguous(memory_format=memory_format), draw[1].to(dtype)
    exact = trained(layer_of(kind, torch.float64), x.double(), grad.double())
    alone = trained(layer_of(kind), x, grad)
    ours = trained(layer_of(kind), x, grad, mesh)
    pairs = zip(ours, alone, exact, strict=True)
    largest = [[value.abs().max().item() for value in (a - right, b - right, right)] for a, b, right in pairs]
    return [(tiles, torchs, 2.0**-24 * size) for tiles, torchs, size in largest]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "mean", "std"), [
    (torch.float32, 100.0, 0.01), (torch.float32, 0.0, 1.0), (torch.bfloat16, 10.0, 0.1), (torch.float16, 10.0, 0.1),
])  # fmt: skip
@pytest.mark.parametrize("kind", NORMS)
def test_far_from_zero_no_worse_than_twice_torch_on_the_whole(kind, dtype, mean, std, memory_format):
    for tiles, alone, rounding in on_ranks(2, errors, kind, dtype, mean, std, memory_format, plan=ON_ROWS)[0]:
        assert tiles <= 2 * alone + rounding


def dtypes_of(mesh, kind):
    layer = layer_of(kind)
    x = torch.randn(SHAPE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(tile(x.bfloat16(), mesh))
    y.float().square().sum().backward()
    return y.dtype, x.grad.dtype, layer.weight.grad.dtype


@pytest.mark.parametrize("kind", NORMS)
def test_autocast_gives_torchs_dtypes(kind):
    assert on_ranks(2, dtypes_of, kind, plan=ON_ROWS)[0] == (torch.bfloat16, torch.float32, torch.float32)


def wholly_in_bfloat16(mesh, kind):
    layer = layer_of(kind, torch.bfloat16)
    x = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    y = layer(tile(x, mesh))
    y.float().square().sum().backward()
    return y.dtype, x.grad.dtype, layer.weight.grad.dtype, {buffer.dtype for buffer in layer.buffers()} - {torch.int64}


@pytest.mark.parametrize("kind", NORMS)
def test_a_layer_wholly_in_bfloat16_stays_so(kind):
    *dtypes, buffers = on_ranks(2, wholly_in_bfloat16, kind, plan=ON_ROWS)[0]
    assert dtypes == [torch.bfloat16] * 3 and buffers <= {torch.bfloat16}


# ---------------------------------------------------------------------------------------------- messages


def messages(mesh, layer, shape):
    """(messages of sums, numbers in them, messages of pixels), forward and backward, of a layer that a reducer cares for."""
    manage(layer.parameters())
    x = tile(torch.randn(shape), mesh).requires_grad_()
    TRAFFIC.clear()
    y = layer(x)
    forward = TRAFFIC.sum_messages, TRAFFIC.sum_bytes, TRAFFIC.pixel_messages
    TRAFFIC.clear()
    y.backward(y.detach())
    return [forward, (TRAFFIC.sum_messages, TRAFFIC.sum_bytes, TRAFFIC.pixel_messages)]


@pytest.mark.parametrize(("layer", "shape", "forward", "backward"), [
    (nn.BatchNorm2d(8), SHAPE, (1, 17 * 8, 0), (1, 16 * 4, 0)),
    (nn.BatchNorm2d(8).eval(), SHAPE, (0, 0, 0), (0, 0, 0)),
    (nn.GroupNorm(4, 8), SHAPE, (1, 17 * 8, 0), (1, 32 * 4, 0)),  # 2 samples of 4 groups; of 8 channels
    (nn.LayerNorm(SHAPE[1:]), SHAPE, (1, 5 * 8, 0), (3, 4 * 4 + 2 * 8 * 23 * 17 * 4, 0)),  # and its weights
    (nn.LayerNorm(8), (2, 24, 17, 8), (0, 0, 0), (0, 0, 0)),
], ids=["batch", "evaluation", "group", "layer", "rows"])  # fmt: skip
def test_one_small_message_each_way_and_none_where_nothing_is_shared(layer, shape, forward, backward):
    plan = ON_ROWS if shape == SHAPE else Plan(space=[2, 1, 1])
    assert on_ranks(2, messages, layer, shape, plan=plan) == [[forward, backward]] * 2


# ---------------------------------------------------------------------------------------------- what ranks share


def buffers_after_a_step(mesh, kind):
    layer = layer_of(kind)
    layer(tile(torch.randn(SHAPE), mesh, [[0, 5, 23], None]))
    return list(layer.buffers())


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_running_statistics_are_the_same_bits_on_every_rank(kind):
    first, second = on_ranks(2, buffers_after_a_step, kind, plan=ON_ROWS)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], torch.zeros(8))


def gradients_of_uncut(mesh):
    """A tiled tensor that no cut divides: plain BatchNorm on every rank, and its weights' gradients plain."""
    layer = nn.BatchNorm1d(8).double()
    x = torch.randn(5, 8, 6, 4, dtype=torch.float64)
    y = layer(tile(x, mesh).mean((2, 3)))
    y.square().sum().backward()
    right = nn.BatchNorm1d(8).double()
    right(x.mean((2, 3))).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, right.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_var, right.running_var, rtol=1e-12, atol=1e-12)
    return type(y) is TiledTensor, type(layer.weight.grad) is torch.Tensor


def test_norms_of_pooled_images_are_the_same_on_every_rank():
    assert on_ranks(2, gradients_of_uncut, plan=ON_ROWS) == [(True, True)] * 2


def known_after(mesh, steps):
    dispatch._CACHE.clear()
    most, dispatch.CACHE_SIZE = dispatch.CACHE_SIZE, 3
    layer = nn.BatchNorm2d(8, momentum=None)  # its momentum is 1, 1/2, 1/3, ...: new arguments in every step
    found = []
    try:
        for _ in range(steps):
            layer(tile(torch.randn(SHAPE), mesh))
            found.append(len(dispatch._CACHE))
    finally:
        dispatch.CACHE_SIZE = most
    return found


def test_arguments_that_change_in_every_step_do_not_fill_the_memory():
    assert on_ranks(2, known_after, 7, plan=ON_ROWS)[0] == [1, 2, 3, 1, 2, 3, 1]
