"""Gradients of plain weights through products: plain, left to the mean over ranks; all others are added up at once."""

from __future__ import annotations

import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from widefield.engine.halo import TRAFFIC
from widefield.engine.tiled import TiledTensor
from widefield.engine.tiling import tile, whole
from widefield.plan import Plan

TWO = Plan(space=[2, 1])


def _loss(linear: nn.Linear, mesh, *, cut: bool = True) -> torch.Tensor:
    """Of a layer over the channels of an image; or of the image's mean, of which every rank has all."""
    torch.manual_seed(1)
    image = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    image = image if mesh is None else tile(image, mesh)
    return F.linear(image.permute(0, 2, 3, 1) if cut else image.mean((2, 3)), linear.weight).square().sum()


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4, bias=False, dtype=torch.float64)


def _weights_gradient(mesh, cut: bool) -> tuple[str, bool, int, bool]:
    """Type of the weight's gradient, whether its mean over ranks is the single device's, sums sent, whether parts differ."""
    expected, linear = _linear(), _linear()
    _loss(expected, None, cut=cut).backward()
    loss = _loss(linear, mesh, cut=cut)
    TRAFFIC.clear()
    loss.backward()
    sums, grad = TRAFFIC.sum_messages, linear.weight.grad
    mean = mesh.sum_(grad.clone()) / mesh.size
    exact = torch.allclose(mean, expected.weight.grad, rtol=1e-12, atol=1e-12)
    return type(grad).__name__, exact, sums, not torch.allclose(grad, mean)


def test_a_weights_gradient_over_pixels_is_this_ranks_part_and_sends_nothing():
    assert on_ranks(2, _weights_gradient, True, plan=TWO) == [("Tensor", True, 0, True)] * 2


def test_a_weights_gradient_behind_a_mean_is_plain_and_whole():
    assert on_ranks(2, _weights_gradient, False, plan=TWO) == [("Tensor", True, 0, False)] * 2


def test_a_gradient_that_is_differentiated_again_is_added_up_at_once():
    """A penalty squares the gradient, and the mean of squares of parts is not the square of the sum."""
    assert all(on_ranks(2, _penalty_is_exact, plan=TWO))


def _penalty_is_exact(mesh) -> bool:
    values = []
    for where in (None, mesh):
        linear = _linear()
        (grad,) = torch.autograd.grad(_loss(linear, where), [linear.weight], create_graph=True)
        values.append(whole(grad.square().sum()).detach())
    return torch.allclose(values[0], values[1], rtol=1e-12)


def test_a_tiled_context_gets_its_whole_gradient_at_once():
    """Pixels that meet a summary of the image, which is uncut but no weight."""
    assert all(on_ranks(2, _context_is_exact, plan=TWO))


def _context_is_exact(mesh) -> bool:
    torch.manual_seed(2)
    given = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    grads = []
    for image in (given.clone().requires_grad_(), given.clone().requires_grad_()):
        x = tile(image, mesh) if grads else image
        context = x.mean((2, 3)).tanh()
        context.retain_grad()
        (x.permute(0, 2, 3, 1).reshape(-1, 3) @ context.t()).square().sum().backward()
        grads += [context.grad, image.grad]
    assert type(grads[2]) is TiledTensor
    same = [torch.allclose(whole(a), b, rtol=1e-12, atol=1e-12) for a, b in zip(grads[2:], grads[:2], strict=True)]
    return all(same)
