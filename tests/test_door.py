"""The public door: its names, and the example in the package's docstring, on ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

import widefield as wf


def test_every_public_name_is_there_and_no_other():
    assert all(getattr(wf, name).__name__ == name for name in wf.__all__)
    assert set(wf.__all__) <= set(dir(wf))
    with pytest.raises(AttributeError, match="widefield has no 'tiles'; it has: Mesh"):
        wf.tiles  # noqa: B018


def test_importing_the_package_imports_no_torch():
    code = "import sys, widefield; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 5)]
    return nn.Sequential(*layers).double()


def gradients_through_the_door(mesh_of_the_test, image, target, cut):
    mesh = wf.build_mesh()
    model = wf.parallelize(net(), mesh)
    own = slice(cut[mesh.rank], cut[mesh.rank + 1])
    loss = F.cross_entropy(model(image[own]), target[own], reduction="sum") * mesh.size / len(image)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("cut", [(0, 4, 7), (0, 1, 6, 7)])
def test_gradients_are_the_whole_batch_s_on_every_rank(cut):
    image, target = torch.randn(7, 3, 5, 5, dtype=torch.float64), torch.randint(5, (7,))
    alone = wf.parallelize(net(), wf.build_mesh())
    F.cross_entropy(alone(image), target).backward()
    for found in on_ranks(len(cut) - 1, gradients_through_the_door, image, target, cut):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("space", [(1,), (1, 1), (1, 1, 1)])
def test_a_grid_of_one_tile_is_no_grid(space):
    image, mesh = torch.randn(2, 3, 5, 5, dtype=torch.float64), wf.build_mesh(space=space)
    assert wf.tile(image, mesh) is image and wf.from_tile(image, mesh, image.shape) is image
    assert mesh.plan == wf.build_mesh().plan and mesh.grid == wf.build_mesh().grid


def refusal(mesh_of_the_test):
    with pytest.raises(ValueError, match="needs 3 ranks and there are 2; set mesh.replicate=2"):
        wf.build_mesh(replicate=3)
    with pytest.raises(ValueError, match="needs 3 ranks and there are 2; start a multiple of 3 ranks"):
        wf.build_mesh(shard=3)


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank():
    on_ranks(2, refusal)
