"""What a run does about steps that the guard refuses, and about replicas that differ: tells, keeps the batch, goes back.

guard.py decides.  A refused batch counts as seen whatever is done about it: the next step has the samples after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from widefield.comm.mesh import AgreedError
from widefield.config import RunConfig
from widefield.data import Images
from widefield.data.batch import Batch
from widefield.training import refused_batch
from widefield.training.checkpoint import Checkpoints
from widefield.training.checksums import Checksums, Difference
from widefield.training.guard import Refusal, RefusedStepError, RollBack
from widefield.training.loop import Learner
from widefield.training.passes import Passes
from widefield.training.record import Record
from widefield.training.resume import resume
from widefield.training.state import load_random_state, seed_everything

MOST_NAMES = 200
"""Images of a refused batch that the record names; their numbers are all there."""


@dataclass
class Guarding:
    """The guard of a run.  Every rank calls every method, in the same order.

    record: on rank 0 only.  images: of the training split.  batches_from: the loader's batches from a step, counted from 0, on.
    """

    learner: Learner
    folder: Path
    checkpoints: Checkpoints
    record: Record | None
    images: Images
    batches_from: Callable[[int], Iterator[Batch]]
    differed: int = 0
    """How often the run went back since replicas differed."""
    checksums: Checksums | None = field(init=False)

    def __post_init__(self) -> None:
        learner, every = self.learner, self.learner.config.guard.checksum_every
        same_buffers = learner.config.batch_norm in ("synchronized", "per_micro_batch")
        self.checksums = None if every is None else Checksums(learner.mesh, has_same_buffers=same_buffers)
        if self.checksums is not None and not self.checksums.has_replicas and self.record is not None:
            self.record.warning(
                f"guard.checksum_every={every} compares nothing under {learner.mesh.plan}: no two ranks hold the same weights"
            )

    # ------------------------------------------------------------------------------------------ steps

    def passes_over(self, batches: list[Batch]) -> bool:
        """Whether the next step's batch is passed over, since the run was rolled back before it; then it counts as seen."""
        learner, step = self.learner, self.learner.step
        if step not in learner.guard.pass_over:
            return False
        learner.pass_over([batch for batch in batches if not batch.idle])
        self._write("pass_over", step=step + 1, batch_step=step + 1, samples=self._samples(step))
        return True

    def tell_skipped(self, batches: list[Batch]) -> bool:
        """Record the steps that were skipped; returns whether the last one was."""
        told = self.learner.guard.told
        for refusal in told:
            self._record_refusal(refusal, self._keep(refusal, batches))
        was_skipped = bool(told)
        told.clear()
        return was_skipped

    def tell_refused(self, error: RefusedStepError | RollBack, batches: list[Batch]) -> None:
        """Record a step that ends the run, or for which it goes back, and keep its batch."""
        if error.refusal is not None:
            self._record_refusal(error.refusal, self._keep(error.refusal, batches))

    def roll_back(self, passes: Passes, refusal: Refusal | None) -> int:
        """Go back to the newest checkpoint, as if the run was resumed; returns its step.

        refusal: the step whose batch is passed over from now on; None: the same batches are taken again.
        AgreedError: there is no checkpoint.
        """
        learner, checkpoints, left = self.learner, self.checkpoints, self.learner.step
        checkpoints.wait()
        found = checkpoints.newest_sound()
        if found is None:
            why = "replicas differ" if refusal is None else refusal.in_words()
            raise AgreedError(
                f"{why}, and there is no checkpoint to go back to; lower checkpoint.every, or let the guard skip or stop"
            )
        if refusal is not None:
            learner.guard.pass_over.add(refusal.step - 1)
        passes.close()
        learner.optimizer.state.clear()
        learner.optimizer.zero_grad(set_to_none=True)
        learner.order = ""
        own = learner.mesh.together(lambda: resume(learner, checkpoints, found))
        learner.mesh.together(lambda: self._random(own))
        if self.record is not None:
            self.record.back_to(learner.step)
        self._write("roll_back", left=left, to=learner.step, checkpoint=found.folder.name)
        self._say(f"went back to step {learner.step}, {found.folder.name}, {left - learner.step} steps before")
        passes.restart(self.batches_from(learner.step))
        return learner.step

    def _random(self, own: dict[str, Any] | None) -> None:
        if own is not None:
            load_random_state(own["random"])
        else:
            seed_everything(self.learner.seed_of_rank)

    # ------------------------------------------------------------------------------------------ replicas

    def compare(self, *, may_go_back: bool = True) -> None:
        """Compare the replicas, where the recipe asks for it.

        RefusedStepError, or RollBack where guard.differs says so: some differ.
        """
        if self.checksums is None:
            return
        learner = self.learner
        found = self.checksums.differences(learner.model, learner.optimizer, learner.ema)
        if not found:
            return
        text = f"after step {learner.step} {'; '.join(one.in_words() for one in found)}"
        goes_back = learner.config.guard.differs == "roll_back" and may_go_back
        self._record_difference(found, "roll_back" if goes_back else "stop")
        self.differed += 1
        if goes_back and self.differed <= learner.config.guard.most:
            raise RollBack(text, None)
        often = f" It went back {self.differed - 1} times before." if self.differed > 1 else ""
        raise AgreedError(
            f"{text}. Replicas compute the same from the same numbers, so a device or its memory is at fault, or a module "
            f"keeps what only its rank knows.{often} Nothing was saved since the last comparison, so the same command goes on "
            "from sound weights (guard.differs=roll_back does so by itself); see to the machine of that rank"
        )

    def _record_difference(self, found: Sequence[Difference], action: str) -> None:
        step = self.learner.step
        for one in found:
            told = {"part": one.part, "ranks": list(one.ranks), "replicas": list(one.replicas), "names": list(one.names[:20])}
            self._write(action, found="replicas differ", after_step=step, is_named=one.is_named, **told)

    # ------------------------------------------------------------------------------------------ words and files

    def _record_refusal(self, refusal: Refusal, kept: Path | None) -> None:
        if self.record is None:
            return
        tree = refusal.to_tree()
        names = [self.images.name_of(index) for index in refusal.index[:MOST_NAMES]]
        place = {} if kept is None else {"batch": str(kept.relative_to(self.folder))}
        step = {} if refusal.action == "roll_back" else {"step": refusal.step}  # lines with a step go where that runs again
        self._write(tree.pop("action"), **step, **tree, samples=self._samples(refusal.step - 1), images=names, **place)
        if refusal.action != "stop":
            done = {
                "skip": "its batch is left out and counts as seen",
                "roll_back": "the run goes back, to pass over its batch",
            }
            self._say(f"{refusal.in_words()}; {done[refusal.action]}")

    def _keep(self, refusal: Refusal, batches: list[Batch]) -> Path | None:
        """Write the batch; returns where it is, on rank 0."""
        if not self.learner.config.guard.batches:
            return None
        passes = [batch for batch in batches if not batch.idle]
        try:
            kept = refused_batch.write(self.folder, refusal.step, passes, self.learner.mesh)
            if self.learner.mesh.is_main:
                refused_batch.prune(self.folder, self.learner.config.guard.batches)
        except Exception as error:  # a full disk: the numbers of its images are in the record
            self._say(f"the batch of step {refusal.step} could not be kept: {error}")
            return None
        return kept

    def _samples(self, step: int) -> int:
        return len(self.learner.steps.positions(step))

    def _write(self, action: str, **values: Any) -> None:
        if self.record is not None:
            self.record.note("guard", action=action, **values)

    def _say(self, text: str) -> None:
        if self.record is not None:
            self.record.say(f"guard: {text}")


def check_guard(config: RunConfig) -> None:
    """ValueError: a step cannot be skipped, since more than running statistics change in it."""
    answers = {"guard.non_finite": config.guard.non_finite, "guard.spike": config.guard.spike}
    skips = next((name for name, answer in answers.items() if answer == "skip"), None)
    if skips is not None and config.gradient.compression == "powersgd":
        raise ValueError(
            f"{skips}=skip leaves out a step, and with gradient.compression=powersgd what a step's gradient leaves over goes "
            f"into the next ones; set {skips}=roll_back, or another gradient.compression"
        )
