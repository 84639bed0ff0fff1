"""The whole story of a training run: config -> plan -> mesh -> data and model -> loop -> checkpoints -> report."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from widefield.config import RunConfig
from widefield.data.loader import Key
from widefield.engine.mesh import AgreedError, Mesh, World, join, leave
from widefield.engine.normalization import average_running_statistics, broadcast_buffers
from widefield.engine.strategies.data import hook_state, load_hook_state
from widefield.plan import check, plan_of, to_text
from widefield.report import write_report
from widefield.train.assemble import Parts, assemble, learner_of, training_batches
from widefield.train.checkpoint import About, Checkpoints, Found
from widefield.train.evaluate import Evaluation, evaluate
from widefield.train.folder import (
    lock,
    peak_memory_bytes,
    write_config,
    write_evaluation,
    write_model,
    write_nan,
    write_weights,
)
from widefield.train.interrupt import Interrupt
from widefield.train.loop import Learner, NonFiniteLossError, Passes
from widefield.train.record import Record, versions
from widefield.train.state import load_optimizer_state, load_random_state, optimizer_state, random_state, shapes_of


@dataclass(frozen=True)
class Outcome:
    """How a run ended, on every rank; `status` is for the shell."""

    reason: Literal["complete", "interrupted"]
    step: int
    status: int
    evaluation: Evaluation | None


def train(config: RunConfig, folder: Path, world: World) -> Outcome:
    """Train as `config` says, on the ranks of `world`, into `folder`; go on where a run there stopped.

    Every rank calls it.  AgreedError on every rank, and nothing of the run lost: whatever the config, the data or the
    checkpoints make impossible, and a loss that is no number.
    """
    plan = plan_of(config, world.size)
    check(plan, ranks=world.size, samples_per_step=config.data.batch_size)
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(watch_parent=world.launcher == "torchrun"))
        mesh = join(world, plan)
        stack.callback(leave, mesh)
        mesh.together(lambda: stack.enter_context(_claim(folder)) if mesh.is_main else None)
        parts = mesh.together(lambda: assemble(config, mesh))
        _check_sizes(parts)
        learner, reasons = mesh.together(lambda: learner_of(parts))
        last = config.schedule.length.in_steps(learner.steps.per_epoch)

        warnings: list[str] = []  # from checkpoints, also out of their thread; the story passes them on
        checkpoints = Checkpoints(
            folder / "checkpoints",
            mesh,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            background=config.checkpoint.background,
            warn=warnings.append,
        )
        found = checkpoints.newest_sound()
        own = None
        if found is not None:
            own = mesh.together(lambda: _resume(learner, checkpoints, found))
        batches = training_batches(parts, first=learner.step, last=last)
        if own is not None:
            load_random_state(own["random"])

        record = None
        if mesh.is_main:
            record = stack.enter_context(Record.open(folder, log=config.log, resumed_step=found and learner.step))
            changed = write_config(folder, config, plan)
            _describe_model(folder, parts)
            _open_record(record, parts, learner, plan_text=to_text(plan), reasons=parts.reasons + reasons, last=last)
            for line in changed:
                record.warning(f"the config has changed since this run began: {line}")
            if found is not None:
                record.say(f"resumed from {found.folder} at step {learner.step}" + ("" if own else _OTHER_RANKS))
        stack.callback(checkpoints.wait)
        passes = Passes(batches, config.gradient.accumulate)
        stack.callback(passes.close)
        story = _Story(config, folder, parts, learner, checkpoints, record, last, warnings)
        try:
            return story.tell(passes, interrupt)
        except AgreedError as error:
            story.fail(error)
            raise


_OTHER_RANKS = "; it was written by another number of ranks, so random states begin anew"


@dataclass
class _Story:
    """The loop and what happens around it."""

    config: RunConfig
    folder: Path
    parts: Parts
    learner: Learner
    checkpoints: Checkpoints
    record: Record | None
    last: int
    warnings: list[str]
    evaluation: Evaluation | None = None

    @property
    def mesh(self) -> Mesh:
        return self.learner.mesh

    def tell(self, passes: Passes, interrupt: Interrupt) -> Outcome:
        """Train to the last step or until somebody asks to stop."""
        learner, config, stopped = self.learner, self.config, False
        evaluate_every, save_every = self._steps(config.evaluate.every), self._steps(config.checkpoint.every)
        while learner.step < self.last and not stopped:
            lr, samples = learner.lr_now(), len(learner.steps.positions(learner.step))
            loss, stopped = learner.learn(passes.next(), stop=interrupt.asked)
            self._note(loss, lr, samples, passes)
            due = learner.step == self.last
            if learner.step % learner.steps.per_epoch == 0 and config.batch_norm == "averaged":
                average_running_statistics(learner.model, self.mesh)
            if due or (learner.step % evaluate_every == 0 and not stopped):
                self._evaluate()
                passes.skip_lap()
            if due or stopped:
                passes.close()
            if due or stopped or learner.step % save_every == 0:
                self._save(wait=due or stopped)
                passes.skip_lap()
        return self._end(interrupt, complete=learner.step >= self.last)

    def _steps(self, duration: Any) -> int:
        return max(1, duration.in_steps(self.learner.steps.per_epoch))

    def _note(self, loss: float, lr: float, samples: int, passes: Passes) -> None:
        times = passes.lap()
        self._pass_on_warnings()
        if self.record is not None:
            self.record.step(
                step=self.learner.step,
                epoch=self.learner.epoch,
                loss=loss,
                lr=lr,
                samples=samples,
                seconds=times.seconds,
                data_seconds=times.data_seconds,
                memory_bytes=peak_memory_bytes(self.mesh.device),
            )

    def _pass_on_warnings(self) -> None:
        while self.warnings:
            text = self.warnings.pop(0)
            if self.record is not None:
                self.record.warning(text)

    @property
    def _answering(self) -> nn.Module:
        """The model that is evaluated and exported: the moving average where there is one."""
        return self.learner.model if self.learner.ema is None else self.learner.ema.module

    def _evaluate(self) -> None:
        self._agree_on_buffers()
        self.evaluation = evaluate_parts(self.parts, self._answering)
        if self.record is not None:
            self._write_evaluation(self.evaluation, self.record)

    def _write_evaluation(self, evaluation: Evaluation, record: Record) -> None:
        learner, dataset = self.learner, self.parts.dataset
        record.evaluation(
            step=learner.step,
            epoch=learner.epoch,
            images=evaluation.images,
            of=evaluation.of,
            duplicates=evaluation.duplicates,
            skipped=len(evaluation.skipped),
            loss=evaluation.loss,
            metrics=evaluation.metrics,
            seconds=evaluation.seconds,
            text=evaluation.sentence,
        )
        write_evaluation(
            self.folder, evaluation, step=learner.step, epoch=learner.epoch, classes=dataset.classes, images=dataset.evaluate
        )

    def _agree_on_buffers(self) -> None:
        """Where batch normalization is not synchronized, make its running statistics equal on all ranks."""
        if self.config.batch_norm == "averaged":
            average_running_statistics(self.learner.model, self.mesh)
        elif self.config.batch_norm == "broadcast":
            broadcast_buffers(self.learner.model, self.mesh)

    def _save(self, *, wait: bool) -> None:
        """Save all that a resumed run needs; in the background unless the run is about to end."""
        learner = self.learner
        self._agree_on_buffers()
        self._report_skipped()
        if not learner.is_finite():
            raise AgreedError(
                f"a weight is no finite number after step {learner.step}, so nothing was saved; the newest checkpoint is from "
                "before that. A lower optimizer.lr or optimizer.clip_norm=1 are the usual cures"
            )
        self.checkpoints.save(_state_of(learner), _about(self), own=_own_state(learner), wait=wait)
        if self.record is not None:
            self.record.checkpoint(step=learner.step, name=f"step_{learner.step:08}")

    def _report_skipped(self) -> None:
        """Tell about unreadable images that any rank left out since the last time."""
        names = sorted(name for part in self.mesh.gather_objects(self.learner.skipped) for name in part)
        self.learner.skipped.clear()
        if names and self.record is not None:
            self.record.warning(f"{len(names)} unreadable images were left out of training: {', '.join(names[:20])}")

    def _end(self, interrupt: Interrupt, *, complete: bool) -> Outcome:
        """Leave weights and report behind, and say how it went."""
        learner = self.learner
        self.checkpoints.wait()
        self._pass_on_warnings()
        status = 1 if self.checkpoints.failure is not None else 0
        if not complete and self.mesh.world.launcher != "torchrun":  # elastic takes any other status for a crash
            status = 128 + (interrupt.signal or signal.SIGTERM)
        if self.record is not None:
            write_weights(self.folder, self._answering)
            at = f"step {learner.step} of {self.last}"
            text = "trained to the end" if complete else f"stopped at {at}; the same command goes on from there"
            self.record.end("complete" if complete else "interrupted", step=learner.step, text=text)
            self.record.close()
            report = write_report(self.folder)
            print(f"report: {report}", flush=True)
        self.mesh.barrier()
        return Outcome("complete" if complete else "interrupted", learner.step, status, self.evaluation)

    def fail(self, error: AgreedError) -> None:
        """Write down why the run ends here."""
        if self.record is None:
            return
        text = str(error)
        if isinstance(error, NonFiniteLossError):
            images = self.parts.dataset.train
            values = {"step": error.step, "epoch": self.learner.epoch, "index": error.index}
            path = write_nan(self.folder, values | {"images": [images.name_of(index) for index in error.index]})
            text += f". Its {len(error.index)} images are listed in {path}"
        self.record.end("failed", step=self.learner.step, text=text)
        self.record.close()
        write_report(self.folder)


def evaluate_parts(parts: Parts, model: nn.Module) -> Evaluation:
    """Evaluate `model` on the evaluation split; every rank calls it."""
    return evaluate(
        model,
        parts.evaluation_batches(),
        task=parts.task,
        prepare=parts.preparation(train=False),
        arithmetic=parts.arithmetic,
        mesh=parts.mesh,
        samples=len(parts.dataset.evaluate),
    )


def _claim(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    return lock(folder)


def _describe_model(folder: Path, parts: Parts) -> None:
    prepare = parts.preparation(train=False)
    image = parts.reader(train=False).__getitems__([Key(0, 0, 0, real=False)]).image
    write_model(
        folder,
        parts.dataset,
        shape=list(image.shape[1:]),
        mean=list(prepare.mean),
        std=list(prepare.std),
        name=parts.config.model.name,
    )


def _check_sizes(parts: Parts) -> None:
    """More ranks than training images cannot all have one at every epoch's start."""
    samples, ranks = len(parts.dataset.train), parts.mesh.size
    if samples < ranks:
        raise AgreedError(
            f"{ranks} ranks are more than the {samples} training images; use at most mesh.replicate={samples}, or more images"
        )


