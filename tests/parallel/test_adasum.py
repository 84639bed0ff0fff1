"""Adasum, and BatchNorm over groups of copies: what they compute, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from command import DIGITS, losses, run
from ranks import on_ranks
from torch import nn

from widefield.config import AgreementConfig
from widefield.parallel.parallelize import parallelize, reasons
from widefield.parallel.strategies._adasum import adasum
from widefield.plans import Plan, check


def test_orthogonal_gradients_are_added_and_equal_ones_averaged():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert adasum(a, b).tolist() == [3.0, 4.0]
    assert adasum(a, a).tolist() == [3.0, 0.0]
    assert adasum(a, torch.zeros(2)).tolist() == [3.0, 0.0] and adasum(torch.zeros(2), torch.zeros(2)).tolist() == [0.0, 0.0]


def test_a_pair_that_partly_agrees_is_what_the_paper_says():
    a, b = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([2.0, 0.0], dtype=torch.float64)
    # a.b = 2, |a|^2 = 2, |b|^2 = 4: a (1 - 2/4) + b (1 - 2/8) = (0.5, 0.5) + (1.5, 0)
    assert adasum(a, b).tolist() == [2.0, 0.5]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bucket_mib", [25.0, 1e-4])
def test_gradients_over_ranks_are_combined_layer_by_layer_in_a_tree(size, bucket_mib):
    plan = Plan(replicate=size, agreement="adasum", bucket_mib=bucket_mib)
    on_ranks(size, combined_as_by_hand, plan=plan)


def combined_as_by_hand(mesh):
    model = net()
    alone = net()
    parallelize(model, mesh)
    assert any("Adasum" in why for why in reasons(model))
    torch.manual_seed(mesh.rank)
    x = torch.randn(3, 4, dtype=torch.float64)
    for module in (model, alone):
        module(x).square().sum().backward()
    own = [p.grad for p in alone.parameters()]
    for layer, parameter in zip(zip(*mesh.gather_objects(own), strict=True), model.parameters(), strict=True):
        while len(layer) > 1:
            layer = [adasum(*layer[pair : pair + 2]) for pair in range(0, len(layer), 2)]
        torch.testing.assert_close(parameter.grad, layer[0], rtol=1e-12, atol=1e-12)  # float64, sums of 20 products


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (Plan(replicate=3), ValueError, "mesh.replicate=3 is no power of two; start 2, 4, 8"),
        (Plan(replicate=2, space=[2, 1]), NotImplementedError, "this mesh has space too, over which gradients are summed"),
        (Plan(replicate=2, compression="bf16"), ValueError, "gradient.compression=bf16 both say what travels"),
    ],
)
def test_adasum_refuses_what_it_cannot_combine(plan, error, words):
    with pytest.raises(error, match=words):
        check(plan.model_copy(update={"agreement": AgreementConfig(name="adasum")}), ranks=plan.ranks)


# ---------------------------------------------------------------------------------------------- groups of BatchNorm


def test_groups_of_copies_share_their_statistics_and_no_more():
    on_ranks(4, normalized_by_pairs, plan=Plan(replicate=4, batch_norm="averaged", batch_norm_group=2))


def normalized_by_pairs(mesh):
    """Against one device that runs ranks 0 and 1 as one batch and ranks 2 and 3 as another."""
    torch.manual_seed(0)
    shares = torch.randn(4, 3, 2, 5, 5, dtype=torch.float64)
    model, alone = normalized(), normalized()
    parallelize(model, mesh)
    assert (
        "BatchNorm: statistics are those of 2 neighbouring copies of 4; running statistics are averaged once per epoch"
        in reasons(model)
    )
    out = model(shares[mesh.rank])
    out.square().sum().backward()
    pairs = [alone_on(alone, shares[pair].flatten(0, 1)) for pair in ([0, 1], [2, 3])]
    expected, _ = pairs[mesh.rank // 2]
    torch.testing.assert_close(out, expected[3 * (mesh.rank % 2) :][:3], rtol=1e-12, atol=1e-12)  # float64, means of 150
    for number, parameter in enumerate(model.parameters()):
        mean = sum(gradients[number] for _, gradients in pairs) / 4
        torch.testing.assert_close(parameter.grad, mean, rtol=1e-10, atol=1e-10)


def normalized() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.SiLU()).double()


def alone_on(model, x):
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        ({"replicate": 4}, ValueError, "batch_norm=synchronized does not: .* set that, or batch_norm_group=1"),
        (
            {"replicate": 3, "batch_norm": "averaged"},
            ValueError,
            "cannot deal out 3 copies of the model evenly; take a divisor of 3",
        ),
        (
            {"replicate": 2, "shard": 2, "batch_norm": "averaged"},
            NotImplementedError,
            "this mesh has shard too; set batch_norm_group=1",
        ),
    ],
)
def test_groups_refuse_what_they_cannot_share(plan, error, words):
    made = Plan(**plan, batch_norm_group=2)
    with pytest.raises(error, match=words):
        check(made, ranks=made.ranks)


@pytest.mark.long
@pytest.mark.sweep
def test_a_run_takes_both_from_its_recipe_and_goes_on_where_it_stopped(tmp_path):
    words = [
        "mesh.replicate=2", "batch_norm=averaged", "batch_norm_group=2", "agreement=adasum", "schedule.warmup=0step",
        "precision=float64", "optimizer.lr=0.01", "evaluate.every=9step",
    ]  # fmt: skip
    words.append("schedule.name=constant")
    text = run("train", DIGITS, *words, "schedule.length=4step", "--run", tmp_path / "whole")
    assert "combined by Adasum" in text and "2 neighbouring copies of 2" in text and "trained to the end" in text
    run("train", DIGITS, *words, "schedule.length=2step", "--run", tmp_path / "parts")
    run("train", DIGITS, *words, "schedule.length=4step", "--run", tmp_path / "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 4
