"""The state of a run in a checkpoint, and how a learner loads it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from widefield.parallel.strategies.data import hook_state, load_hook_state
from widefield.sharded_state import gather_full, load_full, local, opened
from widefield.training.checkpoint import Checkpoints, Found, not_ours
from widefield.training.loop import Learner
from widefield.training.staging import Changes, address_of
from widefield.training.state import load_optimizer_state, optimizer_state, random_state, shapes_of
from widefield.training.tensors import FormatError
from widefield.training.weight_average import weights_of


def state_of(learner: Learner) -> dict[str, Any]:
    """The state that does not depend on the number of ranks, with full tensors.  Every rank calls it."""
    state = {
        "model": dict(learner.model.state_dict()),
        "optimizer": _optimizer_state(learner),
        "scaler": learner.scaler.state_dict() | {name: one.state_dict() for name, one in learner.scalers.items()},
        "ema": {} if learner.ema is None else dict(learner.ema.state_dict()),
        "progress": {
            "step": learner.step,
            "samples": learner.steps.seen(learner.step),
            "samples_per_epoch": learner.steps.samples,
            "seed": learner.config.seed,
            "best": learner.best.state(),
            "lr": learner.lr,
            "guard": learner.guard.state(),
        },
    }
    return gather_full(learner.model, learner.mesh, state)


def _optimizer_state(learner: Learner) -> dict[str, Any]:
    state = optimizer_state(learner.model, learner.optimizer)
    return state if learner.replicas is None else learner.replicas.with_common_state(state)


def changes_of(learner: Learner) -> Changes | None:
    """When what `state_of` refers to changes: what the optimizer steps, in an update; buffers at any time.

    None, which is at any time, of replicas: while they are saved they hold the mean of all.
    """
    if learner.replicas is not None:
        return None
    optimizer = [value for values in learner.optimizer.state.values() for value in values.values()]
    averages = [] if learner.ema is None else list(learner.ema.module.parameters())
    trained = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
    others = [*learner.model.parameters(), *learner.model.buffers()]
    others += [] if learner.ema is None else [*learner.ema.parameters(), *learner.ema.buffers()]
    others += [value for group in learner.optimizer.param_groups for value in group.values()]
    steady = _addresses([*optimizer, *averages, *trained])
    return Changes(steady=steady - _addresses(learner.model.buffers()), live=steady | _addresses(others))


def _addresses(values: Iterable[Any]) -> frozenset[int]:
    return frozenset(address_of(local(value)) for value in values if isinstance(value, Tensor) and not value.is_meta)


def own_state(learner: Learner) -> dict[str, Any]:
    """The state that differs between ranks: random states, the order of images, of compression, of replicas."""
    hook, replicas = hook_state(learner.model), learner.replicas
    further = {"hook": hook} if hook is not None else {}
    further |= {"replica": replicas.state(_average_of(learner))} if replicas is not None else {}
    return {"random": random_state(), "order": learner.order} | further


def _average_of(learner: Learner) -> dict[str, Tensor]:
    """The weights of the moving average by name, where there is one."""
    return {} if learner.ema is None else dict(learner.ema.module.named_parameters())


def resume(learner: Learner, checkpoints: Checkpoints, found: Found) -> dict[str, Any] | None:
    """Load a checkpoint into the learner.  Returns this rank's `own_state`, whose random states the caller loads last.

    Each rank reads its own shards.  Where another number of ranks saved, it is None if copies draw random numbers each by
    itself; else all ranks draw the same, and get the states of rank 0.
    ValueError: the checkpoint does not fit the model, data or optimizer.
    """
    moved = found.about.ranks != learner.mesh.size
    state, own = checkpoints.load(found, model=shapes_of(learner.model), unread=True)
    if moved and learner.mesh.plan.is_one_batch:
        own = checkpoints.own_of_first(found)
    check_state(state, found, own=own)
    try:
        _load(learner, state, found)
    except FormatError as error:  # tensors are read only now
        raise ValueError(not_ours(found, error)) from None
    if learner.replicas is not None:
        saved = None if own is None or moved else own.get("replica")
        learner.replicas.load(saved, _average_of(learner))
    if own is not None and not moved:
        learner.order = own["order"]
        load_hook_state(learner.model, own.get("hook"))
    return own


def _load(learner: Learner, state: dict[str, Any], found: Found) -> None:
    """Load what all ranks share."""
    learner.step = _step_after(learner, state["progress"], found.folder)
    learner.best.load(state["progress"].get("best") or {})
    learner.guard.load(state["progress"].get("guard"))
    if learner.config.optimizer.lr == "find":
        learner.lr = _found_rate(state["progress"], found.folder)
    load_full(learner.model, state["model"])
    load_optimizer_state(learner.model, learner.optimizer, state["optimizer"])
    learner.scaler.load_state_dict({key: one for key, one in state["scaler"].items() if key not in learner.scalers})
    for name, scaler in learner.scalers.items():
        scaler.load_state_dict(state["scaler"].get(name, {}))
    if learner.ema is not None:
        _load_average(learner.ema, state["ema"], state["model"])


def check_state(state: Any, found: Found, *, own: Any = None) -> None:
    """ValueError: `state` does not have the structure of `state_of`, or `own` not that of `own_state`."""
    counted = ("step", "samples", "samples_per_epoch", "seed")
    try:
        shapes = {name: list(value.shape) for name, value in state["model"].items()}
        average = {name: list(value.shape) for name, value in weights_of(state["ema"]).items()}
        optimizer, progress, wanted = state["optimizer"], state["progress"], found.about.model
        sections = (optimizer["parameters"], optimizer["groups"], state["scaler"])
        ours = shapes == wanted and average in ({}, wanted) and all(isinstance(section, dict) for section in sections)
        of_optimizer = (*optimizer["parameters"].values(), *optimizer["groups"].values())
        ours = ours and bool(optimizer["groups"]) and all(isinstance(values, dict) for values in of_optimizer)
        ours = ours and all(type(progress[name]) is int for name in counted)
        ours = ours and (not average or list(state["ema"]["n_averaged"].shape) == [])
        ours = ours and _is_of_best(progress.get("best")) and _is_of_guard(progress.get("guard"))
        ours = ours and (own is None or {"random", "order"} <= own.keys())
        problem = None if ours else "its names, shapes or counts do not fit each other"
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ValueError(
            f"the checkpoint {found.folder} does not hold the state of a run ({problem}); take it from where it was written, "
            "or delete it"
        )


def _is_of_best(saved: Any) -> bool:
    """Whether `saved` is what `Best.state` gives, or nothing, as in checkpoints of older versions."""
    if saved is None:
        return True
    numbers = all(saved[name] is None or type(saved[name]) in (int, float) for name in ("value", "step"))
    return numbers and isinstance(saved["metric"], str) and type(saved["since"]) is int


def _is_of_guard(saved: Any) -> bool:
    """Whether `saved` is what `Guard.state` gives, or nothing, as in checkpoints of older versions."""
    if saved is None:
        return True
    numbers = [*saved["losses"], *saved["norms"]]
    return all(type(number) in (int, float) for number in numbers) and all(type(step) is int for step in saved["refused"])


def _load_average(ema: AveragedModel, saved: dict[str, Any], model: dict[str, Any]) -> None:
    """Load the average that was saved, or, where ema was not used before, the model's weights."""
    average = weights_of(saved)
    load_full(ema.module, average or model)
    if average:
        ema.n_averaged.copy_(opened(saved["n_averaged"]))


