"""Does every mix of strategies train as one device does?  Nets of each kind, three optimizer steps, in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from devices import on_gpu_too
from marks import LONG_ON_CPU, few
from monai.networks.nets import UNet
from ranks import on_ranks
from torch import nn

from widefield.config import ModelConfig, PipelineConfig, ShardingConfig
from widefield.models import build
from widefield.plans import Plan
from widefield.tensor_parallel import search
from widefield.verification.training import compare_training
from widefield.verification.verdict import Verdict


def resnet() -> nn.Module:
    return timm.create_model("resnet18", in_chans=2, num_classes=5, channels=[8, 12, 16, 20], stem_width=8)


def unet(norm: str = "batch") -> nn.Module:
    options = {"widths": [8, 12, 16], "norm": norm}
    return build(ModelConfig(name="unet", options=options), in_channels=2, num_classes=3)


def volume() -> nn.Module:
    return UNet(3, 2, 3, channels=(6, 8, 12), strides=(2, 2), num_res_units=1, norm="batch")


def convnext() -> nn.Module:
    return timm.create_model("convnext_atto", in_chans=2, num_classes=5, dims=(8, 12, 16, 20), depths=(1, 1, 2, 1))


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", in_chans=2, num_classes=5, img_size=32, patch_size=8, embed_dim=24, num_heads=4, depth=2
    )


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (resnet, (6, 2, 45, 52)),
    "unet": (unet, (6, 2, 21, 18)),
    "volume": (volume, (4, 2, 12, 8, 20)),
    "convnext": (convnext, (6, 2, 64, 48)),
    "vit": (vit, (6, 2, 32, 32)),
}
ZERO = {zero: ShardingConfig(zero=zero) for zero in (1, 2, 3)}
PLANS: dict[str, Plan] = {
    "replicate": Plan(replicate=2),
    "zero1": Plan(shard=2, sharding=ZERO[1]),
    "zero2": Plan(shard=2, sharding=ZERO[2]),
    "zero3": Plan(shard=2),
    "space": Plan(space=[2, 1]),
    "channel": Plan(channel=2),
    "channel of 3": Plan(channel=3),
    "replicate x shard": Plan(replicate=2, shard=2),
    "replicate x space": Plan(replicate=2, space=[2, 1]),
    "replicate x channel": Plan(replicate=2, channel=2),
    "shard x space": Plan(shard=2, space=[1, 2]),
    "shard x channel": Plan(shard=2, channel=2),
    "zero1 x channel": Plan(shard=2, channel=2, sharding=ZERO[1]),
    "space x channel": Plan(space=[2, 1], channel=2),
    "channel of 4": Plan(channel=4),
    "stage": Plan(stage=2),
    "stage of 3": Plan(stage=3),
    "replicate x stage": Plan(replicate=2, stage=2),
    "channel x stage": Plan(channel=2, stage=2),
    "zero1 x stage": Plan(shard=2, stage=2, sharding=ZERO[1]),
    "space x stage": Plan(space=[2, 1], stage=2),
    "zero bubble, space x stage": Plan(space=[2, 1], stage=2, pipeline=PipelineConfig(schedule="zero_bubble", micro_batches=4)),
    "accumulate, replicate x channel": Plan(replicate=2, channel=2, accumulate=2),
}
LARGE: dict[str, Plan] = {
    "replicate x channel x stage": Plan(replicate=2, channel=2, stage=2),
    "replicate x space x channel": Plan(replicate=2, space=[2, 1], channel=2),
    "replicate x shard x channel": Plan(replicate=2, shard=2, channel=2),
    "shard x space x channel": Plan(shard=2, space=[1, 2], channel=2),
    "replicate x space x stage": Plan(replicate=2, space=[2, 1], stage=2),
    "space x channel x stage": Plan(space=[1, 2], channel=2, stage=2),
}


def trained(mesh, name: str, **options: Any) -> Verdict:
    """Small nets are cut as large ones are: every layer that can be."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    model = make()
    for parameter in model.parameters():
        if parameter.ndim and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    with mock.patch.multiple(search, WEIGHT_COST=1e5, WEIGHT_LEAST=0):
        return compare_training(model, shape, mesh, **options)


