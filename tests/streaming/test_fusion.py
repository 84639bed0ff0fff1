"""Compiled runs of pointwise operations: the same numbers, and what is joined."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import widefield as wf
from widefield.streaming.fusion import runs_of


class Residual(nn.Module):
    """Two convolutions and a shortcut, between them runs of pointwise operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = nn.functional.hardswish(self.first(x)) * 2 + 0.5
        return torch.tanh(self.second(y) + y) * y.sigmoid()


@pytest.fixture
def streamed() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    alone = Residual().double()
    return alone, wf.stream(copy.deepcopy(alone), tiles=(2, 3), compile=True)


@pytest.mark.long
@pytest.mark.sweep
def test_compiled_runs_give_the_same_numbers(streamed):
    image = torch.randn(2, 3, 29, 31, dtype=torch.float64)
    found = []
    for model in streamed:
        x = image.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler warns of its own doings
            out = model(x)
            out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
    assert streamed[1]._stream.known.values()[0].fused.known, "nothing was compiled"


def test_pointwise_operations_on_the_same_pixels_run_as_one(streamed):
    model = wf.stream(Residual(), tiles=(2, 3))
    with torch.no_grad():
        model(torch.randn(1, 3, 29, 31))
    program = model._stream.known.values()[0].program
    (segment,) = [segment for stage in program.stages for segment in stage.segments]
    sizes = [len(run.steps) for run in runs_of(segment.tiles[0])]
    assert max(sizes) > 1 and sum(sizes) == len(segment.tiles[0].steps)
