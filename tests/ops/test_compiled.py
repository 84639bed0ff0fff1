"""Does a compiled model bring tiled images to the same rules as an uncompiled one?"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from marks import few
from ranks import on_ranks
from torch.nn import functional as F

import widefield as wf
from widefield.comm import halo
from widefield.config import ModelConfig
from widefield.models import build
from widefield.plans import Plan

RESIZES = {
    "nearest": {"scale_factor": 2},
    "nearest-exact": {"size": (37, 20)},
    "bilinear": {"scale_factor": 2},
    "bicubic": {"size": (37, 20)},
}


def bytes_sent(call, image) -> tuple[int, torch.Tensor]:
    """What this rank sends to peers in a forward and backward pass, and the image's gradient."""
    sent, send = [], halo._send

    def counting(messages, buffers, group_name):
        sent.extend(message.numel() * message.element_size() for message in messages.values())
        return send(messages, buffers, group_name)

    halo._send = counting
    try:
        image.grad = None
        call(image).square().sum().backward()
    finally:
        halo._send = send
    return sum(sent), wf.whole(image.grad)


def both_ways(mesh, call, size) -> tuple[int, int]:
    """Bytes that it sends uncompiled and compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.force_parameter_static_shapes = True
    image = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tiled = wf.tile(image, mesh).detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own doings
        compiled, found = bytes_sent(torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False), tiled)
    uncompiled, expected = bytes_sent(call, tiled)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    return uncompiled, compiled


def resized(mesh, mode, target):
    return both_ways(mesh, partial(F.interpolate, mode=mode, **target), (2, 3, 32, 18))


@pytest.mark.long
@pytest.mark.parametrize("mode", few(RESIZES, next(iter(RESIZES))))
def test_a_compiled_resize_sends_no_more_than_an_uncompiled_one(mode):
    row = 2 * 3 * 18 * 8
    for uncompiled, compiled in on_ranks(2, resized, mode, RESIZES[mode], plan=Plan(space=[2, 1])):
        assert compiled <= uncompiled <= 16 * row, f"{compiled} bytes compiled, {uncompiled} not; a row has {row}"


def unet(mesh):
    torch.manual_seed(0)
    config = ModelConfig(name="unet", options={"widths": [4, 8, 16], "norm": "group"})
    return both_ways(mesh, build(config, in_channels=3, num_classes=4).double(), (1, 3, 43, 24))


@pytest.mark.long
@pytest.mark.sweep
def test_a_compiled_unet_sends_no_more_pixels_than_an_uncompiled_one():
    for uncompiled, compiled in on_ranks(2, unet, plan=Plan(space=[2, 1]), timeout_seconds=300):
        assert 0 < compiled <= uncompiled