def spatial(plan: Plan, name: str) -> Plan:
    """The plan with a cut for each dim of the net's images."""
    return plan.model_copy(update={"space": [*plan.space, 1]}) if plan.space and name == "volume" else plan


def nets_of(mix: str) -> list[str]:
    """Every net for a strategy alone, two for a mix, each in its turn; EVERY_MIX=1 in the environment takes all.

    With accumulation, and with micro-batches, those without BatchNorm, which sees one of several at a time.
    """
    if PLANS[mix].accumulate > 1 or PLANS[mix].pipeline.micro_batches is not None:
        return ["convnext", "vit"]
    if PLANS[mix].ranks == 2 or os.environ.get("EVERY_MIX"):
        return list(NETS)
    names, turn = list(NETS), list(PLANS).index(mix)
    return [names[turn % len(names)], names[(turn + 2) % len(names)]]


def first_net(mix: str) -> str:
    """Each plan's net that is no sweep: the nets in turns."""
    nets = nets_of(mix)
    return nets[list(PLANS).index(mix) % len(nets)]


SHORT = ("replicate", "zero1", "zero2", "zero3", "space", "channel of 4", "stage of 3",
         "replicate x space", "replicate x stage")  # fmt: skip
"""The plans of which `make test` runs one net."""


@on_gpu_too
@pytest.mark.parametrize(
    ("mix", "name"),
    few(
        [(mix, name) for mix in PLANS for name in nets_of(mix)],
        *((mix, first_net(mix)) for mix in SHORT),
        then=[(mix, first_net(mix)) for mix in PLANS],
        is_sweep=True,
    ),
)
def test_three_steps_equal_one_devices(mix, name):
    plan = spatial(PLANS[mix], name)
    verdict = on_ranks(plan.ranks, trained, name, plan=plan, timeout_seconds=300)[0]
    assert verdict.ok, f"{mix}, {name}:\n{verdict}"
    assert {row.kind for row in verdict.rows} >= {"loss", "gradient", "weight", "output"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mix", "name"),
    few(
        zip(LARGE, ("vit", "resnet", "unet", "convnext", "resnet", "unet"), strict=True),
        ("replicate x channel x stage", "vit"),
        is_sweep=True,
    ),
)
def test_mixes_of_three_axes_on_eight_ranks(mix, name):
    verdict = on_ranks(8, trained, name, plan=LARGE[mix], timeout_seconds=300)[0]
    assert verdict.ok, f"{mix}, {name}:\n{verdict}"


SINGLE, LOW = {"dtype": torch.float32}, {"dtype": torch.float32, "low": torch.bfloat16}
MOST = {"float32": {"loss": 1e-6, "gradient": 1e-5, "weight": 1e-5, "output": 1e-5},
        "bfloat16": {"loss": 5e-3, "weight": 0.05, "output": 0.05}}  # fmt: skip
"""Of a tensor's largest value, after three steps.  float32's unit is 6e-8, bfloat16's 4e-3; under autocast to it, gradients
that are differences of large sums, as of a bias before a BatchNorm, are rounding alone: weights are compared in their place."""


def trained_low(mesh, name: str, options: dict[str, Any]) -> Verdict:
    return trained(mesh, name, **options)


@LONG_ON_CPU
@on_gpu_too
@pytest.mark.parametrize("precision", MOST)
@pytest.mark.parametrize(("mix", "name"), few([
    ("zero3", "convnext"), ("stage", "vit"), ("shard x channel", "vit"), ("space x channel", "vit"),
    ("channel x stage", "unet"), ("replicate x shard", "unet"),
], ("zero3", "convnext"), ("stage", "vit"), then=[("space x channel", "vit"), ("channel x stage", "unet")],
    is_sweep=True))  # fmt: skip
def test_low_precision_differs_by_its_rounding(mix, name, precision):
    options = SINGLE if precision == "float32" else LOW
    verdict = on_ranks(PLANS[mix].ranks, trained_low, name, options, plan=PLANS[mix], timeout_seconds=300)[0]
    assert verdict.refusal is None
    for kind, most in MOST[precision].items():
        errors = [row.error for row in verdict.rows if row.kind == kind]
        assert errors and max(errors) <= most, f"{kind}:\n{verdict}"
