"""Do messages of channels bring what they should, and is each one's gradient its adjoint?"""

from __future__ import annotations

import devices
import numpy as np
import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks

from widefield.plans import Plan
from widefield.tensor_parallel.collectives import (
    CopyToRanks,
    Exchange,
    GatherFromRanks,
    Ranks,
    ReduceFromRanks,
    Reduction,
    ScatterToRanks,
)
from widefield.tensor_parallel.placement import Shard

PARTS = {
    "in order": [[0, 1, 2], [3, 4, 5]],
    "uneven": [[0, 1, 2, 3, 4], [5]],
    "of heads": [[0, 1, 4], [2, 3, 5]],
    "every second": [[0, 2, 4], [1, 3, 5]],
}


def ranks_of(mesh) -> Ranks:
    return Ranks(mesh.channel, mesh.plan.channel, mesh.channel_group)


def kept_and_fetched(mesh, held, dim):
    torch.manual_seed(0)
    shape = [2, 3, 4]
    shape[dim] = 6
    whole = torch.randn(shape, dtype=torch.float64)
    exchange = Exchange(Shard(dim, [np.array(indices) for indices in held]), ranks_of(mesh))
    own = exchange.take_shard(whole)
    assert torch.equal(own, whole.index_select(dim, torch.tensor(held[mesh.channel])))
    assert torch.equal(exchange.gather(own), whole)


@on_gpu_too
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.cpu), 1, pytest.param(2, marks=pytest.mark.cpu)])
@pytest.mark.parametrize("held", PARTS.values(), ids=PARTS)
def test_a_part_is_kept_of_a_whole_and_the_whole_fetched_of_parts(held, dim):
    on_ranks(2, kept_and_fetched, held, dim, plan=Plan(channel=2))


def adjoint(mesh, kind):
    """<F x, y> = <x, F' y>, each side added up over what ranks have: a whole counts once, what ranks bring counts each."""
    torch.manual_seed(1)
    ranks, whole = ranks_of(mesh), torch.randn(4, 6, dtype=torch.float64)
    exchange = Exchange(Shard(1, [np.array(indices) for indices in PARTS["of heads"]]), ranks)
    torch.manual_seed(2 + mesh.rank)
    own = torch.randn(4, 6, dtype=torch.float64)
    x = {"keep": whole, "enter": whole, "fetch": exchange.take_shard(own), "add": own}[kind].clone().requires_grad_()
    out = {
        "keep": lambda: ScatterToRanks.apply(x, exchange), "fetch": lambda: GatherFromRanks.apply(x, exchange),
        "enter": lambda: CopyToRanks.apply(x, Reduction(ranks)), "add": lambda: ReduceFromRanks.apply(x, Reduction(ranks)),
    }[kind]()  # fmt: skip
    torch.manual_seed(7 if kind in ("fetch", "add") else 8 + mesh.rank)  # the gradient of a whole is the same on all ranks
    y = torch.randn(out.shape, dtype=torch.float64)
    out.backward(y)
    left, right = (out.detach() * y).sum(), (x.detach() * x.grad).sum()
    left = left if kind in ("fetch", "add") else mesh.sum_(left)
    right = right if kind in ("keep", "enter") else mesh.sum_(right)
    devices.close(left, right)
    assert left.abs() > 1e-3


@on_gpu_too
@pytest.mark.parametrize("kind", ["keep", "fetch", "enter", "add"])
def test_gradients_are_adjoints(kind):
    on_ranks(2, adjoint, kind, plan=Plan(channel=2))


def in_memory_order(mesh):
    x = (torch.arange(120.0).view(2, 3, 4, 5) + mesh.rank).requires_grad_()
    own = x.to(memory_format=torch.channels_last) if mesh.rank else x  # as a layer of one channel alone may lay it
    adding = Reduction(ranks_of(mesh), (0, 2, 3, 1))
    out = ReduceFromRanks.apply(own, adding)
    assert torch.equal(out, 2 * torch.arange(120.0).view(2, 3, 4, 5) + 1)
    entered = CopyToRanks.apply(x, adding)
    entered.backward(own.detach())
    assert torch.equal(x.grad, out)
    return out.is_contiguous(memory_format=torch.channels_last)


@on_gpu_too
def test_what_lies_in_other_orders_is_added_up_in_the_order_of_the_whole():
    assert on_ranks(2, in_memory_order, plan=Plan(channel=2)) == [True] * 2
