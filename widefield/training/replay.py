"""Runs one step of a run again, on one rank and without taking it: its loss, its gradients, and which module first made NaN.

The weights are those of the run's newest checkpoint before the step; the steps between the two run again from the data, in the
same order.  The batch is the one that the guard kept, or is read from the data.  Nothing in the run folder changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from widefield.comm.mesh import World, join
from widefield.config import RunConfig, read_config
from widefield.config.recipe import TRAINED
from widefield.data.batch import Batch
from widefield.plans import Plan
from widefield.quantity import count_of
from widefield.training import refused_batch
from widefield.training.assemble import Parts, assemble, learner_of, training_batches
from widefield.training.checkpoint import Found, read
from widefield.training.checkpoint_directory import sound_at, step_of, steps_in
from widefield.training.given import NOTHING, Given
from widefield.training.guard import Guard, Refusal, RefusedStepError
from widefield.training.loop import Learner
from widefield.training.non_finite import Fault, NonFiniteWatch
from widefield.training.passes import Passes
from widefield.training.record import Line
from widefield.training.record import read as read_record
from widefield.training.resume import resume
from widefield.training.run_folder import existing_folder, stored_dataset
from widefield.training.state import load_random_state
from widefield.training.terminal import say

ON_ONE_RANK = [
    "mesh={}", "mesh.replicate=1", "sharding={}", "pipeline={}", "stream=", "recompute=", "gradient.compression=none",
    "agreement=mean", "model.compile=false", "data.workers=0",
]  # fmt: skip
"""What is set in place of the run's plan; other overrides come after."""


@dataclass(frozen=True)
class Replayed:
    """A step that ran again.

    step: its number, counted from 1.  loss, norm: the mean loss of its batch, and the norm of its gradient before clipping.
    recorded: the loss in the run's record; None where it has none.
    weights: where the weights come from.  batch: where the batch comes from.  run_again: how many steps ran between the two.
    forward, backward: the module that first made a number that is not finite; None where all are finite.
    gradients: the norm of each module's own parameters, by its name, in the model's order.
    images: the names of the batch's images.
    """

    step: int
    loss: float
    norm: float | None
    recorded: float | None
    weights: str
    batch: str
    run_again: int
    forward: Fault | None
    backward: Fault | None
    gradients: dict[str, float]
    images: list[str]
    notes: list[str] = field(default_factory=list)

    def in_words(self, *, most: int = 30) -> list[str]:
        """Lines for the terminal.  most: modules whose gradients are shown: those that are not finite, and the largest."""
        again = f", and {count_of(self.run_again, 'step')} run again" if self.run_again else ""
        known = "" if self.recorded is None else f"; the record has {self.recorded:.9g}"
        norm = "" if self.norm is None else f", the norm of its gradient {self.norm:.6g}"
        lines = [
            f"step {self.step}: weights of {self.weights}{again}; its batch from {self.batch}",
            f"loss {self.loss:.9g}{known}{norm}",
            *self.notes,
            f"forward: {self.forward.in_words() if self.forward else 'every output is finite'}",
            f"backward: {self.backward.in_words() if self.backward else 'every gradient is finite'}",
        ]
        odd = [name for name, one in self.gradients.items() if not _is_finite(one)]
        largest = sorted((name for name in self.gradients if name not in odd), key=lambda name: -self.gradients[name])
        shown = {*odd[:most], *largest[: max(0, most - len(odd))]}
        lines.append(f"gradient norms of {len(shown)} of {len(self.gradients)} modules with parameters:")
        return lines + [
            f"  {norm:>12.6g}  {name or 'the model itself'}" for name, norm in self.gradients.items() if name in shown
        ]


def replay_step(
    run: str | Path,
    step: int,
    overrides: Sequence[str] = (),
    *,
    from_checkpoint: bool = False,
    trust: bool = False,
    given: Given = NOTHING,
) -> Replayed:
    """Run step `step` of a run again, counted from 1 as in its record.

    from_checkpoint: give the batch to the checkpoint's own weights, without the steps between.
    ValueError: no such step, no data for the steps between, or a damaged file.
    """
    folder = existing_folder(run)
    lines = read_record(folder)
    _check_step(step, lines, folder)
    config = read_config(folder / "config.yaml", [*ON_ONE_RANK, *overrides], run=folder, trust=trust, builds=TRAINED)
    notes = _notes(config, lines)
    if config.batch_norm == "per_micro_batch":
        config = config.model_copy(update={"batch_norm": "synchronized"})
    parts = assemble(config, join(World(), Plan()), given=given, stored=stored_dataset(folder))
    learner, _ = learner_of(parts)
    weights = _load(learner, folder, step)
    between = 0 if from_checkpoint else step - 1 - learner.step
    kept = refused_batch.joined(folder, step)
    source = "the data" if kept is None else str(refused_batch.folder_of(folder, step).relative_to(folder))
    batches = _batches(parts, learner, lines, step, kept, between)
    return _tried(learner, batches, parts, Replayed(
        step, 0.0, None, _recorded(lines, step), weights, source, between, None, None, {}, [], notes,
    ))  # fmt: skip


