"""What of a model does not learn: `model.freeze`, until `model.unfreeze` says, and `model.frozen_batch_norm`.

A parameter that never learns takes no gradient (requires_grad is False).  One that learns later takes none either until then
where ranks have whole weights and the model runs as Python.  Elsewhere its gradient is computed and dropped: what a captured
model or a sharded weight sends is fixed at the beginning.  Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from widefield.config import ModelConfig
from widefield.plans import Plan
from widefield.private_torch.modules import BatchNorm
from widefield.training.name_patterns import fitting, modules_in_words


@dataclass(frozen=True)
class Freezing:
    """learns_after: of each parameter that learns later, the epochs before that.  stops_gradients: whether it takes none."""

    learns_after: Mapping[str, int] = field(default_factory=dict)
    stops_gradients: bool = True

    def begin_step(self, model: nn.Module, epoch: int) -> None:
        """Before the forward passes of a step.  epoch: epochs done."""
        if self.learns_after and self.stops_gradients:
            for name, parameter in model.named_parameters():
                if name in self.learns_after and not parameter.is_meta:
                    parameter.requires_grad_(epoch >= self.learns_after[name])

    def drop_gradients(self, model: nn.Module, epoch: int) -> None:
        """After the backward passes of a step: the optimizer leaves parameters without a gradient as they are."""
        if self.learns_after:
            for name, parameter in model.named_parameters():
                if epoch < self.learns_after.get(name, 0):
                    parameter.grad = None


def freeze(model: nn.Module, config: ModelConfig, plan: Plan) -> tuple[Freezing, list[str]]:
    """Freeze what the config names, before the model is parallelized; returns what learns later, and the reasons.

    ValueError: a pattern that fits nothing, parts to unfreeze that are not frozen, or nothing that learns in the first epoch.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = dict.fromkeys(fitting(names, config.freeze, field="model.freeze"))
    later = _later(list(frozen), config)
    norms = _freeze_batch_norms(model, config)
    later = {name: epoch for name, epoch in later.items() if not _is_in(name, norms)}
    for name, parameter in model.named_parameters():
        if _is_in(name, norms) or (name in frozen and name not in later):
            parameter.requires_grad_(False)
    if not any(p.requires_grad and name not in later for name, p in model.named_parameters()):
        raise ValueError(
            f"model.freeze={config.freeze} leaves nothing that learns in the first epoch; leave out what shall, as the head"
        )
    why_dropped = why_gradients_are_dropped(plan)
    reasons = _in_words(list(frozen), later, norms, why_dropped)
    return Freezing(later, stops_gradients=why_dropped is None), reasons


def _is_in(name: str, modules: list[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _later(frozen: list[str], config: ModelConfig) -> dict[str, int]:
    """The frozen parameters that learn later, with the epochs before that.  ValueError: one that is not frozen."""
    later: dict[str, int] = {}
    for epoch, patterns in sorted(config.unfreeze.items()):
        if not frozen:
            raise ValueError(f"model.unfreeze={config.unfreeze} and nothing is frozen; name what is in model.freeze")
        for name in fitting(frozen, patterns, field=f"model.unfreeze.{epoch}, of what model.freeze names,"):
            later.setdefault(name, epoch)
    return later


def _freeze_batch_norms(model: nn.Module, config: ModelConfig) -> list[str]:
    """Put the BatchNorm layers that the config names into evaluation mode, where they stay; returns their names."""
    asked = config.frozen_batch_norm
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BatchNorm)}
    if asked is False or asked == []:
        return []
    if not layers:
        raise ValueError(f"model.frozen_batch_norm={asked} and the model has no BatchNorm; leave it out")
    names = list(layers) if asked is True else fitting(list(layers), asked, field="model.frozen_batch_norm, of BatchNorms,")
    untracked = next((name for name in names if layers[name].running_mean is None), None)
    if untracked is not None:
        raise ValueError(f"model.frozen_batch_norm names '{untracked}', which has no running statistics; leave it out")
    for name in names:
        layers[name].eval()
    return names


def why_gradients_are_dropped(plan: Plan) -> str | None:
    """The part of the plan under which gradients are computed and dropped; None where none are."""
    if plan.shard > 1 and plan.sharding.zero > 1:
        return f"sharding.zero={plan.sharding.zero}"
    axis = next((axis for axis in ("channel", "stage") if getattr(plan, axis) > 1), None)
    return f"mesh.{axis}" if axis is not None else "stream" if plan.stream is not None else None


def _in_words(frozen: list[str], later: Mapping[str, int], norms: list[str], why_dropped: str | None) -> list[str]:
    never = [name for name in frozen if name not in later]
    told = [f"model.freeze: {len(never)} parameters never learn, in {modules_in_words(never)}"] if never else []
    for epoch in sorted(set(later.values())):
        names = [name for name, first in later.items() if first == epoch]
        after = "1 epoch" if epoch == 1 else f"{epoch} epochs"
        told.append(f"model.unfreeze: {len(names)} parameters learn after {after}, in {modules_in_words(names)}")
    if later and why_dropped is not None:
        told.append(f"  with {why_dropped} their gradients are computed until then, and dropped")
    if norms:
        told.append(f"model.frozen_batch_norm: {len(norms)} layers keep their running statistics and do not learn")
    return told
