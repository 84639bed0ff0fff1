"""Do optimizers and clipping look at whole tensors where ranks hold parts?  Three steps, as on one device in float64."""

from __future__ import annotations

import copy

import pytest
import timm.optim
import torch
from marks import few
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import Optimizer

import widefield as wf
from widefield.comm.mesh import Mesh, World
from widefield.config import OptimizerConfig
from widefield.parallel.parallelize import parallelize, share_states
from widefield.parallel.passes import backward_of
from widefield.plans import Plan
from widefield.sharded_state import gather_full_on_main, parts
from widefield.tiled.api import tile
from widefield.training.optimizer import build_optimizer
from widefield.training.state import load_optimizer_state, optimizer_state

PLANS = [
    Plan(channel=2),
    Plan(stage=2),
    Plan(shard=2),
    Plan(shard=2, sharding={"zero": 2}),
    Plan(shard=2, sharding={"zero": 1}),
    Plan(shard=2, space=[2, 1]),
    Plan(replicate=2, shard=2),
    Plan(stage=2, channel=2),
    Plan(replicate=2, stage=2),
    Plan(stage=2, shard=2, sharding={"zero": 1}),
]
OPTIMIZERS = {
    "sgd": {"name": "sgd", "nesterov": True, "weight_decay": 0.1},
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "lars": {"name": "lars", "weight_decay": 0.1},
    "lars on all": {"name": "lars", "nesterov": True, "options": {"trust_coeff": 0.1, "always_adapt": True}},
    "larc": {"name": "lars", "weight_decay": 0.1, "options": {"trust_coeff": 0.2, "trust_clip": True, "dampening": 0.0}},
    "lamb": {"name": "lamb", "weight_decay": 0.1},
    "lamb on all": {"name": "lamb", "options": {"always_adapt": True, "trust_clip": True, "max_grad_norm": None}},
    "lamb with caution": {"name": "lamb", "weight_decay": 0.1, "options": {"caution": True, "grad_averaging": False}},
    "lamb apart": {"name": "lamb", "weight_decay": 0.1, "options": {"decoupled_decay": True, "bias_correction": False,
                                                                      "corrected_weight_decay": True}},
}  # fmt: skip
X, Y = (torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) for shape in ((2, 8, 6), (3,)))


def net() -> nn.Module:
    """Some ranks have no row of some weights; the largest layers are cut by channels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    ).double()  # fmt: skip


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() * 30  # gradients longer than LAMB's clipping lets through


def learnt(model: nn.Module, optimizer: Optimizer, mesh: Mesh, *, clip: float | None, steps: int = 3) -> nn.Module:
    each = 4 // mesh.copies
    mine = slice(mesh.copy * each, (mesh.copy + 1) * each)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        backward_of(model, tile(X[mine], mesh), Y[mine], loss_of=squares, scaled=lambda loss: loss * mesh.copies / 4)
        if clip is not None:
            wf.clip_grad_norm_(model, mesh, clip)
        optimizer.step()
    return model


def laid_out(mesh: Mesh, options: dict) -> tuple[nn.Module, Optimizer]:
    sample = torch.empty(4 // mesh.copies, *X.shape[1:], dtype=torch.float64, device="meta")
    model = parallelize(net(), mesh, sample=sample)
    return model, share_states(build_optimizer(OptimizerConfig(**options), model, 0.02, mesh), mesh)


def farthest(mesh: Mesh) -> dict[str, float]:
    """For each optimizer, clipped and not, how far the weights are off those of one device, relative to how far they went."""
    alone, found = Mesh(Plan(), World(), torch.device("cpu")), {}
    for name, options in OPTIMIZERS.items():
        for clip in (None, 0.3):
            whole, start = net(), dict(net().named_parameters())
            learnt(whole, build_optimizer(OptimizerConfig(**options), whole, 0.02), alone, clip=clip)
            model, optimizer = laid_out(mesh, options)
            learnt(model, optimizer, mesh, clip=clip)
            wholes = gather_full_on_main(model, mesh, dict(model.state_dict()))
            ends = {key: p.detach() for key, p in whole.named_parameters() if mesh.is_main}
            off = [(wholes[key] - end).abs().max() / (end - start[key].detach()).abs().max() for key, end in ends.items()]
            found[f"{name}, clip {clip}"] = max(map(float, off), default=0.0)
    return found


@pytest.mark.long
@pytest.mark.parametrize("plan", few(PLANS, PLANS[0], then=[PLANS[7]], is_sweep=True), ids=str)
def test_three_steps_on_parts_are_one_devices(plan):
    """A trust ratio of a slice, or of one stage's gradients, shows at 1e-2."""
    found = on_ranks(plan.ranks, farthest, plan=plan)[0]
    assert len(found) == 2 * len(OPTIMIZERS) and {name: off for name, off in found.items() if not off < 1e-9} == {}


