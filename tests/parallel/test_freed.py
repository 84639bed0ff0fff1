"""Is what a pass saved gone with it, and a model with its last name, whoever looks on?  Without the garbage collector's help:
what autograd holds it does not see."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from marks import few
from ranks import on_ranks
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

import widefield as wf
from widefield.parallel.parallelize import parallelize
from widefield.parallel.strategies.recompute import from_host, to_host
from widefield.plans import Plan
from widefield.streaming.api import stream
from widefield.tiled.tensor import TiledTensor


def net(*more: nn.Module) -> nn.Sequential:
    """Most of its operations save their own results."""
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Softmax(1), nn.Tanh(), nn.ELU(), *more)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def noted(model: nn.Module) -> list[StorageWeakRef]:
    """Filled with the memory of what the layers give."""
    found: list[StorageWeakRef] = []

    def note(layer: nn.Module, given: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            tile = leaf.local if type(leaf) is TiledTensor else leaf
            if isinstance(tile, Tensor):
                found.append(StorageWeakRef(tile.untyped_storage()))

    for layer in model.modules():
        layer.register_forward_hook(note)
    return found


def alive_after(step: Callable[[], None], found: list[StorageWeakRef]) -> tuple[int, int]:
    """How many outputs are there after two steps, of how many."""
    with without_collector():
        for _ in range(2):
            step()
        alive = sum(not memory.expired() for memory in found)
        return alive, len(found)


def steps_of(mesh: Any, name: str) -> tuple[int, int, list[str]]:
    """What is left of two steps, of how many outputs, and what of the model."""
    alive, count, last = trained(mesh, name)
    gc.collect()
    return alive, count, [name for name, reference in last.items() if reference() is not None]


def trained(mesh: Any, name: str) -> tuple[int, int, dict[str, Any]]:
    image = torch.randn(2, 3, 12, 10)
    model = net(*(nn.Dropout(0.3),) if name == "chance" else ())
    parallelize(model, mesh, sample=image.to("meta"))
    found = noted(model) if name != "channels" else []  # whose operations are run, and no hooks

    def step() -> None:
        output = model(wf.tile(image, mesh))
        if name != "no backward":
            output.square().sum().backward()
        model.zero_grad()

    last = {"weight": weakref.ref(model[0].weight), "model": weakref.ref(model)}
    return *alive_after(step, found), last


PLANS = {
    "tiles": Plan(space=[2, 1]), "copies": Plan(replicate=2), "chance": Plan(replicate=2), "no backward": Plan(replicate=2),
    "run again": Plan(space=[2, 1], recompute={"blocks": ["0", "2"]}), "rows and tiles": Plan(replicate=2, space=[2, 1]),
    "weights in parts": Plan(shard=2, sharding={"zero": 2}), "channels": Plan(channel=2),
}  # fmt: skip


@pytest.mark.parametrize("name", few(PLANS, *[name for name in PLANS if name != "rows and tiles"]))
def test_outputs_go_with_their_pass_and_a_model_with_its_last_name(name):
    for alive, count, left in on_ranks(PLANS[name].ranks, steps_of, name, plan=PLANS[name]):
        assert (alive, left) == (0, []) and (count or name == "channels")


@pytest.mark.long
def test_small_results_that_stay_on_the_device_hold_nothing():
    """Else what was brought to the CPU's memory for them would stay there, step after step."""
    model = net(nn.AdaptiveAvgPool2d(1), nn.Sigmoid())
    found = noted(model)

    def step() -> None:
        with saved_tensors_hooks(to_host, from_host):
            output = model(torch.randn(2, 3, 300, 300))
        output.sum().backward()

    alive, count = alive_after(step, found)
    assert count and not alive
    alive, _ = alive_after(partial(forward_alone, model), found)
    assert not alive


def forward_alone(model: nn.Module) -> None:
    with saved_tensors_hooks(to_host, from_host):
        model(torch.randn(2, 3, 300, 300))


@pytest.mark.parametrize("refused", [False, True])
def test_a_captured_model_goes_with_its_last_name(refused):
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    model = stream(net(Reads()) if refused else net(), tiles=(2, 2))
    last = weakref.ref(model), weakref.ref(model[0].weight)
    try:
        model(torch.randn(1, 3, 16, 16, requires_grad=True)).sum().backward()
    except NotImplementedError:
        assert refused
    del model
    gc.collect()
    assert all(reference() is None for reference in last)
