"""LARS and LAMB for sharded weights: their steps depend on norms of full tensors.

timm's classes compute norms of the tensors that they have.  For shards they get the steps below, with timm's arguments, state
and arithmetic, and norms that are summed over ranks: one message for all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from widefield import sharded_state
from widefield.comm.mesh import Mesh
from widefield.parallel.optimizer_steps import STEPS_PARTS

Sums = Callable[[Mapping[Tensor, Sequence[Tensor]], int], dict[Tensor, Tensor]]
"""Sums numbers of shards over ranks: (by parameter, its numbers; how many these are) -> by parameter, the sums for the full
parameter.  Every rank calls it, whichever parameters it steps."""


def for_shards(optimizer: Optimizer, model: nn.Module, mesh: Mesh) -> Optimizer:
    """Make timm's Lars or Lamb use norms of full tensors where weights are sharded; returns the same optimizer."""
    step = {"Lars": _step_lars, "Lamb": _step_lamb}.get(type(optimizer).__name__)
    if step is not None and sharded_state.is_sharded(mesh):
        sums = _sums_over(model, mesh)

        @torch.no_grad()
        def run(self: Optimizer, closure: None = None) -> None:
            step(self, sums)

        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (kind,), {"step": Optimizer.profile_hook_step(run), STEPS_PARTS: True})
    return optimizer


def _sums_over(model: nn.Module, mesh: Mesh) -> Sums:
    names = {parameter: name for name, parameter in model.named_parameters()}
    shares_states = mesh.plan.shard > 1 and mesh.plan.sharding.zero == 1
    steppers = mesh.shards.size(mesh.shards.ndim - 1) if shares_states and mesh.shards is not None else 1

    def sums(numbers: Mapping[Tensor, Sequence[Tensor]], count: int) -> dict[Tensor, Tensor]:
        by_name = {names[parameter]: given for parameter, given in numbers.items()}
        found = sharded_state.sum_over_shards(model, mesh, by_name, count=count, steppers=steppers)
        return {parameter: found[name] for parameter, name in names.items()}

    return sums


def _square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(sharded_state.local(tensor), dtype=torch.float64).square()


def _stepped(optimizer: Optimizer) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """The parameters that this rank steps now, each with its group."""
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _ratio(weight: Tensor, gradient: Tensor, ratio: Tensor) -> Tensor:
    """The trust ratio, which is 1 where one of the norms is 0."""
    return torch.where((weight > 0) & (gradient > 0), ratio, 1.0)


def _adapts(group: dict[str, Any]) -> bool:
    return group["weight_decay"] != 0 or group["always_adapt"]


def _step_lars(optimizer: Optimizer, sums: Sums) -> None:
    """You et al. 2017, arXiv:1708.03888, as timm.optim.Lars computes it."""
    stepped = _stepped(optimizer)
    squares = sums({p: [_square(p), _square(p.grad)] for p, _ in stepped}, 2)
    for p, group in stepped:
        weight, gradient, decay = sharded_state.local(p), sharded_state.local(p.grad), group["weight_decay"]
        if _adapts(group):
            of_weight, of_gradient = squares[p].sqrt()
            ratio = group["trust_coeff"] * of_weight / (of_gradient + of_weight * decay + group["eps"])
            ratio = _ratio(of_weight, of_gradient, ratio)
            ratio = (ratio / group["lr"]).clamp(max=1.0) if group["trust_clip"] else ratio
            gradient = gradient.add(weight, alpha=decay).mul_(ratio.to(weight))
        if group["momentum"] != 0:
            gradient = _with_momentum(optimizer.state[p], p, gradient, group)
        weight.add_(gradient, alpha=-group["lr"])


def _with_momentum(state: dict[str, Any], parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = torch.zeros_like(parameter)
        sharded_state.local(buffer).copy_(gradient)
    else:
        sharded_state.local(buffer).mul_(group["momentum"]).add_(gradient, alpha=1.0 - group["dampening"])
    return (
        gradient.add(sharded_state.local(buffer), alpha=group["momentum"]) if group["nesterov"] else sharded_state.local(buffer)
    )


def _step_lamb(optimizer: Optimizer, sums: Sums) -> None:
    """You et al. 2020, arXiv:1904.00962, as timm.optim.Lamb computes it."""
    stepped, clip = _stepped(optimizer), None
    most = optimizer.defaults["max_grad_norm"]
    if most is not None:
        squares = sums({p: [_square(p.grad)] for p, _ in stepped}, 1)
        clip = (torch.stack(list(squares.values())).sum().sqrt() / most).clamp(min=1.0)
    for group in optimizer.param_groups:
        group["step"] = group.get("step", torch.zeros(())) + 1  # a tensor, as timm wants it in a checkpoint
    updates = {p: _adam_update(optimizer.state[p], p, clip, group) for p, group in stepped}
    if any(group["caution"] for group in optimizer.param_groups):
        _apply_caution(stepped, updates, clip, sums)
    for p, group in stepped:
        _decay(sharded_state.local(p), updates[p], group)
    squares = sums({p: [_square(p), _square(update)] for p, update in updates.items()}, 2)
    for p, group in stepped:
        update = updates[p]
        if _adapts(group):
            of_weight, of_update = squares[p].sqrt()
            ratio = _ratio(of_weight, of_update, of_weight / of_update)
            update = update * (ratio.clamp(max=1.0) if group["trust_clip"] else ratio).to(update)
        sharded_state.local(p).add_(update, alpha=-group["lr"])


def _adam_update(state: dict[str, Any], parameter: Tensor, clip: Tensor | None, group: dict[str, Any]) -> Tensor:
    """Update the moments; returns Adam's update."""
    if not state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    mean, square = sharded_state.local(state["exp_avg"]), sharded_state.local(state["exp_avg_sq"])
    gradient, (beta1, beta2) = _clipped(parameter, clip), group["betas"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step = float(group["step"])
    first, second = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    return (mean / first).div_((square.sqrt() / second**0.5).add_(group["eps"]))


def _clipped(parameter: Tensor, clip: Tensor | None) -> Tensor:
    gradient = sharded_state.local(parameter.grad)  # type: ignore[arg-type]
    return gradient if clip is None else gradient / clip.to(gradient)


def _apply_caution(stepped: list[Any], updates: dict[Tensor, Tensor], clip: Tensor | None, sums: Sums) -> None:
    """Mask the elements of updates whose sign is not the gradient's, in groups that ask for it; arXiv:2411.16085."""
    masks = {p: updates[p] * _clipped(p, clip) > 0 for p, group in stepped if group["caution"]}
    sizes = {p: torch.tensor(float(mask.numel()), dtype=torch.float64) for p, mask in masks.items()}
    counts = sums({p: [mask.sum(dtype=torch.float64), sizes[p]] for p, mask in masks.items()}, 2)
    for p, mask in masks.items():
        share = (counts[p][0] / counts[p][1]).clamp(min=1e-3)
        updates[p].mul_(mask.to(updates[p]).div_(share.to(updates[p])))


def _decay(weight: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    decay, lr = group["weight_decay"], group["lr"]
    if decay == 0:
        return
    if not group.get("decoupled_decay", False):
        update.add_(weight, alpha=decay)
        return
    corrected = group.get("corrected_weight_decay", False)
    weight.mul_(1 - (lr**2 / group["max_lr_snapshot"] if corrected else lr) * decay)
