"""Can a number of ranks carry out a plan exactly?  This module checks the mesh, each strategy's file the rest.

A strategy is one file, widefield/parallel/strategies/NAME.py: how it changes a model, and which plans it refuses.  Such a file
imports torch, and is in a room above this one.  So it is loaded by name, and only when a plan is checked; ranks are about to
start or to join then, which takes torch anyway.  Reading a config and writing a plan load none of them; the two constants that
these need are read from the text of the files (config/strategies.py).  A second file per strategy, without torch, would save a
command that only starts ranks two seconds of imports, but would separate what a strategy does from what it refuses.
"""

from __future__ import annotations

from types import ModuleType

from widefield.config.strategies import STRATEGIES
from widefield.naming import load_all
from widefield.plans.plan import Plan
from widefield.plans.replicas import check_replicas, check_server


def check(plan: Plan, *, ranks: int, samples_per_step: int | None = None) -> None:
    """Refuse a plan that `ranks` ranks cannot carry out exactly.  Every rank calls this before any message.

    The first problem is raised: of the axes and ranks, then of the strategies in their CHECK_ORDER, then of the samples.
    ValueError: the user can change it.  NotImplementedError: no strategy can do it exactly.
    """
    strategies = load_all(STRATEGIES)
    _check_axes(plan, strategies)
    _check_ranks(plan, ranks)
    if plan.has_replicas:
        check_replicas(plan)
    if plan.has_server:
        check_server(plan)
    within = plan.of_replica() if plan.has_replicas or plan.has_server else plan
    for strategy in sorted(strategies, key=lambda strategy: strategy.CHECK_ORDER):
        strategy.check_plan(within)
    copies = plan.workers
    if samples_per_step is not None and samples_per_step < copies:
        raise ValueError(
            f"{copies} copies of the model share a batch of {samples_per_step} samples, so some would always be idle; "
            f"use data.batch_size={copies} or more, or fewer ranks on mesh.replicate"
        )


def _check_axes(plan: Plan, strategies: list[ModuleType]) -> None:
    have = {strategy.AXIS for strategy in strategies}
    for axis, size in plan.axes.items():
        if size > 1 and axis not in have:
            names = [strategy.__name__.rpartition(".")[2] for strategy in strategies]
            raise NotImplementedError(
                f"mesh.{axis}={plan.space if axis == 'space' else size} cannot run: parallel/strategies/ has no file with "
                f'AXIS = "{axis}". It has: {", ".join(names)}. Set mesh.{axis}={"[]" if axis == "space" else 1}.'
            )


def _check_ranks(plan: Plan, ranks: int) -> None:
    if plan.ranks == ranks:
        return
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.axes.items() if size > 1) or "every axis 1"
    others = plan.ranks // plan.replicate
    advice = f"set mesh.replicate={ranks // others}" if ranks % others == 0 else f"start a multiple of {others} ranks"
    raise ValueError(f"the mesh ({axes}) needs {plan.ranks} ranks and there are {ranks}; {advice}, or start {plan.ranks} ranks")
