"""Replicas that average their weights now and then: local SGD and what was made of it, see widefield/agreement/periodic.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from widefield.agreement import Descent, PeriodicAveraging, SlowMomentum
from widefield.agreement.descent import DescentState
from widefield.agreement.periodic import outer_step, slow_momentum_step
from widefield.comm.mesh import Mesh
from widefield.config.agreement import AgreementConfig
from widefield.sharded_state import opened
from widefield.training.replicas import Named, Replicas, copies


def algorithm_of(config: AgreementConfig) -> PeriodicAveraging:
    """What a recipe's section asks for."""
    outer: Descent | SlowMomentum | None = None
    rate, momentum = config.outer_rate, config.outer_momentum
    if config.name == "slowmo":
        outer = SlowMomentum(1.0 if rate is None else rate, 0.5 if momentum is None else momentum)
    elif config.name == "diloco":
        momentum = 0.9 if momentum is None else momentum
        outer = Descent(lr=0.7 if rate is None else rate, momentum=momentum, nesterov=momentum > 0)
    groups = tuple((period, size) for period, size in config.groups)
    return PeriodicAveraging(
        period=config.period, start=config.start, groups=groups, outer=outer, keeps_state=config.keeps_state
    )


class PeriodicReplicas(Replicas):
    """Replicas that average after the steps that the algorithm says."""

    def __init__(self, mesh: Mesh) -> None:
        self.algorithm = algorithm_of(mesh.plan.agreement)
        super().__init__(mesh, groups=[size for _, size in self.algorithm.groups])
        self._agreed: Named = {}
        """The weights that all agreed on last, where an outer step goes out from them."""
        self._outer: Named = {}
        """The momentum of the outer step."""

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().begin(model, optimizer)
        self._outer.clear()
        self._agreed = copies(self._weights()) if self.algorithm.outer else {}

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> None:
        """Average where the algorithm says so.  step: counted from 1, that was just done, with the learning rate lr."""
        size = self.algorithm.averages_after(step, self.mesh.plan.replicate)
        if size == 1:
            return
        share, total = self._share(size)
        weights, buffers = self._weights(), self._buffers()
        if not total:  # every step since was skipped
            return
        means, sent = self._means([*weights.values(), *buffers.values()], size, share)
        of_weights = dict(zip(weights, means, strict=False))
        self._note(step, size, of_weights, sent)
        is_of_all = size == self.mesh.plan.replicate
        if is_of_all and self.algorithm.has_outer_step(step):
            of_weights = {name: self._stepped(name, mean, lr) for name, mean in of_weights.items()}
        new = of_weights | dict(zip(buffers, means[len(weights) :], strict=True))
        for name, tensor in (weights | buffers).items():
            tensor.copy_(new[name])
        if is_of_all:
            self.count = 0.0
            self._agreed = copies(of_weights) if self.algorithm.outer else {}
            if not self.algorithm.keeps_state:
                self.optimizer.state.clear()

    def _stepped(self, name: str, mean: Tensor, lr: float) -> Tensor:
        """A weight after the outer step."""
        outer, agreed = self.algorithm.outer, self._agreed[name]
        if isinstance(outer, SlowMomentum):
            if lr == 0:  # the workers have not moved, and their velocity would be divided by it
                return mean
            new, self._outer[name] = slow_momentum_step(agreed, mean, self._outer.get(name), outer, lr)
            return new
        assert outer is not None, "only an algorithm with an outer optimizer has an outer step"
        state = DescentState(outer, first=self._outer.get(name))
        new = outer_step(agreed, mean, state, outer.rate(seen=0, count=1))
        if state.first is not None:
            self._outer[name] = state.first
        return new

    def further_state(self) -> dict[str, Any]:
        return {"agreed": copies(self._agreed), "outer": copies(self._outer)}

    def load_further(self, saved: Mapping[str, Any]) -> None:
        own = self._weights()
        self._agreed = {name: opened(value).to(own[name], copy=True) for name, value in saved["agreed"].items()}
        self._outer = {name: opened(value).to(own[name], copy=True) for name, value in saved["outer"].items()}
