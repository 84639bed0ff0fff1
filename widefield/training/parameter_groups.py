"""Groups of an optimizer: weight decay for matrices alone, learning rates by name, and layer-wise decay of the learning rate.

A group's `lr_scale` is its learning rate / that of the schedule; groups without one have the schedule's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from widefield.config import OptimizerConfig
from widefield.config.optimizer import GroupConfig
from widefield.training.name_patterns import fitting

Groups = list[dict[str, Any]]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, lr: float, layers: Mapping[str, int] | None = None
) -> Groups:
    """The groups of these parameters: first those with weight decay, then those without.

    lr: the peak learning rate.  layers: of each parameter, the number of its layer, for `layer_decay`; see `layers_of`.
    ValueError: a pattern of `optimizer.groups` that fits none of them.
    """
    named = list(named)
    rules = _rules(named, config)
    found: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in sorted(named, key=lambda one: not _decays(one[1], config)):
        rule = rules.get(name)
        decay = config.weight_decay if rule is None or rule.weight_decay is None else rule.weight_decay
        decay = decay if _decays(parameter, config) else 0.0
        scale = _scale(name, rule, config, lr, layers)
        more = {} if scale == 1.0 else {"lr_scale": scale, "lr": lr * scale}
        group = found.setdefault((decay, scale, _decays(parameter, config)), {"params": [], "weight_decay": decay} | more)
        group["params"].append(parameter)
    return list(found.values())


def _decays(parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    return parameter.ndim > 1 or config.decay_norm_and_bias


def _rules(named: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> dict[str, GroupConfig]:
    """The entry of `optimizer.groups` that each parameter is in: the first that fits."""
    rules: dict[str, GroupConfig] = {}
    names = [name for name, _ in named]
    for number, rule in enumerate(config.groups):
        for name in fitting(names, rule.match, field=f"optimizer.groups.{number}.match"):
            rules.setdefault(name, rule)
    return rules


def _scale(name: str, rule: GroupConfig | None, config: OptimizerConfig, lr: float, layers: Mapping[str, int] | None) -> float:
    of_rule = None if rule is None else rule.lr
    if isinstance(of_rule, float | int):
        if config.lr == "find":
            raise ValueError(f"optimizer.groups has lr: {of_rule:g} and optimizer.lr is to be found; give a factor, as 0.1x")
        return of_rule / lr
    scale = 1.0 if of_rule is None else float(of_rule.removesuffix("x"))
    if config.layer_decay is not None:
        assert layers is not None, "they are known where layer_decay is set"
        scale *= config.layer_decay ** (max(layers.values()) - layers[name])
    return scale


# ---------------------------------------------------------------------------------------------- layers


def layers_of(model: nn.Module) -> dict[str, int]:
    """The number of the layer that each parameter is in, from 0 at the image, for layer-wise decay.

    As timm groups its own models.  Elsewhere layers are the members of containers, in the order of the model's modules; one
    without matrices (a normalization) goes with the layer before it.
    """
    matcher = getattr(model, "group_matcher", None)
    if callable(matcher):
        from timm.models import group_parameters

        return dict(group_parameters(model, matcher(coarse=False), reverse=True))
    layers: dict[int, int] = {}
    number = -1
    for module in _layers(model):
        own = [parameter for parameter in module.parameters() if id(parameter) not in layers]
        number += number < 0 or any(parameter.ndim > 1 for parameter in own)
        layers |= {id(parameter): number for parameter in own}
    return {name: layers[id(parameter)] for name, parameter in model.named_parameters()}


def _layers(module: nn.Module, is_whole: bool = True) -> Iterable[nn.Module]:
    """Modules that are layers: those below containers, and below modules that consist of containers for the most part."""
    children = list(module.children())
    in_containers = sum(_size(child) for child in children if isinstance(child, CONTAINERS))
    if children and (is_whole or isinstance(module, CONTAINERS) or in_containers > _size(module) / 2):
        for child in children:
            yield from _layers(child, is_whole=False)
        if is_whole or any(True for _ in module.parameters(recurse=False)):
            yield module  # parameters of its own, after those of its parts
    elif any(True for _ in module.parameters()):
        yield module


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
