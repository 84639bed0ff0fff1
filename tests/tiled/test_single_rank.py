"""A tiled tensor on a grid of one rank stays one, whatever an operation makes of its shape in place."""

import torch

from widefield.geometry.layout import Grid, layout_of
from widefield.tiled.api import as_tile, whole
from widefield.tiled.tensor import TiledTensor

ALONE = Grid(())


def tiled(values: torch.Tensor) -> TiledTensor:
    return as_tile(values, layout_of(tuple(values.shape), (None,) * values.ndim, ALONE))


def test_one_number_that_is_squeezed_in_place_stays_tiled():
    x = tiled(torch.tensor([[3.0]])).clone()
    assert x.squeeze_() is x
    assert type(x) is TiledTensor and x.shape == () and whole(x).item() == 3.0


def test_a_tensor_that_takes_one_number_as_out_stays_tiled():
    x = tiled(torch.tensor([2.0, 3.0]))
    out = tiled(torch.empty(0)).clone()
    assert torch.sum(x, 0, out=out) is out
    assert type(out) is TiledTensor and out.shape == () and whole(out).item() == 5.0
