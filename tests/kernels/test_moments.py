"""Are the gradients of moments and of what they normalize true?  By finite differences in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from widefield.kernels import moments

SHAPES = [(2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def wanted(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.preserve_format).requires_grad_()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments_have_the_gradient_of_finite_differences(shape):
    gradcheck(moments.moments_of, wanted(draw(*shape) + 3))


@pytest.mark.parametrize("is_dense", [True, False])
def test_moments_of_rows_have_the_gradient_of_finite_differences(is_dense):
    rows = draw(1, 4, 7) if is_dense else draw(1, 7, 4).mT
    gradcheck(lambda x: moments.moments_of_rows(x if is_dense else x.mT), wanted(rows if is_dense else rows.mT))


@pytest.mark.parametrize("missing", [(), (3,), (4,), (3, 4)], ids=["affine", "no weight", "no bias", "no affine"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_normalized_have_gradients_for_image_statistics_and_affine(shape, missing):
    given = [draw(*shape), draw(3), draw(3, 1)[:, 0].exp(), draw(3, 2)[:, 0], draw(3, 3)[:, 0]]
    gradcheck(partial(moments.normalized, eps=0.1), [None if n in missing else wanted(x) for n, x in enumerate(given)])


@pytest.mark.parametrize("number", range(5))
def test_each_gradient_of_the_normalized_is_the_same_asked_for_alone(number):
    given = [draw(2, 3, 4, 5), draw(3), draw(3, 1)[:, 0].exp(), draw(3, 2)[:, 0], draw(3, 3)[:, 0]]
    together, alone = [wanted(x) for x in given], [wanted(x) if n == number else x for n, x in enumerate(given)]
    expected, *_ = torch.autograd.grad(moments.normalized(*together, eps=0.1).pow(3).sum(), together[number])
    found, *_ = torch.autograd.grad(moments.normalized(*alone, eps=0.1).pow(3).sum(), alone[number])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_gradients_keep_the_images_memory_format(shape):
    x = wanted(draw(*shape).contiguous(memory_format=FORMATS[len(shape)]))
    mean, var = moments.moments_of(x)
    alone, *_ = torch.autograd.grad(mean.sum() + var.sum(), x, retain_graph=True)
    through, *_ = torch.autograd.grad(moments.normalized(x, mean, var, None, None, 0.1).pow(3).sum(), x)
    assert alone.is_contiguous(memory_format=FORMATS[len(shape)])
    assert through.is_contiguous(memory_format=FORMATS[len(shape)])


def test_a_gradient_in_another_memory_format_is_taken_for_what_it_is():
    x, pull = draw(2, 3, 4, 5), draw(2, 3, 5, 4).mT
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        mine = wanted(x.contiguous(memory_format=memory_format))
        y = moments.normalized(mine, *moments.moments_of(mine), None, None, 0.1)
        found += torch.autograd.grad(y, mine, pull)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kernel", [moments.moments_of, moments.moments_of_rows])
def test_second_derivatives_are_those_of_plain_operations(kernel, affine):
    def plain(x, w, b):
        mean = x.mean((0, 2), keepdim=True)
        scaled = (x - mean) * ((x - mean).square().mean((0, 2), keepdim=True) + 0.1).rsqrt()
        return scaled if w is None else scaled * w[:, None] + b[:, None]

    found = []
    for normalize in (lambda x, w, b: moments.normalized(x, *kernel(x), w, b, 0.1), plain):
        given = [wanted(tensor) for tensor in (draw(1, 3, 5), *((draw(3), draw(3)) if affine else ()))]
        x, w, b = given if affine else (*given, None, None)
        slopes = torch.autograd.grad(normalize(x, w, b).pow(3).sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(slope.pow(2).sum() for slope in slopes), given))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_statistics_that_are_constants_leave_second_derivatives_to_torch():
    x, mean, var = wanted(draw(2, 3, 5)), draw(3), draw(3).exp()
    (slope,) = torch.autograd.grad(moments.normalized(x, mean, var, None, None, 0.1).pow(3).sum(), x, create_graph=True)
    scale = (var + 0.1).rsqrt().view(-1, 1)
    expected = 6 * (x.detach() - mean.view(-1, 1)) * scale**3
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], expected, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_recorded():
    x = wanted(draw(2, 3, 5))
    with torch.no_grad():
        assert not any(found.requires_grad for found in (*moments.moments_of(x), *moments.moments_of_rows(x[:1])))
