"""Optimizer steps of a model whose weights are sharded: the norm of all gradients, and which optimizers are exact on shards.

SGD, Adam and the like step each element of a weight by itself, so a shard steps as it does in the full weight.  Others use
norms or products of full weights, or of all weights: on a shard they would compute another step and raise no error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from widefield import sharded_state
from widefield.comm.mesh import Mesh

OF_WHOLE_WEIGHTS = {
    "Adafactor", "AdafactorBigVision", "AdamP", "Kron", "LARC", "LARS", "LAMB", "Lamb", "Lars", "Muon", "NovoGrad",
    "NvNovoGrad", "SGDP", "SOAP", "Shampoo", "DistributedShampoo",
}  # fmt: skip
"""Classes of torch, timm and others, by name, whose step on one element depends on other elements of the same weight."""
OF_ALL_WEIGHTS = {"LBFGS"}
"""Classes whose step on one weight depends on the other weights."""
STEPS_PARTS = "steps_parts"
"""An optimizer class with this attribute, set to True, reduces over ranks what it needs of full weights."""

_is_shard: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of each parameter of a watched model: whether it is a shard, and not the full weight."""


def clip_grad_norm_(model: nn.Module, mesh: Mesh, max_norm: float) -> Tensor:
    """Scale the gradients of `model` so that their 2-norm, over the full gradients of all parameters, is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` for a model under any plan: torch's sees only this rank's shards where `mesh.channel` or
    `mesh.stage` cut the model, and each rank would scale by another factor.
    model, mesh: as given to `parallelize`, after the last backward of a step.  Every rank calls it.
    Returns the norm before clipping, a tensor without dims, equal on every rank.  ValueError: `max_norm` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} would leave no gradient; give a norm above 0")
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if not sharded_state.is_sharded(mesh):
        return nn.utils.clip_grad_norm_(trained, max_norm)
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = sharded_state.total_norm(model, mesh, named)
    for gradient in map(sharded_state.local, named.values()):
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradient.device, gradient.dtype))  # as torch clips
    return norm


def watch(model: nn.Module) -> None:
    """From now on, refuse the steps of optimizers that are not exact on the shards of `model` that this rank has."""
    specs = sharded_state.registered(model)
    for name, parameter in model.named_parameters():
        if name in specs:
            _is_shard[parameter] = tuple(specs[name].shape) != tuple(parameter.shape)
    _start_refusing()


@cache
def _start_refusing() -> None:
    """Check each step of every optimizer, once, from the first model with sharded weights on."""
    register_optimizer_step_pre_hook(_refuse)


def refuse_unfit(optimizer: Optimizer, *, has_whole_weights: bool, where: str) -> None:
    """NotImplementedError: the optimizer's step needs more than this rank has.

    has_whole_weights: whether this rank has each of its weights in full.  where: a clause for the error, who holds the rest.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    unfit = kinds & (OF_ALL_WEIGHTS if has_whole_weights else OF_ALL_WEIGHTS | OF_WHOLE_WEIGHTS)
    if unfit and not getattr(type(optimizer), STEPS_PARTS, False):
        looks = "all weights together" if unfit & OF_ALL_WEIGHTS else "whole weights"
        raise NotImplementedError(
            f"{type(optimizer).__name__} looks at {looks} in each step, and {where}, so its steps would not be one device's; "
            "take an optimizer that steps each number by itself (SGD, AdamW), optimizer.name=lars or lamb in a recipe, or a "
            "plan whose ranks hold whole models"
        )


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if {kind.__name__ for kind in type(optimizer).__mro__}.isdisjoint(OF_WHOLE_WEIGHTS | OF_ALL_WEIGHTS):
        return
    stepped = [_is_shard[p] for group in optimizer.param_groups for p in group["params"] if p in _is_shard]
    if stepped:
        refuse_unfit(optimizer, has_whole_weights=not any(stepped), where="other ranks hold parts of this model")