def _found_rate(progress: dict[str, Any], source: Path) -> float:
    """The learning rate that a run found before its first step.  ValueError: the checkpoint has none."""
    lr = progress.get("lr")
    if not isinstance(lr, float) or not 0 < lr < math.inf:
        raise ValueError(f"{source} has no learning rate that was found; set optimizer.lr to the one it was trained with")
    return lr


def _step_after(learner: Learner, progress: dict[str, Any], source: Path) -> int:
    """The step to go on with, so that each image of the epoch is seen once.

    ValueError: another seed or dataset size, or a batch size that does not divide the samples seen.
    """
    steps = learner.steps
    for key, now in (("seed", learner.config.seed), ("samples_per_epoch", steps.samples)):
        if progress[key] != now:
            raise ValueError(
                f"{source} was trained with {key} {progress[key]} and this run has {now}, so its order of images cannot go on; "
                "put it back, or begin a run of its own with another --run folder"
            )
    epochs, within = divmod(progress["samples"], steps.samples)
    if within % steps.batch:
        raise ValueError(
            f"{source} stands {within} images into an epoch, which data.batch_size={steps.batch} does not divide; "
            "go on with the old batch size until the epoch ends, or begin a run of its own with another --run folder"
        )
    return epochs * steps.per_epoch + within // steps.batch
