"""Lay a model out over a mesh: the plan's strategies in the order of their Phase.  The same module comes back."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from widefield.engine.mesh import Mesh
from widefield.naming import load
from widefield.plan import STRATEGY_OF_AXIS, Plan

_REASONS: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def parallelize(model: nn.Module, mesh: Mesh, *, rehearse: Callable[[], Tensor] | None = None) -> nn.Module:
    """Make `model`, which is on the mesh's device, train over the ranks of `mesh` as its plan says; the same module back.

    Names, hooks and `state_dict()` stay the model's, and `model(...)` runs in parallel in training and alone in evaluation.
    On one rank the model stays untouched.  Make the optimizer afterwards or before: the parameters stay the same objects.
    rehearse: runs the model on a small batch of this rank and returns a scalar loss; every rank gives one or none.
    Gradients are averaged over the data ranks: a loss summed over samples wants the factor copies / samples of all
    copies of the model (on tiles in space, several ranks are one copy).
    """
    if mesh.size == 1 and mesh.plan.data_strategy == "data":
        _REASONS[model] = ["one rank: nothing is exchanged"]
        return model
    _REASONS[model] = [why for strategy in _strategies(mesh.plan) for why in strategy.apply(model, mesh, rehearse=rehearse)]
    return model


def reasons(model: nn.Module) -> list[str]:
    """What `parallelize` chose for this model and why, a sentence each; none for a model it has not seen."""
    return list(_REASONS.get(model, []))


def _strategies(plan: Plan) -> list[ModuleType]:
    """The strategy files that the plan's axes call for, in the order of their Phase."""
    names = {plan.data_strategy}
    names |= {STRATEGY_OF_AXIS[axis] for axis, size in plan.axes.items() if size > 1 and axis != "replicate"}
    return sorted((load("widefield.engine.strategies", name) for name in names), key=lambda strategy: strategy.PHASE)