def _check_step(step: int, lines: list[Line], folder: Path) -> None:
    starts = [line for line in lines if line.get("kind") == "start"]
    last = starts[-1].get("steps") if starts else None
    if type(last) is not int:
        raise ValueError(f"the record in {folder} has no start, so its run never began to train; train it first")
    if not 1 <= step <= last:
        raise ValueError(f"there is no step {step}: the run in {folder} has steps 1 to {last:,}")


def _notes(config: RunConfig, lines: list[Line]) -> list[str]:
    """How this step may differ from that of the run."""
    ranks = next((line.get("ranks") for line in reversed(lines) if line.get("kind") == "start"), 1)
    if ranks == 1:
        return []
    notes = [f"the run had {ranks} ranks: numbers are equal to rounding, and dropout draws others"]
    if config.batch_norm != "synchronized":
        notes.append(f"batch_norm={config.batch_norm}: here statistics are those of the whole batch, not of each rank's part")
    return notes


def _load(learner: Learner, folder: Path, step: int) -> str:
    """Load the newest sound checkpoint from before the step, or keep the weights that the run began with; returns which."""
    learner.guard = Guard()
    why = ""
    for place in reversed(steps_in(folder / "checkpoints")):
        if step_of(place) >= step:
            continue
        try:
            found = sound_at(place)
        except ValueError as error:
            why = f" ({error})"
            continue
        own = resume(learner, _ReadOnly(), found)  # type: ignore[arg-type]
        if own is not None:
            load_random_state(own["random"])
        return found.folder.name
    if learner.config.optimizer.lr == "find":
        raise ValueError(
            f"{folder} has no sound checkpoint from before step {step}{why}, and with optimizer.lr=find the rate that the run "
            "found is in a checkpoint only; set optimizer.lr to it"
        )
    return "the run's beginning, as no checkpoint is from before that step"


class _ReadOnly:
    """Reads checkpoints as Checkpoints does, which would also remove what a killed run left."""

    def load(self, found: Found, *, model: Any = None, unread: bool = False) -> tuple[dict, dict | None]:
        return read(found, rank=0, ranks=1, model=model, unread=unread)

    def own_of_first(self, found: Found) -> dict | None:
        return read(found, unread=True)[1]


def _recorded(lines: list[Line], step: int) -> float | None:
    """The loss of the step in the record, of the last time that it ran."""
    for line in reversed(lines):
        is_step = line.get("kind") == "step" and line.get("step") == step
        if is_step or (line.get("kind") == "guard" and line.get("batch_step") == step and "loss" in line):
            try:
                return float(line["loss"])
            except (TypeError, ValueError, KeyError):
                return None
    return None


def _batches(
    parts: Parts, learner: Learner, lines: list[Line], step: int, kept: list[Batch] | None, between: int
) -> list[Batch]:
    """The step's batches, once the steps before it have run."""
    if not between:
        learner.step = step - 1
    if kept is not None and not between:
        return kept
    guard = [line for line in lines if line.get("kind") == "guard"]
    left_out = {line.get("step") for line in guard if line.get("action") in ("skip", "pass_over")}
    read_again = training_batches(parts, first=learner.step, last=step, dummy_batch=learner.dummy_batch)
    passes = Passes(read_again, parts.config.gradient.accumulate)
    try:
        if between:
            say(f"running {count_of(between, 'step')} again, from {learner.step + 1} to {step - 1}")
        while learner.step < step - 1:
            batches = [batch for batch in passes.next() if not batch.idle]
            learner.pass_over(batches) if learner.step + 1 in left_out else learner.learn(batches, stop=False)
        return kept if kept is not None else passes.next()
    finally:
        passes.close()


# ---------------------------------------------------------------------------------------------- the step


class _Looking(Guard):
    """Refuses every step, once its loss and its gradient are there."""

    def judge(self, step: int, loss: float, norm: float | None) -> Refusal | None:
        return Refusal("non-finite loss", "stop", step + 1, float("nan") if norm is None else norm, loss)


def _tried(learner: Learner, batches: list[Batch], parts: Parts, found: Replayed) -> Replayed:
    learner.guard = _Looking()
    images = [parts.dataset.train.name_of(int(index)) for batch in batches if batch.samples for index in batch.index]
    with NonFiniteWatch(learner.model, images) as watch:
        try:
            learner.learn(batches, stop=False)
        except RefusedStepError as refused:
            loss, norm = refused.refusal.loss, refused.refusal.value
        else:
            raise AssertionError("a step that every guard refuses was taken")
    values = {**vars(found), "loss": loss, "norm": norm if _is_finite(norm) else None, "images": images}
    values |= {"forward": watch.forward, "backward": watch.backward(), "gradients": _norms(learner)}
    return Replayed(**values)


def _norms(learner: Learner) -> dict[str, float]:
    """The norm of the gradients of each module's own parameters."""
    norms: dict[str, float] = {}
    scale = learner.scaler.get_scale() if learner.scaler.is_enabled() else 1.0
    for name, module in learner.model.named_modules():
        own = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if own:
            norms[name] = (
                float(torch.stack([torch.linalg.vector_norm(one).double() for one in own]).square().sum().sqrt()) / scale
            )
    return norms


def _is_finite(value: float | None) -> bool:
    return value is not None and abs(value) < float("inf")
