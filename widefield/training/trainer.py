"""The training loop: steps, evaluations, saves, and the end of a run."""

from __future__ import annotations

import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import nn

from widefield.comm.failure import PeerFailedError, in_words
from widefield.comm.mesh import AgreedError, Mesh
from widefield.config import RunConfig
from widefield.data.batch import Batch
from widefield.plans import to_text
from widefield.quantity import Duration
from widefield.refusal import TO_BE_CONTINUED
from widefield.sharded_state import gather_full_on_main
from widefield.tiled.sync_batch_norm import average_running_statistics, broadcast_buffers
from widefield.training import disk
from widefield.training.abandon import Abandonable
from widefield.training.assemble import Parts, evaluate_parts
from widefield.training.best import value_in
from widefield.training.checkpoint import About, Checkpoints
from widefield.training.checkpoint_directory import name_of
from widefield.training.endings import STOPPED, write_stopped
from widefield.training.evaluate import Evaluation
from widefield.training.evaluation_files import write_evaluation
from widefield.training.guard import NonFiniteLossError, RefusedStepError, RollBack
from widefield.training.guarding import Guarding
from widefield.training.interrupt import Interrupt, StopNow
from widefield.training.loop import Learner
from widefield.training.memory import peak_memory_bytes
from widefield.training.out_of_memory import FullMemoryError
from widefield.training.passes import Passes
from widefield.training.record import Record, versions
from widefield.training.resume import changes_of, own_state, state_of
from widefield.training.run_events import EndFacts, EvaluationFacts, StepFacts, call
from widefield.training.run_folder import (
    BEST,
    WEIGHTS,
    save_weights,
    write_nan,
    write_weights,
)
from widefield.training.state import shapes_of
from widefield.training.weight_average import follow_buffers


@dataclass(frozen=True)
class Outcome:
    """How a run ended, on every rank.

    status: the exit status, 0 where all is well.  run: the run folder.
    evaluation: the last one of this call; None where the run was complete before, or stopped before the first evaluation.
    """

    reason: Literal["complete", "interrupted"]
    step: int
    status: int
    evaluation: Evaluation | None
    run: Path


