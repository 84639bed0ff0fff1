"""Messages from one rank to another: do they arrive, also where they pass the host's memory on their way?"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks

from widefield.comm import point_to_point
from widefield.plans import Plan


def swapped(mesh, dtype):
    """What two ranks get of each other: rank r sends r + 1, and of several messages the first first."""
    peer = 1 - mesh.rank
    mine = [torch.full((3, 2), mesh.rank + 1, dtype=dtype) * (2 * n + 1) for n in range(2)]
    found = []
    for message in mine:
        buffer = torch.zeros(3, 2, dtype=dtype)
        for work in point_to_point.exchange({peer: message}, {peer: buffer}, mesh.group):
            work.wait()
        found.append(buffer.double().unique().tolist())
    return found


def by_the_host(mesh, dtype):
    """The same, where messages are copied to the host; a CPU's too, so that this is tried without a GPU."""
    with mock.patch.object(point_to_point, "passes_the_host", lambda group, device: True):
        return swapped(mesh, dtype)


@on_gpu_too
@pytest.mark.parametrize("body", [swapped, by_the_host])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_both_ranks_get_what_the_other_sent(body, dtype):
    assert on_ranks(2, body, dtype) == [[[2.0], [6.0]], [[1.0], [3.0]]]


def handed_on(mesh, by_host):
    """A tensor goes from rank 0 to rank 1 and on to rank 2."""
    with mock.patch.object(point_to_point, "passes_the_host", lambda group, device: by_host or device.type == "cuda"):
        tensor = torch.arange(5.0) if mesh.rank == 0 else torch.zeros(5)
        if mesh.rank > 0:
            point_to_point.receive(tensor, mesh.rank - 1, mesh.group)
        if mesh.rank < 2:
            point_to_point.send(tensor, mesh.rank + 1, mesh.group)
    return tensor.tolist()


@on_gpu_too
@pytest.mark.parametrize("by_host", [False, True], ids=["straight", "by the host"])
def test_a_tensor_is_handed_on(by_host):
    assert on_ranks(3, handed_on, by_host) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3


def into_one_that_learns(mesh):
    """A buffer that wants a gradient is filled without autograd's knowing."""
    buffer = torch.zeros(2, requires_grad=True)
    peer = 1 - mesh.rank
    with mock.patch.object(point_to_point, "passes_the_host", lambda group, device: True):
        for work in point_to_point.exchange({peer: torch.ones(2)}, {peer: buffer}, mesh.group):
            work.wait()
    return buffer.tolist(), buffer.requires_grad, buffer.grad_fn is None


@on_gpu_too
def test_what_arrives_has_no_history():
    assert on_ranks(2, into_one_that_learns, plan=Plan(replicate=2)) == [([1.0, 1.0], True, True)] * 2
