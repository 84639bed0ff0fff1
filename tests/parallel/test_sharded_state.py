"""Do parts become wholes again, each on one rank, and wholes the same parts?"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

from widefield.parallel.parallelize import parallelize, share_states
from widefield.plans import Plan
from widefield.sharded_state import (
    RemoteTensor,
    are_finite,
    gather_full,
    gather_full_on_main,
    local,
    part,
    parts,
    register,
    shapes,
    total_norm,
)
from widefield.tensor_parallel import search

LAYOUTS = [Plan(shard=3), Plan(shard=2, space=[2]), Plan(replicate=2, shard=2)]


def net() -> nn.Module:
    """First dims of 5, 1 and 8: some ranks have no row of some."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.Conv1d(5, 1, 1), nn.Conv1d(1, 8, 3), nn.Conv1d(8, 8, 3)
    ).double()


def there_and_back(mesh):
    alone, model = net(), parallelize(net(), mesh)
    state = {"model": dict(model.state_dict()), "more": {"step": 3, "none": {}}}
    found = gather_full(model, mesh, state)
    assert found["more"] == state["more"] and list(found["model"]) == list(alone.state_dict())
    given = {name: value for name, value in found["model"].items() if not isinstance(value, RemoteTensor)}
    for name, value in alone.state_dict().items():
        here = found["model"][name]
        assert tuple(here.shape) == tuple(value.shape) and here.dtype == value.dtype
        assert name not in given or torch.equal(given[name], value), name
    assert shapes(model) == {name: list(value.shape) for name, value in alone.state_dict().items()}
    before = {name: local(value).clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            local(p).fill_(7.0)
    model.load_state_dict(parts(model, dict(alone.state_dict())))
    assert all(torch.equal(local(value), before[name]) for name, value in model.state_dict().items())
    assert torch.equal(local(part(model, "0.weight", alone[0].weight.detach())), before["0.weight"])
    return {name: value.nbytes for name, value in given.items() if name in dict(alone.named_parameters())}


@pytest.mark.parametrize("plan", LAYOUTS, ids=str)
def test_parts_become_wholes_on_one_rank_each_and_wholes_the_same_parts(plan):
    of_ranks = on_ranks(plan.ranks, there_and_back, plan=plan)
    names = sorted(name for given in of_ranks for name in given)
    assert names == sorted(name for name, _ in net().named_parameters()), "each parameter is whole on one rank"
    largest = max(p.nbytes for p in net().parameters())
    total = sum(p.nbytes for p in net().parameters())
    assert max(sum(given.values()) for given in of_ranks) <= total / plan.ranks + largest


def on_rank_zero(mesh):
    model = parallelize(net(), mesh)
    found = gather_full_on_main(model, mesh, dict(model.state_dict()))
    return all(type(found[name]) is Tensor and torch.equal(found[name], value) for name, value in net().state_dict().items())


@pytest.mark.parametrize("plan", LAYOUTS, ids=str)
def test_rank_zero_can_have_all_wholes(plan):
    assert on_ranks(plan.ranks, on_rank_zero, plan=plan)[0]


def optimizers(mesh):
    """What only some ranks have, all hear of."""
    model = parallelize(net(), mesh)
    optimizer = share_states(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), mesh)
    model(torch.ones(2, 2, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    mine = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    found = gather_full(model, mesh, {"state": mine})["state"]
    everything = gather_full_on_main(model, mesh, {"state": mine})["state"]
    whole = [name for name, values in everything.items() if isinstance(values["momentum_buffer"], Tensor)]
    return sorted(found), sorted(mine), [n for n in mine if found[n]["momentum_buffer"] is mine[n]["momentum_buffer"]], whole


def test_state_that_only_some_ranks_have_is_known_to_all_and_can_go_to_rank_zero():
    names = sorted(name for name, _ in net().named_parameters())
    results = on_ranks(2, optimizers, plan=Plan(shard=2, sharding={"zero": 1}))
    assert [found for found, *_ in results] == [names, names]
    assert sorted(name for _, mine, *_ in results for name in mine) == names
    assert all(mine == sorted(kept) for _, mine, kept, _ in results)
    assert sorted(results[0][3]) == names


@dataclass(frozen=True)
class Rows:
    """Two ranks hold the upper and the lower half of a weight, as a strategy that cuts channels has them."""

    shape: tuple[int, ...]
    rank: int
    num_shards: int = 2

    def whole(self, part: Tensor, receiver: int) -> Tensor | None:
        halves = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(halves, part.contiguous())
        return torch.cat(halves) if self.rank == receiver % 2 else None

    def part(self, whole: Tensor) -> Tensor:
        return whole.chunk(2)[self.rank]


def cut(mesh):
    """A mesh of two ranks along shard stands for any on which ranks hold parts."""
    torch.manual_seed(0)
    alone = nn.Linear(3, 4, bias=False)
    model = nn.Linear(3, 2, bias=False)
    register(model, {"weight": Rows((4, 3), mesh.rank)})
    model.load_state_dict(parts(model, dict(alone.state_dict())))
    assert torch.equal(model.weight, alone.weight.chunk(2)[mesh.rank]) and shapes(model) == {"weight": [4, 3]}
    found = gather_full_on_main(
        model, mesh, {"model": dict(model.state_dict()), "ema": {"module.weight": model.weight.detach()}}
    )
    norm = total_norm(model, mesh, {"weight": model.weight.detach()})
    torch.testing.assert_close(norm, alone.weight.detach().norm().double(), rtol=1e-6, atol=0)
    values = [found["model"]["weight"], found["ema"]["module.weight"]]
    return [torch.equal(value, alone.weight) if isinstance(value, Tensor) else value for value in values]


def test_a_strategy_tells_how_its_parts_become_wholes():
    first, second = on_ranks(2, cut, plan=Plan(shard=2))
    assert first == [True, True] and second == [RemoteTensor((4, 3), torch.float32, (3, 1))] * 2


def norms(mesh):
    """Gradients in parts, copied over replicate, and whole."""
    alone, model = net(), parallelize(net(), mesh)
    x = torch.randn(2 * mesh.copies, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone(x).square().mean().backward()
    model(x[2 * mesh.copy : 2 * mesh.copy + 2]).square().mean().backward()
    found = total_norm(model, mesh, {name: p.grad for name, p in model.named_parameters()})
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert are_finite(mesh, model.parameters())
    with torch.no_grad():
        local(model[3].weight)[:1].fill_(float("nan") if mesh.rank == 0 else 0.0)
    return are_finite(mesh, model.parameters())


@pytest.mark.parametrize("plan", [*LAYOUTS[::2], Plan(shard=3, sharding={"zero": 1})], ids=str)
def test_the_norm_is_the_wholes_and_every_rank_hears_of_a_nan(plan):
    assert on_ranks(plan.ranks, norms, plan=plan) == [False] * plan.ranks


class _Twice(nn.Module):
    """Its layer is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)])
        self.last = nn.ModuleList([self.layers[1]])

    def forward(self, image: Tensor) -> Tensor:
        return self.last[0](self.layers[0](image))


def _wholes_by_name(mesh):
    torch.manual_seed(0)
    alone = _Twice()
    before = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    with mock.patch.multiple(search, WEIGHT_COST=1e5, WEIGHT_LEAST=0):
        model = parallelize(alone, mesh, sample=torch.empty(2, 64, 9, 9, device="meta"))
    found = gather_full_on_main(model, mesh, dict(model.state_dict()))
    return [name for name, tensor in before.items() if mesh.is_main and not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("plan", [Plan(channel=2), Plan(stage=2)], ids=str)
def test_a_layer_of_several_names_is_whole_under_all_of_them(plan):
    assert on_ranks(2, _wholes_by_name, plan=plan) == [[], []]