@dataclass
class Trainer:
    """The training loop.  record: on rank 0 only.  last: the run's last step.  warnings: those of the thread that saves."""

    config: RunConfig
    folder: Path
    parts: Parts
    learner: Learner
    checkpoints: Checkpoints
    record: Record | None
    last: int
    warnings: list[str]
    guarding: Guarding
    evaluation: Evaluation | None = None
    evaluated_step: int = -1
    abandonable: Abandonable = field(init=False)
    saving: int | None = None
    """Step of the checkpoint that is being written."""

    @property
    def mesh(self) -> Mesh:
        return self.learner.mesh

    def fit(self, passes: Passes, interrupt: Interrupt) -> Outcome:
        """Train to the last step, or until a signal or a full disk asks to stop."""
        self.abandonable = Abandonable(self.learner, interrupt, passes=self.config.gradient.accumulate)
        learner, config, stopped = self.learner, self.config, False
        learner.before_update = self.checkpoints.wait_until_copied
        evaluate_every, save_every = self._steps(config.evaluate.every), self._steps(config.checkpoint.every)
        while learner.step < self.last and not stopped and not self.ends_early:
            before = learner.step
            stopped = self.step(passes, stop=interrupt.asked or (self.record is not None and self.record.is_lost))
            if learner.step <= before and not stopped:
                continue  # the run went back
            due = learner.step == self.last
            if learner.step % learner.steps.per_epoch == 0 and config.batch_norm == "averaged":
                self._synchronize_buffers()
            if due or (learner.step % evaluate_every == 0 and not stopped):
                with learner.consensus():
                    self._evaluate()
                passes.skip_lap()
            due = due or self.ends_early
            if due or stopped:
                passes.close()
            if due or stopped or learner.step % save_every == 0:
                self._save(wait=due or stopped)
                passes.skip_lap()
        return self._end(interrupt, complete=learner.step >= self.last or self.ends_early)

    @property
    def ends_early(self) -> bool:
        """Whether `evaluate.patience` evaluations in a row were no better than the best."""
        patience = self.config.evaluate.patience
        return patience is not None and self.learner.best.since >= patience

    def step(self, passes: Passes, *, stop: bool) -> bool:
        """One optimizer step and its line in the record; returns whether any rank asked to stop."""
        batches = passes.next()
        if self.guarding.passes_over(batches):
            passes.lap()
            return False
        self.abandonable.begin()
        try:
            return self._learn(batches, passes, stop=stop)
        except StopNow:
            self.abandonable.undo()
            return True
        except RefusedStepError as error:
            self.guarding.tell_refused(error, batches)
            raise
        except RollBack as asked:
            self.guarding.tell_refused(asked, batches)
            self.checkpoints.wait()
            self._record_saves()
            self.guarding.roll_back(passes, asked.refusal)
            self.evaluated_step, self.saving = -1, None
            return False

    def _learn(self, batches: list[Batch], passes: Passes, *, stop: bool) -> bool:
        learner = self.learner
        lr, samples = learner.lr_now(), len(learner.steps.positions(learner.step))
        loss, stopped = learner.learn(batches, stop=stop)
        skipped = self.guarding.tell_skipped(batches)
        seconds = self._record_step(loss, lr, samples, passes)
        self.abandonable.end(seconds)
        if self._compares_now(stopped):
            self.guarding.compare(may_go_back=not stopped)
        if not skipped:
            self._call("on_step", StepFacts(learner.step, learner.epoch, loss, lr, samples, seconds, self.mesh.rank))
        return stopped

    def _compares_now(self, stopped: bool) -> bool:
        """Whether replicas are compared after this step: as the recipe says, and before every save."""
        step, every = self.learner.step, self.config.guard.checksum_every
        saves = stopped or step == self.last or step % self._steps(self.config.checkpoint.every) == 0
        return every is not None and (saves or step % every == 0)

    def _call(self, method: str, facts: StepFacts | EvaluationFacts | EndFacts) -> None:
        call(self.parts.given.callbacks, method, facts)

    def _next_stand(self, step: int) -> int:
        """The first step after `step` that an evaluation, a save or the end follows, which all ranks make together."""
        every = [self._steps(self.config.evaluate.every), self._steps(self.config.checkpoint.every)]
        return min(self.last, *((step // one + 1) * one for one in every))

    def _steps(self, duration: Duration) -> int:
        return duration.in_steps(self.learner.steps.per_epoch)

    def _record_step(self, loss: float, lr: float, samples: int, passes: Passes) -> float:
        """Write the step's line; returns its seconds."""
        times = passes.lap()
        self._record_saves()
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
                losses=self.learner.losses,
            )
        return times.seconds

    def _record_saves(self) -> None:
        """Write the warnings of the thread that saves, and a completed save, into the record."""
        if self.record is None or self.checkpoints.busy:
            return
        while self.warnings:
            self.record.warning(self.warnings.pop(0))
        if self.saving is not None and self.checkpoints.failure is None:
            self.record.checkpoint(step=self.saving, name=name_of(self.saving))
        self.saving = None

    @property
    def _evaluated_model(self) -> nn.Module:
        """The model that is evaluated and exported: the moving average where there is one."""
        return self.learner.model if self.learner.ema is None else self.learner.ema.module

    def _evaluate(self) -> None:
        self._synchronize_buffers()
        learner = self.learner
        found = evaluate_parts(self.parts, self._evaluated_model)
        self.evaluation, self.evaluated_step = found, learner.step
        is_best = learner.best.add(value_in(learner.best.metric, found), learner.step)
        if self.record is not None:
            self._write_evaluation(found, self.record, is_best=is_best)
        if is_best:
            self._write_best()
        facts = (learner.step, learner.epoch, found.loss, dict(found.metrics), found.images, is_best, self.mesh.rank)
        self._call("on_evaluate", EvaluationFacts(*facts))

    def _write_best(self) -> None:
        """Write best.safetensors.  Where the disk refuses it the run goes on; the older file stands."""
        weights, best = self._full_weights(), self.learner.best
        if self.record is not None:
            about = {"step": str(best.step), "metric": best.metric, "value": repr(best.value)}
            self.record.attempt(BEST, lambda: save_weights(self.folder / BEST, weights, about=about))

    def _full_weights(self) -> dict:
        """The full weights of the evaluated model, on rank 0; {} on others.  Every rank calls it."""
        return gather_full_on_main(self._evaluated_model, self.mesh, dict(self._evaluated_model.state_dict()))

    def _write_evaluation(self, evaluation: Evaluation, record: Record, *, is_best: bool) -> None:
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
            best=is_best,
        )
        write_evaluation(
            self.folder,
            evaluation,
            step=learner.step,
            epoch=learner.epoch,
            classes=dataset.classes,
            images=dataset.evaluate,
            attempt=record.attempt,
        )

    def _synchronize_buffers(self) -> None:
        """Where BatchNorm is not synchronized, make its running statistics equal on all ranks, also those of the average."""
        learner = self.learner
        if self.config.batch_norm == "averaged" and learner.replicas is None:  # whose statistics are averaged as weights are
            average_running_statistics(learner.model, self.mesh)
        elif self.config.batch_norm == "broadcast":
            broadcast_buffers(learner.model, self.mesh)
        if learner.ema is not None:
            follow_buffers(learner.ema, learner.model)

    def _save(self, *, wait: bool) -> None:
        """Save a checkpoint; wait: until it is written."""
        learner = self.learner
        self.checkpoints.wait()
        self._record_saves()  # that of the save before this one
        self._synchronize_buffers()
        self._report_reads()
        if not learner.is_finite():
            raise AgreedError(
                f"a weight is no finite number after step {learner.step}, so nothing was saved; the newest checkpoint is from "
                "before that. A lower optimizer.lr or optimizer.clip_norm=1 are the usual cures"
            )
        own = own_state(learner)
        with learner.consensus(optimizer=True):
            self.checkpoints.save(state_of(learner), self._about(), own=own, wait=wait, changes=changes_of(learner))
        self.saving = learner.step
        self._record_saves()

    def _about(self) -> About:
        learner, evaluation = self.learner, self.evaluation if self.evaluated_step == self.learner.step else None
        return About(
            step=learner.step,
            epoch=int(learner.epoch),
            samples=learner.steps.seen(learner.step),
            metric=None if evaluation is None else value_in(learner.best.metric, evaluation),
            higher_is_better=learner.best.higher_is_better,
            ranks=learner.mesh.size,
            plan=to_text(learner.mesh.plan),
            model=shapes_of(learner.model),
            versions=versions(),
        )

    def _report_reads(self) -> None:
        """Record what each rank has read, and warn of the unreadable images that ranks left out since the last call."""
        gathered = self.mesh.gather_objects((self.learner.skipped, self.learner.reads.to_tree()))
        names = sorted(name for part, _ in gathered for name in part)
        self.learner.skipped.clear()
        if self.record is not None and any(reads["decoded"] for _, reads in gathered):
            self.record.note("read", step=self.learner.step, ranks=[reads for _, reads in gathered])
        if names and self.record is not None:
            self.record.warning(f"{len(names)} unreadable images were left out of training: {', '.join(names[:20])}")

    def _end(self, interrupt: Interrupt, *, complete: bool) -> Outcome:
        """Write the weights and the end of the record."""
        learner = self.learner
        self.checkpoints.wait()
        self._record_saves()
        with learner.consensus():
            weights = self._full_weights()
        if complete:
            self.mesh.together(lambda: self._write_weights(weights) if self.record is not None else None)
        elif self.record is not None:  # the run goes on from a checkpoint: nothing here may keep it from ending
            self.record.attempt(WEIGHTS, lambda: write_weights(self.folder, weights))
        reason: Literal["complete", "interrupted"] = "complete" if complete else "interrupted"
        status = (1 if self.checkpoints.failure is not None else 0) if complete else self._status_of_stopped(interrupt)
        if self.record is not None:
            self.record.end(reason, step=learner.step, text=self._end_in_words(complete))
            if not complete:
                self.record.attempt(STOPPED, lambda: write_stopped(self.folder, step=learner.step, by=interrupt.signal))
            if self._close(self.record) and (complete or self.record.is_lost):
                status = 1
        best = learner.best
        self._call("on_end", EndFacts(reason, learner.step, self.folder, best.step, best.value, self.mesh.rank))
        return Outcome(reason, learner.step, status, self.evaluation, self.folder)

    def _status_of_stopped(self, interrupt: Interrupt) -> int:
        """TO_BE_CONTINUED, and 130 where a person pressed Ctrl-C; a launcher knows of that by itself."""
        by_hand = interrupt.signal == signal.SIGINT and self.mesh.world.launcher == "none"
        return 128 + signal.SIGINT if by_hand else TO_BE_CONTINUED

    def _end_in_words(self, complete: bool) -> str:
        learner, best = self.learner, self.learner.best
        at = f"step {learner.step} of {self.last}"
        if not complete:
            saved = self.checkpoints.failure is None
            return f"stopped at {at}; the same command goes on from {'there' if saved else 'the newest checkpoint'}"
        text = "trained to the end"
        if learner.step < self.last:
            text = f"ended early at {at}: {best.since} evaluations in a row without a better {best.metric}"
        text += "" if self.evaluation is None else f": {self.evaluation.sentence}"
        if best.step is None or best.step == learner.step or best.value is None:
            return text
        return f"{text}. Best {best.metric} {best.value:.4g} at step {best.step}: {BEST}"

    def _write_weights(self, weights: dict) -> None:
        """Write the run's weights.  ValueError: the disk refuses them."""
        try:
            write_weights(self.folder, weights)
        except Exception as error:
            saved = self.checkpoints.failure is None
            where = "The last checkpoint has them" if saved else self._rescued(weights)
            needed = sum(value.nbytes for value in weights.values())
            problem = disk.in_words(self.folder / WEIGHTS, error, self.folder)
            raise ValueError(
                f"{problem}, and the weights take {needed:,}. {where}: free some space there and give the same command again"
            ) from None

    def _rescued(self, weights: dict) -> str:
        """Write the weights into the folder for temporary files, since no checkpoint has them; returns where they are."""
        try:
            path = Path(tempfile.mkdtemp(prefix="widefield_")) / WEIGHTS
            save_weights(path, weights)
        except Exception:  # there is no other place: the first error is the one to tell
            return "The last checkpoint was not saved either; older ones stand"
        return f"The last checkpoint was not saved either, so the weights are in {path} (`--weights {path}`); older ones stand"

    @staticmethod
    def _close(record: Record) -> int:
        """Close the record; returns 1 where it is incomplete, else 0."""
        record.close()
        if record.missing is None:
            return 0
        print(f"widefield: {record.missing}", file=sys.stderr, flush=True)
        return 1

    def fail(self, error: Exception | str) -> None:
        """Write into the record why the run ends: an error of this rank or of all, or a text on that of another rank."""
        if self.record is None:
            return
        known = isinstance(error, str | AgreedError | PeerFailedError | FullMemoryError)
        text = str(error) if known else f"rank {self.mesh.rank} {in_words(error)}"
        if isinstance(error, NonFiniteLossError):
            images, index = self.parts.dataset.train, list(error.refusal.index)
            values = {"step": error.refusal.step, "epoch": self.learner.epoch, "index": index}
            values |= {"images": [images.name_of(one) for one in index]}
            path = self.record.attempt("nan.json", lambda: write_nan(self.folder, values))
            text += "" if path is None else f". Its {len(index)} images are listed in {path}"
        self.record.end("failed", step=self.learner.step, text=text)
        self._close(self.record)
