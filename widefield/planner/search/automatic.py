"""`mesh.auto=true`: the plan is chosen before ranks start, and the run folder keeps what was chosen and what it should take.

planned.json in the run folder has the choice, its reasons, the machines and the prediction.  A run that is resumed on as many
ranks of the same devices with the same recipe goes on with it; on others it is planned anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from widefield.comm.devices import ranks_per_gpu
from widefield.config import RunConfig
from widefield.planner.cost.device_memory import blas_workspace
from widefield.planner.emulation import CannotEmulate
from widefield.planner.machines import Cluster, cluster_of
from widefield.planner.machines.catalogue import DEVICES, gpu_named
from widefield.planner.machines.cluster_text import measured_gpu
from widefield.planner.search.ask import image_of, on_device
from widefield.planner.search.estimate import PlanEstimate
from widefield.planner.search.layouts import layout_of
from widefield.planner.search.pricing import Pricing
from widefield.planner.search.reasons import changes, reasons, verdict
from widefield.planner.search.search import search
from widefield.plans import check_automatic
from widefield.training.given import NOTHING, Given
from widefield.training.planned import PlannedRun, read_planned, write_planned

SECONDS = 20.0
MOST_REASONS = 3
Say = Callable[[str], None]


def planned_run(config: RunConfig, folder: Path, *, ranks: int, nodes: int = 1, given: Given = NOTHING, say: Say) -> PlannedRun:
    """The plan of a run on `ranks` ranks of this machine's kind: the folder's, or a new one, which the folder gets.

    say: hears the choice and its reasons.
    ValueError: no plan fits, which one comes nearest, and what is missing; a GPU that the catalogue does not know.
    NotImplementedError: the model cannot be planned without running it.
    """
    check_automatic(config)
    cluster = cluster_here(ranks, nodes)
    key = _key(config, cluster)
    before = read_planned(folder)
    if before is not None and before.key == key:
        say(f"mesh.auto: as planned when this run began: {' '.join(before.overrides)}")
        return before
    if before is not None:
        say(f"mesh.auto: planned anew for {cluster.text}: the run was planned for {before.machines}, or the recipe has changed")
    found = _chosen(config, cluster, key, given)
    for text in found.reasons:
        say(f"mesh.auto: {text}")
    write_planned(folder, found)
    return found


def _chosen(config: RunConfig, cluster: Cluster, key: str, given: Given) -> PlannedRun:
    image, _, _ = image_of(config, given)
    pricing = Pricing(on_device(config, cluster, dims=len(image) - 1), cluster, given)
    try:
        found = search(pricing, cluster.ranks, image[1:], seconds=SECONDS, own=False)
    except CannotEmulate as error:
        raise NotImplementedError(
            f"mesh.auto=true plans a model by running its step without data, and this one needs numbers: {error}; set the "
            "axes of mesh yourself, and widefield bench measures which are fastest"
        ) from None
    said = verdict(found, f"one {cluster.device.name}")
    if found.best is None:
        raise ValueError(f"mesh.auto=true: {said}")
    text = [said, *reasons(found)[:MOST_REASONS], *changes(found)]
    return PlannedRun(key, cluster.text, list(found.best.layout.overrides()), text, prediction_of(found.best, cluster))


def predict_into(folder: Path, config: RunConfig, *, ranks: int, nodes: int = 1, given: Given = NOTHING) -> None:
    """Write what a run with its own plan should take into planned.json, unless it is there, or the plan was chosen.

    ValueError, NotImplementedError: it cannot be predicted.
    """
    before = read_planned(folder)
    if before is not None and (before.reasons or before.key == _key(config, cluster_here(ranks, nodes))):
        return
    write_planned(folder, predicted_run(config, ranks=ranks, nodes=nodes, given=given))


def predicted_run(config: RunConfig, *, ranks: int, nodes: int = 1, given: Given = NOTHING) -> PlannedRun:
    """What a run with the plan of its own recipe should take, with no reasons.

    ValueError: its plan is refused, or the catalogue does not know the GPU.  NotImplementedError: the model cannot be planned
    without running it.
    """
    if config.data.batch_if_known is None:
        raise ValueError("data.batch_size=auto is found as the run begins, and a step's memory and time depend on it")
    cluster = cluster_here(ranks, nodes)
    image, _, _ = image_of(config, given)
    layout = layout_of(config, ranks)
    estimate = Pricing(on_device(config, cluster, dims=len(image) - 1), cluster, given).estimate(layout)
    if estimate.state == "refused":
        raise ValueError(estimate.reason)
    return PlannedRun(_key(config, cluster), cluster.text, list(layout.overrides()), [], prediction_of(estimate, cluster))


def prediction_of(estimate: PlanEstimate, cluster: Cluster) -> dict[str, Any]:
    """For the record of a run: what rank 0 should hold, and how long a step should take."""
    first = min(estimate.memory, key=lambda rank: rank.rank)
    return {
        "machines": cluster.text, "device": cluster.device.name, "plan": estimate.name,
        "measured_device": cluster.calibration is not None, "peak_memory_bytes": first.peak_memory_bytes,
        "library_bytes": blas_workspace(cluster.device),
        "total_bytes": first.total_bytes, "parts": dict(first.parts), "where": first.where, "seconds": estimate.seconds,
        "seconds_low": estimate.low_seconds, "seconds_high": estimate.high_seconds,
        "seconds_by": dict(estimate.seconds_by), "message_bytes": estimate.message_bytes,
    }  # fmt: skip


def cluster_here(ranks: int, nodes: int = 1) -> Cluster:
    """`ranks` devices like those of this machine, on `nodes` machines.

    ValueError: a GPU that neither the catalogue nor a calibration knows.
    """
    each = max(1, ranks // nodes)
    if torch.cuda.is_available():
        return _of_gpus_here(nodes, each)
    return cluster_of(f"{nodes}x1xcpu:{each}" if nodes > 1 else f"cpu:{each}")


def _of_gpus_here(nodes: int, each: int) -> Cluster:
    """Devices like this machine's GPU, with its memory, or a rank's share of it."""
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    known = gpu_named(name, memory)
    measured = None if known is not None else measured_gpu(name.replace(" ", ""))
    if known is None and measured is None:
        raise ValueError(
            f"the catalogue of devices has no '{name}', so its plans have no price; measure it with widefield plan "
            "--calibrate, or set the axes of mesh yourself"
        )
    cluster = cluster_of(f"{nodes}x{each}x{(known or DEVICES['a100-80g']).name}", calibration=measured)
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory // ranks_per_gpu()))


def _key(config: RunConfig, cluster: Cluster) -> str:
    """Of all that the choice depends on: of the recipe how a step is made, and the machines; not how well they are measured."""
    chosen_by = config.model_dump(mode="json", exclude={"schedule", "log", "checkpoint", "evaluate", "guard", "seed"})
    text = f"{json.dumps(chosen_by, sort_keys=True)}\n{cluster.text}\n{cluster.device.name}"
    return hashlib.sha256(text.encode()).hexdigest()
