"""Measures one plan: `python -m widefield.bench.measure ORDER.json` runs on every rank.

    real        from the recipe's first weights, `warmup` steps and then `steps` timed ones, on batches from the loader
    synthetic   the same learner goes on with the first step's batch in memory: the cost of a step without a loader
    recorded    a few more steps under torch's profiler, for the messages; these are not timed

Every rank times its own steps; the slowest counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from widefield.comm.mesh import AgreedError, Mesh, World, join
from widefield.comm.timeline import MessageLog, recorded, traffic_of
from widefield.config import read_config
from widefield.data.loader import Batch
from widefield.launchers import world_from
from widefield.own_code import look_in
from widefield.plans import check, plan_of, to_text
from widefield.refusal import is_ours
from widefield.streaming.storage.heap import keep_memory_of_steps
from widefield.training.assemble import Parts, assemble, learner_of, training_batches
from widefield.training.loop import Learner, NonFiniteLossError
from widefield.training.memory import peak_memory_bytes
from widefield.training.passes import Passes

RECORDED_STEPS = 3
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class TimedSteps:
    """The timed steps of one rank.  samples: over all ranks."""

    samples: int
    seconds: float
    data_seconds: float
    fastest_seconds: float
    slowest_seconds: float


def measure(order: dict[str, Any], world: World) -> dict[str, Any]:
    """Measure the plan of `order` on the ranks of `world`; every rank calls it and gets the same result.

    order: recipe, overrides, steps, warmup, trace (a folder for the traces of ranks), beside (the folder of the user's recipe,
        where code of their own is looked for).
    AgreedError, ValueError or NotImplementedError: the plan cannot run.
    """
    config = read_config(order["recipe"], order["overrides"], trust=True)  # bench's own copy of the user's
    look_in(Path(order["beside"]))
    plan = plan_of(config, world.size)
    check(plan, ranks=world.size, samples_per_step=config.data.batch)
    mesh = join(world, plan, timeout_seconds=TIMEOUT_SECONDS)
    at_start = 0 if mesh.device.type == "cuda" else peak_memory_bytes(mesh.device)  # Python, torch and its libraries
    keep_memory_of_steps(mesh)
    parts = mesh.together(lambda: assemble(config, mesh))
    learner, reasons = mesh.together(lambda: learner_of(parts))
    warmup = _warmup_of(order["warmup"], parts)
    real, batches, losses = _real(parts, learner, warmup, order["steps"])
    synthetic, _ = _timed(learner, lambda: batches, warmup=2, steps=order["steps"])
    memory = peak_memory_bytes(mesh.device) - at_start
    trace = Path(order["trace"]) / f"timeline-rank{world.rank}.json"
    traffic, seconds = _recorded(learner, batches, trace)
    own = {"real": real, "synthetic": synthetic, "traffic": traffic, "seconds": seconds, "memory": memory}
    return _together(mesh, learner, own) | {
        "plan": to_text(plan), "layout": str(plan), "ranks": world.size, "losses": losses, "warmup": warmup,
        "threads": torch.get_num_threads(), "workers": parts.workers, "reasons": [*parts.reasons, *reasons],
        "shape": list(batches[0].whole_shape or batches[0].image.shape[1:]), "precision": parts.arithmetic.precision,
        "parameters": sum(p.numel() for p in learner.model.parameters()), "device": _device_name(mesh.device),
        "samples_per_epoch": learner.steps.samples,
    }  # fmt: skip


def _warmup_of(least: int, parts: Parts) -> int:
    """Enough steps to use up the batches that the loader's workers had ready at the first step, two each."""
    return max(least, 1 + -(-2 * parts.workers // parts.config.gradient.accumulate))


def _real(parts: Parts, learner: Learner, warmup: int, steps: int) -> tuple[TimedSteps, list[Batch], list[float]]:
    """Timed steps on batches from the loader, the first step's batches, and the losses of all steps, warm-up included."""
    passes = Passes(training_batches(parts, first=0, last=warmup + steps), parts.config.gradient.accumulate)
    first: list[Batch] = []

    def next_batches() -> list[Batch]:
        batches = passes.next()
        if not first:
            first.extend(batches)
        return batches

    try:
        pace, losses = _timed(learner, next_batches, warmup=warmup, steps=steps)
    finally:
        passes.close()
    return pace, first, losses


def _timed(
    learner: Learner, next_batches: Callable[[], list[Batch]], *, warmup: int, steps: int
) -> tuple[TimedSteps, list[float]]:
    losses = [learner.learn(next_batches(), stop=False)[0] for _ in range(warmup)]
    _finish(learner.mesh)
    began, waited, laps, samples = time.perf_counter(), 0.0, [], 0
    before = began
    for _ in range(steps):
        samples += len(learner.steps.positions(learner.step))
        start = time.perf_counter()
        batches = next_batches()
        waited += time.perf_counter() - start
        losses.append(learner.learn(batches, stop=False)[0])
        now = time.perf_counter()
        laps.append(now - before)
        before = now
    _finish(learner.mesh)
    return TimedSteps(samples, time.perf_counter() - began, waited, min(laps), max(laps)), losses


def _finish(mesh: Mesh) -> None:
    """Wait for this rank's device, then for all ranks."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    mesh.barrier()


def _recorded(learner: Learner, batches: list[Batch], trace: Path) -> tuple[MessageLog, float]:
    """The messages of a step, and the seconds of a recorded step; the trace is kept."""
    _finish(learner.mesh)
    with recorded(trace):
        start = time.perf_counter()
        for _ in range(RECORDED_STEPS):
            learner.learn(batches, stop=False)
        if learner.mesh.device.type == "cuda":
            torch.cuda.synchronize(learner.mesh.device)
        seconds = time.perf_counter() - start
    found = traffic_of(trace)
    each = {name: round(count / RECORDED_STEPS) for name, count in (found.messages or {}).items()}
    share = MessageLog(found.busy_seconds / RECORDED_STEPS, round(found.handed_bytes / RECORDED_STEPS), each)
    return share, seconds / RECORDED_STEPS


def _together(mesh: Mesh, learner: Learner, own: dict[str, Any]) -> dict[str, Any]:
    """Combine the measurements of ranks: the slowest times, the largest memory, the mean share of communication."""
    all_ranks = mesh.gather_objects(own)
    traffics = [rank["traffic"] for rank in all_ranks]
    most = max(traffics, key=lambda traffic: traffic.handed_bytes)
    shares = [rank["traffic"].busy_seconds / rank["seconds"] for rank in all_ranks]
    return {
        "real": _slowest([rank["real"] for rank in all_ranks], learner.steps.batch),
        "synthetic": _slowest([rank["synthetic"] for rank in all_ranks], learner.steps.batch),
        "memory_bytes": max(rank["memory"] for rank in all_ranks),
        "communication_share": sum(shares) / len(shares),
        "handed_bytes": most.handed_bytes,
        "messages": most.messages,
    }


def _slowest(paces: list[TimedSteps], batch: int) -> dict[str, float]:
    """Seconds of a step of `batch` samples, and images per second, of the rank that took longest."""
    seconds = max(pace.seconds for pace in paces)
    waited = max(pace.data_seconds for pace in paces)
    steps = paces[0].samples / batch  # the last step of an epoch is a shorter one
    return {
        "images_per_second": paces[0].samples / seconds,
        "step_seconds": seconds / steps,
        "data_seconds": waited / steps,
        "fastest_seconds": min(pace.fastest_seconds for pace in paces),
        "slowest_seconds": max(pace.slowest_seconds for pace in paces),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# ---------------------------------------------------------------------------------------------- the process


def main(path: str) -> int:
    """The process of a rank: writes its result to `outcome.json` beside the order, and what it prints to `rankN.log`."""
    place = Path(path).parent
    world = world_from(os.environ) or World()
    world = replace(world, launcher="bench")
    _write_into(place / f"rank{world.rank}.log")
    try:
        outcome = {"state": "measured", **measure(json.loads(Path(path).read_text(encoding="utf-8")), world)}
    except NonFiniteLossError as error:
        outcome = {"state": "failed", "reason": str(error)}
    except (ValueError, NotImplementedError) as error:
        if not (isinstance(error, AgreedError) or is_ours(error)):
            raise
        outcome = {"state": "refused", "reason": str(error)}
    if world.rank == 0 or outcome["state"] != "measured":
        name = "outcome.json" if world.rank == 0 else f"outcome{world.rank}.json"
        (place / name).write_text(json.dumps(outcome), encoding="utf-8")
    return 0


def _write_into(log: Path) -> None:
    """Redirect stdout and stderr of this process into a file, since the terminal shows the table."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at a normal exit of Python, gloo's threads abort one process in ten