def _open_record(
    record: Record, parts: Parts, learner: Learner, *, plan_text: str, reasons: list[str], last: int
) -> None:
    """Say what is about to run, and every value that the program chose with its reason."""
    mesh, steps, dataset = parts.mesh, learner.steps, parts.dataset
    parameters = sum(p.numel() for p in learner.model.parameters())
    record.say(
        f"{parts.config.model.name}, {parameters:,} parameters, on {mesh.plan} ({mesh.device.type}); "
        f"{steps.samples:,} images to train on, {len(dataset.evaluate):,} to evaluate, {len(dataset.classes)} classes; "
        f"{last:,} steps of {steps.batch} images, {steps.per_epoch:,} an epoch"
    )
    for reason in reasons:
        record.say(f"  {reason}")
    record.start(
        plan=plan_text,
        reasons=reasons,
        ranks=mesh.size,
        steps=last,
        samples_per_epoch=steps.samples,
        parameters=parameters,
    )


# ---------------------------------------------------------------------------------------- state and back


def _state_of(learner: Learner) -> dict[str, Any]:
    """What is equal on all ranks."""
    return {
        "model": dict(learner.model.state_dict()),
        "optimizer": optimizer_state(learner.model, learner.optimizer),
        "scaler": learner.scaler.state_dict(),
        "ema": {} if learner.ema is None else dict(learner.ema.state_dict()),
        "progress": {
            "step": learner.step,
            "samples": learner.steps.seen(learner.step),
            "samples_per_epoch": learner.steps.samples,
            "seed": learner.config.seed,
        },
    }