def resumed(mesh: Mesh, name: str) -> float:
    """Two steps on one device, one on parts, against three on one device; the state goes over as a checkpoint has it."""
    alone = Mesh(Plan(), World(), torch.device("cpu"))
    whole = net()
    first = build_optimizer(OptimizerConfig(**OPTIMIZERS[name]), whole, 0.02)
    learnt(whole, first, alone, clip=None, steps=2)
    saved, weights = copy.deepcopy(optimizer_state(whole, first)), copy.deepcopy(whole.state_dict())
    learnt(whole, first, alone, clip=None, steps=1)
    model, optimizer = laid_out(mesh, OPTIMIZERS[name])
    model.load_state_dict(parts(model, weights))
    load_optimizer_state(model, optimizer, saved)
    learnt(model, optimizer, mesh, clip=None, steps=1)
    back = gather_full_on_main(model, mesh, dict(model.state_dict()))
    ends = {key: p.detach() for key, p in whole.named_parameters() if mesh.is_main}
    return max((float((back[key] - end).abs().max()) for key, end in ends.items()), default=0.0)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_a_state_of_one_device_goes_on_in_parts(name):
    assert max(on_ranks(2, resumed, name, plan=Plan(stage=2))) < 1e-12
    assert max(on_ranks(2, resumed, name, plan=Plan(shard=2))) < 1e-12


def said_by(mesh: Mesh, kind: type[Optimizer]) -> str:
    model = parallelize(net(), mesh, sample=torch.empty(4, *X.shape[1:], dtype=torch.float64, device="meta"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        optimizer = share_states(kind([p for p in model.parameters() if not p.is_meta], lr=0.01), mesh)
        learnt(model, optimizer, mesh, clip=None, steps=1)
    except NotImplementedError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True) if not a.is_meta)
        return str(error)
    return ""


def of_kinds(mesh: Mesh) -> dict[str, str]:
    class Mine(timm.optim.Lamb):
        """One's own."""

    return {kind.__name__: said_by(mesh, kind) for kind in (torch.optim.LBFGS, torch.optim.Adafactor, Mine, torch.optim.AdamW)}


@pytest.mark.parametrize(
    ("plan", "looks", "where"),
    [
        (
            Plan(channel=2),
            {"LBFGS": "all weights together", "Adafactor": "whole weights", "Mine": "whole weights"},
            "other ranks",
        ),
        (Plan(stage=2), {"LBFGS": "all weights together"}, "other ranks hold parts of this model"),
        (Plan(shard=2, sharding={"zero": 1}), {"LBFGS": "all weights together"}, "with sharding.zero=1 each rank steps some"),
    ],
    ids=str,
)
def test_optimizers_that_need_more_than_a_part_are_refused(plan, looks, where):
    for said in on_ranks(2, of_kinds, plan=plan):
        for kind, words in said.items():
            wanted = f"{kind} looks at {looks[kind]} in each step, and {where}" if kind in looks else ""
            assert words.startswith(wanted) and bool(words) == bool(wanted), (kind, words)


def clipped_to(mesh: Mesh, most: float) -> str:
    try:
        return str(float(wf.clip_grad_norm_(net(), mesh, most)))
    except ValueError as error:
        return str(error)


def test_a_norm_to_clip_to_is_above_zero():
    alone = Mesh(Plan(), World(), torch.device("cpu"))
    assert clipped_to(alone, 0.0) == "max_norm=0.0 would leave no gradient; give a norm above 0"
    assert "max_norm=nan" in clipped_to(alone, float("nan")) and clipped_to(alone, 1.0) == "0.0"
