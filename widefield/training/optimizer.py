"""Optimizers by name, and the learning rate for a batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from widefield import sharded_state
from widefield.comm.mesh import Mesh
from widefield.config import OptimizerConfig
from widefield.naming import did_you_mean
from widefield.own_code import is_code
from widefield.training.own_optimizer import check_own, check_steps_shards, own_optimizer
from widefield.training.parameter_groups import Groups, layers_of, parameter_groups
from widefield.training.trust_ratio import for_shards


def _sgd(groups: Groups, config: OptimizerConfig, lr: float, fused: bool) -> torch.optim.Optimizer:
    options = {"momentum": config.momentum, "nesterov": config.nesterov, "fused": fused}
    return torch.optim.SGD(groups, lr=lr, **(options | config.options))


def _adamw(groups: Groups, config: OptimizerConfig, lr: float, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, **({"betas": tuple(config.betas), "fused": fused} | config.options))


def _lars(groups: Groups, config: OptimizerConfig, lr: float, fused: bool) -> torch.optim.Optimizer:
    options = {"momentum": config.momentum, "nesterov": config.nesterov}
    return _timm("lars").Lars(groups, lr=lr, **(options | config.options))


def _lamb(groups: Groups, config: OptimizerConfig, lr: float, fused: bool) -> torch.optim.Optimizer:
    return _timm("lamb").Lamb(groups, lr=lr, **({"betas": tuple(config.betas)} | config.options))


def _timm(name: str) -> Any:
    try:
        import timm.optim
    except ImportError:
        raise ValueError(
            f"optimizer.name={name} comes from timm, which is not installed; pip install 'widefield[timm]'"
        ) from None
    return timm.optim


Build = Callable[[Groups, OptimizerConfig, float, bool], torch.optim.Optimizer]
_OPTIMIZERS: dict[str, tuple[Build, float, str]] = {
    "sgd": (_sgd, 0.1, "linear"),  # Goyal et al. 2017, arXiv:1706.02677: 0.1 at 256
    "adamw": (_adamw, 1e-3, "sqrt"),
    "lars": (_lars, 0.5, "linear"),  # You et al. 2017, arXiv:1708.03888
    "lamb": (_lamb, 1.75e-3, "sqrt"),  # timm's A2 recipe: 5e-3 at 2,048
}
"""By name: the function that builds it, its learning rate at a batch of 256, and the rule by which that grows."""


def learning_rate(config: OptimizerConfig, batch: int) -> tuple[float, str | None]:
    """The peak learning rate for a global batch and, where the config does not set it, the reason.

    Of `find` it is 1, until it is found; see learning_rate_finder.py.
    ValueError: the config sets none, and the optimizer is a user's own without optimizer.base_lr and lr_rule.
    """
    if config.lr == "find":
        return 1.0, None
    if config.lr is not None:
        return config.lr, None
    own_lr, own_rule = (None, None) if is_code(config.name) else _known(config.name)[1:]
    base, rule = config.base_lr or own_lr, config.lr_rule or own_rule
    if base is None or rule is None:
        raise ValueError(
            f"optimizer.lr is not set, and optimizer.name={config.name} is no optimizer whose learning rate is known here; set "
            "optimizer.lr, or optimizer.base_lr and optimizer.lr_rule"
        )
    ratio = batch / config.base_batch_size
    lr = base * (ratio if rule == "linear" else ratio**0.5)
    return lr, f"optimizer.lr={lr:.6g}: {base:g} at batch {config.base_batch_size} by the {rule} rule, for batch {batch}"


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float,
    mesh: Mesh | None = None,
    *,
    layers: Mapping[str, int] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over the parameters of `model` with requires_grad, in torch's fused form where it has one.

    mesh: that of a parallelized model; LARS and LAMB then use norms of full tensors.
    layers: `layers_of` the model before it was parallelized, for `layer_decay`.
    Parameters of one dim (biases, normalization) have no weight decay unless `decay_norm_and_bias`.
    ValueError: no such optimizer, arguments it does not accept, or a model without parameters to train.
    NotImplementedError: weights are sharded, and a user's own optimizer steps a shard differently than the full weight.
    """
    build = own_optimizer(config.name) if is_code(config.name) else _known(config.name)[0]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    if not parameters:
        raise ValueError("the model has no parameter that takes gradients, so there is nothing to train")
    layers = layers_of(model) if layers is None and config.layer_decay is not None else layers
    groups = parameter_groups(named, config, lr, layers)
    in_parts = any(sharded_state.is_part(p) for p in parameters)
    fused = all(p.is_floating_point() and p.device.type in ("cuda", "cpu") for p in parameters)
    if in_parts and config.name == "sgd":  # of the fused optimizers, DTensor has only Adam
        fused = False
        config = config.model_copy(update={"options": {"foreach": True} | config.options})
    try:
        optimizer = build(groups, config, lr, fused)
    except (TypeError, ValueError) as error:  # ValueError: a number out of range
        raise ValueError(f"optimizer.options {config.options} do not fit '{config.name}': {error}") from None
    if is_code(config.name):
        check_own(optimizer, parameters, config.name)
        if mesh is not None and sharded_state.is_sharded(mesh):
            check_steps_shards(partial(_build_for_trial, build, config, lr), name=config.name, plan=mesh.plan)
    return optimizer if mesh is None else for_shards(optimizer, model, mesh)


def _build_for_trial(build: Build, config: OptimizerConfig, lr: float, parameters: list[nn.Parameter]) -> Any:
    """The optimizer of a few weights without names."""
    plain = config.model_copy(update={"groups": [], "layer_decay": None})
    return build(parameter_groups([("", parameter) for parameter in parameters], plain, lr), plain, lr, False)


def known_optimizers() -> list[tuple[str, str]]:
    """The names that optimizer.name can have, with their learning rates."""
    found = [(name, f"lr {lr:g} at a batch of 256, by the {rule} rule") for name, (_, lr, rule) in _OPTIMIZERS.items()]
    return [*found, ("package.module:callable", "Any class of torch.optim, or your own")]


def _known(name: str) -> tuple[Build, float, str]:
    if name not in _OPTIMIZERS:
        raise ValueError(
            f"there is no optimizer '{name}'{did_you_mean(name, _OPTIMIZERS)} It can be: {', '.join(_OPTIMIZERS)}, or "
            "package.module:callable, as torch.optim:RMSprop"
        )
    return _OPTIMIZERS[name]