def _own_state(learner: Learner) -> dict[str, Any]:
    """What belongs to this rank alone."""
    hook = hook_state(learner.model)
    return {"random": random_state(), "order": learner.order} | ({"hook": hook} if hook is not None else {})


def _about(story: _Story) -> About:
    learner, evaluation = story.learner, story.evaluation
    return About(
        step=learner.step,
        epoch=int(learner.epoch),
        samples=learner.steps.seen(learner.step),
        metric=None if evaluation is None else evaluation.metrics[learner.task.headline],
        higher_is_better=learner.task.higher_is_better,
        ranks=learner.mesh.size,
        plan=to_text(learner.mesh.plan),
        model=shapes_of(learner.model),
        versions=versions(),
    )


def _resume(learner: Learner, checkpoints: Checkpoints, found: Found) -> dict[str, Any] | None:
    """Put a checkpoint's state into the learner; this rank's own part of it, for what must come last."""
    state, own = checkpoints.load(found, model=shapes_of(learner.model))
    learner.step = _step_after(learner, state["progress"], found.folder)
    learner.model.load_state_dict(state["model"])
    load_optimizer_state(learner.model, learner.optimizer, state["optimizer"])
    learner.scaler.load_state_dict(state["scaler"])
    if learner.ema is not None:
        if state["ema"]:
            learner.ema.load_state_dict(state["ema"])
        else:  # the average was switched on after that checkpoint
            learner.ema.module.load_state_dict(state["model"])
    if own is not None:
        learner.order = own["order"]
        load_hook_state(learner.model, own.get("hook"))
    return own


def _step_after(learner: Learner, progress: dict[str, Any], source: Path) -> int:
    """The step to go on with, such that each image of the epoch is still seen once; ValueError where there is none."""
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
