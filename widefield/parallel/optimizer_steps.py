"""What a step of an optimizer needs where ranks hold parts of a model: norms over all of it, and optimizers that fit parts.

SGD, Adam and their kin step each number of a weight by itself, so that a part steps as the whole would.  Others look at whole
weights, or at all weights together: a rank with a part would step otherwise than one device does, and in silence.
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
"""Classes of torch, timm and others, by name, whose step on one number looks at other numbers of its weight."""
OF_ALL_WEIGHTS = {"LBFGS"}
"""Classes whose step on one weight looks at the other weights."""
STEPS_PARTS = "steps_parts"
"""The attribute of an optimizer's class that says that it adds up over ranks what it needs to know of wholes."""

_parts: WeakIdKeyDictionary = WeakIdKeyDictionary()


def clip_grad_norm_(model: nn.Module, mesh: Mesh, max_norm: float) -> Tensor:
    """Scale the gradients of `model` so that their norm, over all parameters and all who hold them, is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` for a model of any plan: torch's sees this rank's parts alone where `mesh.channel` or
    `mesh.stage` cut the model, and each rank would scale otherwise.
    model: as `parallelize` gave it, after the backward of a step.  mesh: the one it was laid out on.  Every rank calls it.
    Gives the norm before clipping, one number, equal on every rank.  ValueError: a norm that is not above 0.
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
    """From now on, refuse steps of optimizers that do not fit this rank's parts of `model`, of which `holding` was told."""
    told = sharded_state.registered(model)
    for name, parameter in model.named_parameters():
        if name in told:
            _parts[parameter] = tuple(told[name].shape) != tuple(parameter.shape)
    _start_refusing()


@cache
def _start_refusing() -> None:
    """Look at each step of any optimizer, from the first model in parts on."""
    register_optimizer_step_pre_hook(_refuse)


def refuse_unfit(optimizer: Optimizer, *, has_whole_weights: bool, where: str) -> None:
    """NotImplementedError where the optimizer's step needs more than this rank has.  where: who holds the rest."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    unfit = kinds & (OF_ALL_WEIGHTS if has_whole_weights else OF_ALL_WEIGHTS | OF_WHOLE_WEIGHTS)
    if unfit and not getattr(type(optimizer), STEPS_PARTS, False):
        looks = "all weights together" if unfit & OF_ALL_WEIGHTS else "whole weights"
        raise NotImplementedError(
            f"{type(optimizer).__name__} looks at {looks} in each step, and {where}, so ranks would step each in its own way; "
            "take an optimizer that steps each number by itself (SGD, AdamW), optimizer.name=lars or lamb in a recipe, or a "
            "plan whose ranks hold whole models"
        )


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if {kind.__name__ for kind in type(optimizer).__mro__}.isdisjoint(OF_WHOLE_WEIGHTS | OF_ALL_WEIGHTS):
        return
    own = [_parts[p] for group in optimizer.param_groups for p in group["params"] if p in _parts]
    if own:
        refuse_unfit(optimizer, has_whole_weights=not any(own), where="other ranks hold parts of this model")
