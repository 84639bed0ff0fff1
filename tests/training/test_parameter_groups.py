"""Does each parameter get the learning rate and the weight decay that the recipe gives it, layer by layer as timm does?"""

import re

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torchvision import models as vision

from widefield.config import ModelConfig, OptimizerConfig
from widefield.models import build
from widefield.training.optimizer import build_optimizer
from widefield.training.parameter_groups import layers_of, parameter_groups


def by_name(net: nn.Module, **keys) -> dict[str, tuple[float, float]]:
    """(learning rate / the peak, weight decay) of every parameter."""
    config = OptimizerConfig(**keys)
    layers = layers_of(net) if config.layer_decay is not None else None
    groups = parameter_groups(net.named_parameters(), config, 0.1, layers)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {names[id(p)]: (group.get("lr_scale", 1.0), group["weight_decay"]) for group in groups for p in group["params"]}


def test_groups_have_rates_and_decays_of_their_own_and_the_first_that_fits_counts():
    net = nn.ModuleDict({"stem": nn.Conv2d(1, 2, 3), "body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    groups = [{"match": "head.bias", "lr": 0.05}, {"match": ["head", "ste*"], "lr": "10x", "weight_decay": 0.5}]
    assert by_name(net, weight_decay=0.2, groups=groups) == {
        "stem.weight": (10.0, 0.5), "stem.bias": (10.0, 0.0), "body.weight": (1.0, 0.2), "body.bias": (1.0, 0.0),
        "head.weight": (10.0, 0.5), "head.bias": (0.5, 0.0),
    }  # fmt: skip


def test_groups_without_rates_of_their_own_are_as_they_were():
    groups = build_optimizer(OptimizerConfig(weight_decay=0.1), nn.Linear(2, 2), 0.1).param_groups
    assert [("lr_scale" in group, group["weight_decay"]) for group in groups] == [(False, 0.1), (False, 0.0)]


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224"])
def test_layer_decay_is_timms_for_its_own_models(name):
    net = timm.create_model(name)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = param_groups_layer_decay(net, weight_decay=0.05, layer_decay=0.75)
    wanted = {names[id(p)]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert by_name(net, weight_decay=0.05, layer_decay=0.75) == wanted


def test_layers_of_other_models_are_the_members_of_containers_in_their_order():
    found = layers_of(vision.resnet18())
    stages = [found[f"layer{stage}.{block}.conv1.weight"] for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert [found["conv1.weight"], found["bn1.weight"], *stages, found["fc.weight"]] == [0, 0, *range(1, 10)]
    assert found["layer2.0.downsample.0.weight"] == found["layer2.0.conv2.weight"]


@pytest.mark.parametrize("name", ["unet", "smp/Unet", "monai/UNet"])
def test_every_parameter_is_in_a_layer_and_there_are_several(name):
    net = build(ModelConfig(name=name), in_channels=3, num_classes=4)
    found = layers_of(net)
    assert list(found) == [name for name, _ in net.named_parameters()]
    assert sorted(set(found.values())) == list(range(max(found.values()) + 1)) and max(found.values()) >= 6


def test_a_factor_multiplies_layer_decay_and_a_number_stands_for_itself():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    found = by_name(net, layer_decay=0.5, groups=[{"match": "0", "lr": "2x"}, {"match": "1", "lr": 0.3}])
    assert found == {
        f"{n}.{part}": (pytest.approx(scale), 0.0) for n, scale in enumerate((0.5, 3.0, 1.0)) for part in ("weight", "bias")
    }


def test_a_group_that_fits_nothing_is_refused_with_the_nearest():
    told = "optimizer.groups.0.match names 'hed', which fits nothing of the model; did you mean 'head'? Its parts are: head"
    with pytest.raises(ValueError, match=re.escape(told)):
        by_name(nn.ModuleDict({"head": nn.Linear(2, 2)}), groups=[{"match": "hed", "lr": "2x"}])


@pytest.mark.parametrize("lr", ["fast", "0x", "x", 0.0, -1.0])
def test_a_rate_that_is_none_is_refused(lr):
    with pytest.raises(ValueError, match="a learning rate above 0 is wanted, as 0.01, or a factor of optimizer.lr, as 0.1x"):
        OptimizerConfig(groups=[{"match": "head", "lr": lr}])


def test_lamb_steps_groups_of_several_rates_as_timms_own():
    torch.manual_seed(0)
    nets = [nn.Linear(3, 2).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = build_optimizer(OptimizerConfig(name="lamb", groups=[{"match": "weight", "lr": "0.5x"}]), nets[0], 0.1)
    theirs = timm.optim.Lamb([{"params": [nets[1].weight], "lr": 0.05}, {"params": [nets[1].bias]}], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            optimizer.zero_grad()
            net(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight, rtol=1e-12, atol=1e-14)
