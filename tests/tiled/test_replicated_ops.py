"""The arguments of an operation, looked through without torch's slow way, and how much Python an operation on tiles costs."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from widefield.comm.mesh import Mesh
from widefield.plans import Plan
from widefield.private_torch.dispatcher import TorchDispatchMode
from widefield.rooms import ENGINE, is_of_engine
from widefield.tiled.api import tile
from widefield.tiled.replicated_ops import broadcast_shape, mapped, tensors_in
from widefield.tiled.tensor import TiledTensor

X, Y = torch.zeros(2), torch.ones(3)
CALLS = {
    "a tensor among numbers": ((X, 1, 2.5, None, True), {}),
    "lists of numbers": ((X, [1, 2], [0.5], [True, False], []), {"size": [3, 4]}),
    "a list of tensors": (([X, Y], 1), {}),
    "indices, of which the first is none": ((X, [None, Y]), {}),
    "tensors by name, in a list too": ((1,), {"out": X, "others": [Y, X], "dtype": torch.float32}),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_mapped_as_torch_maps_them(name):
    args, kwargs = CALLS[name]
    marked = lambda value: id(value) if isinstance(value, Tensor) else value  # noqa: E731
    got_args, got_kwargs = mapped(marked, args, kwargs)
    assert (tuple(got_args), got_kwargs) == tree_map(marked, (args, kwargs))


@pytest.mark.parametrize("name", CALLS)
def test_all_tensors_are_found_in_their_order(name):
    found: list[int] = []
    tree_map(lambda value: found.append(id(value)) if isinstance(value, Tensor) else None, CALLS[name])
    assert [id(tensor) for tensor in tensors_in(*CALLS[name])] == found


def test_shapes_broadcast_as_in_torch():
    shapes = [torch.Size(shape) for shape in ((), (1,), (3,), (2, 1), (4, 1, 3), (0, 1, 1), (1, 2, 3))]
    for a, b in product(shapes, shapes):
        if 0 in a and 4 in b or 4 in a and 0 in b:
            with pytest.raises(RuntimeError, match="broadcast"):
                broadcast_shape(a, b)
        else:
            assert broadcast_shape(a, b) == torch.empty(a).add(torch.empty(b)).shape


def test_a_module_belongs_to_a_room_by_its_full_name():
    assert all(is_of_engine(f"widefield.{room}") and is_of_engine(f"widefield.{room}.some.file") for room in ENGINE)
    others: list[Any] = ["widefield", "widefield.opsy", "widefield.tiledx.y", "ops", "my.widefield.ops", "", None, 3]
    assert not any(map(is_of_engine, others))


# ---------------------------------------------------------------------------------------------- how much Python

CALLS_MOST = 60.0
"""Python functions that an operation of a forward and a backward calls, in the mean: 49 with torch 2.14.  It once was 104."""


def test_an_operation_on_tiles_calls_few_python_functions():
    for per_operation in on_ranks(2, _calls_per_operation, plan=Plan(space=[2, 1])):
        assert per_operation <= CALLS_MOST, f"{per_operation} Python calls"


class _Gated(nn.Module):
    """A convolution, a norm, and a gate from the mean of the image: operations on cut, on uncut and on mixed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.gate = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.conv(x)))
        return x + y * torch.sigmoid(self.gate(F.relu(y.mean((2, 3), keepdim=True))))


def _calls_per_operation(mesh: Mesh) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Gated() for _ in range(4)])
    image = tile(torch.randn(1, 4, 32, 32), mesh)
    counted = [0]

    def count(frame: Any, event: str, value: Any) -> None:
        counted[0] += event == "call"

    def step() -> None:
        model(image).square().sum().backward()

    for _ in range(2):
        step()
    with _Operations() as operations:
        step()
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return counted[0] / operations.number


class _Operations(TorchDispatchMode):
    """Counts the operations that have a tiled tensor."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.number += TiledTensor in types
        return func(*args, **(kwargs or {}))
