"""Runs the checks on all ranks, and judges what they saw.  Every rank calls it, and gets the same Checkup.

What needs no messages is looked at first.  Then the ranks meet; where they do not, each host tells what it saw alone.  An error
while looking is a finding, and no end.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from widefield.comm.mesh import Mesh, World, join, leave
from widefield.config import RunConfig
from widefield.config.recipe import recipe_path
from widefield.diagnosis.evidence import evidence_of_text
from widefield.diagnosis.finding import Checkup, Facts, Finding, by_host, who
from widefield.diagnosis.findings import diagnosis_of
from widefield.diagnosis.place import Surroundings
from widefield.naming import load_all
from widefield.planner.machines import cluster_of
from widefield.plans import Plan, check, plan_of
from widefield.quantity import count_of
from widefield.redaction import redacted

CHECKS = "widefield.diagnosis.checks"
MEETING_SECONDS = 60.0


@dataclass(frozen=True)
class CheckupRequest:
    """What the user names.  recipe: its file or packaged name, where there is one, and what was read of it.

    cluster: the machines that should be here.  folder: where the run is to be written; None: `runs`.
    """

    recipe: str | None = None
    config: RunConfig | None = None
    cluster: str | None = None
    folder: Path | None = None


def check_up(request: CheckupRequest, world: World, *, seconds: float = MEETING_SECONDS) -> Checkup:
    """What the checks find on the ranks of `world`, each of which calls it.  seconds: until all ranks must have met.

    ValueError: no such cluster.
    """
    cluster = None if request.cluster is None else cluster_of(request.cluster)
    recipe = None if request.recipe is None else recipe_path(request.recipe)
    folder = request.folder or Path("runs")
    return examine(Surroundings(world, folder, config=request.config, recipe=recipe, cluster=cluster), seconds=seconds)


def examine(surroundings: Surroundings, *, seconds: float = MEETING_SECONDS) -> Checkup:
    """Look at everything here.  Every rank calls it.  seconds: until all ranks must have met."""
    modules = sorted(load_all(CHECKS), key=lambda module: module.ORDER)
    seen = {module: _seen(module, surroundings) for module in modules if not module.MESSAGES}
    surroundings = _met(surroundings, seconds)
    seen |= {module: _seen(module, surroundings) for module in modules if module.TITLE == "meeting"}
    broken = surroundings.problem
    for module in modules:
        if module.MESSAGES and not broken:
            seen[module] = _seen(module, surroundings)
            broken = seen[module].get("could_not", "")
    everyone, broken = _gathered(surroundings, {module.TITLE: facts for module, facts in seen.items()}, broken)
    if surroundings.mesh is not None and not broken:
        leave(surroundings.mesh)
    findings = tuple(_judged(module, everyone, broken) for module in modules)
    return Checkup(_head(surroundings, everyone), findings, has_met=len(everyone) == surroundings.world.size)


def _seen(module: ModuleType, surroundings: Surroundings) -> dict[str, Any]:
    """What this rank sees of a check; `could_not` where it cannot look."""
    try:
        return module.look(surroundings)
    except Exception as error:  # a check that fails is told as one; no other has to suffer from it
        return {"could_not": f"{type(error).__name__}: {error}"}


def _met(surroundings: Surroundings, seconds: float) -> Surroundings:
    """With a mesh of all ranks, or with the reason why they did not meet."""
    world = surroundings.world
    if world.size == 1:
        return replace(surroundings, mesh=join(world, Plan()))
    began = time.monotonic()
    try:
        mesh = join(world, _plan_of(surroundings), timeout_seconds=seconds)
        mesh.barrier()
    except Exception as error:
        return replace(surroundings, problem=_explained(str(error) or type(error).__name__))
    return replace(surroundings, mesh=mesh, met_seconds=time.monotonic() - began)


def _plan_of(surroundings: Surroundings) -> Plan:
    """The recipe's plan where it fits; else copies of the model."""
    size, config = surroundings.world.size, surroundings.config
    if config is not None:
        try:
            plan = plan_of(config, size)
            check(plan, ranks=size, samples_per_step=config.data.batch_if_known)
            return plan
        except (ValueError, NotImplementedError):  # told by the check of the recipe
            pass
    return Plan(replicate=size)


def _explained(error: str) -> str:
    """An error of torch or NCCL, with the remedy of a rule that knows it."""
    first = error.strip().splitlines()[0]
    causes = [failure for failure in diagnosis_of(evidence_of_text(error)).failures if failure.kind == "cause"]
    return f"{redacted(first)}{f'. {causes[0].title}: {causes[0].remedy}' if causes else ''}"


def _gathered(surroundings: Surroundings, seen: dict[str, Any], broken: str) -> tuple[list[dict[str, Any]], str]:
    """What each rank saw, by the checks' titles, and why messages failed; only this rank's where they did."""
    own = {"rank": surroundings.world.rank, "host": socket.gethostname(), "seen": seen, "broken": broken}
    mesh = surroundings.mesh
    if mesh is None or broken:
        return [own], broken
    try:
        everyone = _all_of(mesh, own)
    except Exception as error:
        return [own], _explained(str(error))
    return everyone, next((one["broken"] for one in everyone if one["broken"]), "")


def _all_of(mesh: Mesh, own: dict[str, Any]) -> list[dict[str, Any]]:
    return mesh.gather_objects(own)


def _judged(module: ModuleType, everyone: Sequence[dict[str, Any]], broken: str) -> Finding:
    facts: list[Facts] = [{**one["seen"][module.TITLE], "rank": one["rank"], "host": one["host"]}
                          for one in everyone if module.TITLE in one["seen"]]  # fmt: skip
    errors = [one for one in facts if "could_not" in one]
    if errors:
        finding = Finding(
            "warn", f"rank {errors[0]['rank']} on {who(errors)} could not look: {redacted(errors[0]['could_not'])}"
        )
    elif not facts:
        finding = Finding("not here", f"needs messages between ranks, which failed: {redacted(broken)}")
    else:
        finding = module.judge(facts)
    in_order = finding.state in ("ok", "not here")
    return replace(finding, check=module.TITLE, remedy="" if in_order else finding.remedy)


def _head(surroundings: Surroundings, everyone: Sequence[dict[str, Any]]) -> str:
    hosts, size = by_host(everyone), surroundings.world.size
    if len(everyone) < size:
        one = everyone[0]
        return f"widefield doctor: rank {one['rank']} of {size} on {one['host']}, alone, as the ranks did not meet"
    return f"widefield doctor: {count_of(size, 'rank')} on {count_of(len(hosts), 'host')} ({who(everyone)})"
