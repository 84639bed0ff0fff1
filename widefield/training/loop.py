"""One optimizer step.

    for each step:
        passes <- this rank's batches of the step, from the loader
        for each pass:  loss_sum <- task's loss of the model's output;  backward of loss_sum * copies / nominal count
        all ranks add up [loss_sum, count, problem, stop] while the last backward runs (replicas: see step_reports.py)
        a problem: raise on every rank, weights untouched
        all ranks add up the squared norms of their gradients;  the guard looks at loss and norm: stop, skip or roll back
        gradients -> clip -> optimizer -> average;  record
        at the end of an epoch, or as asked: evaluate;  save

Where copies of the model are replicas that step by themselves, gradients, clipping and the scaling are those of a replica's
samples, and the weights of all are averaged after some steps; see replicas.py.

Where modules learn by turns, all from the passes to the optimizer is done once per turn, on the same passes; see turns.py.

Gradients are averaged over ranks, so a loss scaled by copies of the model / count gives the gradient of the mean over the
whole batch, however unevenly it is divided among ranks.  The count of the batch is known only after the backward has begun.  So
the loss is scaled by the nominal count, of all samples (or all their pixels), and where fewer counted, the gradients are
multiplied by nominal / count.

A loss with `finish`, which is no sum over a count, is finished from the sums of a pass over all ranks: they are added up
between forward and backward, and the parts of other ranks are constants in this rank's backward.  Its batch is that of the
pass; passes weigh as many samples as they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from widefield import sharded_state
from widefield.comm.mesh import AgreedError, Mesh
from widefield.config import RunConfig
from widefield.data.batch import Batch, chained
from widefield.data.device import Preparation
from widefield.data.order import Steps
from widefield.data.transforms import seed_of
from widefield.parallel.inactive import inactive
from widefield.parallel.members import members_of
from widefield.parallel.optimizer_steps import clip_grad_norm_
from widefield.parallel.passes import backward_of, without_sync
from widefield.private_torch.tensors import foreach_mul_
from widefield.tasks import Task, is_per_pixel, scale_of
from widefield.tiled.api import whole
from widefield.training.arithmetic import Arithmetic
from widefield.training.batch_sharding import inputs_on_tiles, on_tiles
from widefield.training.best import Best
from widefield.training.freezing import Freezing
from widefield.training.guard import Guard, NonFiniteLossError, RollBack, refused
from widefield.training.heads import has_heads, loss_of_heads
from widefield.training.reads import Reads
from widefield.training.replicas import Replicas
from widefield.training.running_means import RunningMeans
from widefield.training.schedule import Schedule
from widefield.training.second_stage import for_loss
from widefield.training.step_reports import StepReports, nothing_counted
from widefield.training.turns import Turn, drop_gradients_of_others, learning, loss_of_turn, members_named, turns_of

__all__ = ["Learner", "NonFiniteLossError", "RollBack"]


@dataclass
class Learner:
    """A model with everything that changes while it trains."""

    config: RunConfig
    mesh: Mesh
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    lr: float
    arithmetic: Arithmetic
    scaler: torch.amp.GradScaler
    prepare: Preparation
    steps: Steps
    dummy_batch: Batch
    """A batch of one image, for a rank without samples in a pass."""
    best: Best
    scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)
    """Where several modules learn by turns, that of each one's loss."""
    between_passes: Callable[[], None] = lambda: None
    """Called on every rank between the passes of a step; it may raise StopNow."""
    before_update: Callable[[], None] = lambda: None
    """Called on every rank before weights, optimizer state and their average change."""
    in_passes: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context around all passes of a step."""
    pass_number: int = 0
    """The pass of the current step that runs, counted from 1.  Other threads may read it."""
    freezing: Freezing = field(default_factory=Freezing)
    """What learns later."""
    ema: AveragedModel | None = None
    step: int = 0
    """Optimizer steps done."""
    skipped: list[str] = field(default_factory=list)
    """The names of unreadable images that were left out; only on the first rank of a copy."""
    order: str = ""
    """A SHA-256 chain over the numbers of the images this rank has trained on: equal where two runs saw the same images."""
    losses: dict[str, float] = field(default_factory=dict)
    """Where several modules learn by turns, the mean loss of each that learned in the last step."""
    reads: Reads = field(default_factory=Reads)
    """What this rank has read from files since this process began to train."""
    guard: Guard = field(default_factory=Guard)
    """Looks at each step before the optimizer steps."""
    replicas: Replicas | None = None
    """Where copies of the model take steps of their own, this rank's among them."""
    reports: StepReports | None = None
    """Where these tell each other of their steps later; see step_reports.py."""

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def replica(self) -> Mesh:
        """The ranks that make each step together: all, or those of this replica."""
        return self.mesh if self.replicas is None else self.replicas.replica

    @property
    def together(self) -> Mesh:
        """The ranks that add up the loss of each step: all, or those of this replica."""
        return self.mesh if self.reports is None else self.replica

    @property
    def seed_of_rank(self) -> int:
        """Of this rank's random numbers: the same on ranks whose samples are rows of one batch."""
        first = self.mesh.copy if not self.replica.plan.is_one_batch else 0 if self.replicas is None else self.replicas.number
        return seed_of(self.config.seed, "rank", first)

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction."""
        return self.steps.seen(self.step) / self.steps.samples

    def lr_now(self) -> float:
        """The learning rate of the next step."""
        return self.lr * self.schedule.factor(self.steps.seen(self.step))

    def prepared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Prepared images and targets, as TiledTensors where the mesh cuts images."""
        image, target = self.prepare(batch)
        if is_per_pixel(self.task):
            target = on_tiles(target, batch, self.mesh, scale=scale_of(self.task))
        return inputs_on_tiles(image, batch, self.mesh, self.task), target

    def learn(self, passes: list[Batch], *, stop: bool) -> tuple[float, bool]:
        """One optimizer step on this rank's passes.  Returns the mean loss of the whole batch, and whether any rank has `stop`.

        With `reports` both are of this replica, and so are the errors, which the next exchange raises.
        A step that the guard skips changes nothing but the counts.
        On every rank, with the weights unchanged: AgreedError, a rank could not read its data; RefusedStepError, which is
        NonFiniteLossError of NaN and Inf, and RollBack, as the guard says.
        """
        passes = [batch for batch in passes if not batch.idle]
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_now() * group.get("lr_scale", 1.0)
        self.freezing.begin_step(self.model, self._epochs_done)
        turns, self.losses = turns_of(self.task, self.step), {}
        loss, wants_to_stop, is_taken = 0.0, False, False
        with nullcontext() if self.reports is None else self.reports.catching(self.step + 1, passes, self.buffers(), self.undo):
            for number, member in enumerate(turns if self.reports is None or self.reports.held is None else ()):
                with learning(self.model, member, self.replica.plan):
                    turn = Turn(member, turns[:number], self.step, self.scaler_of(member), RunningMeans(self.task, self.model))
                    mean, stops, took = self._turn(turn, passes, stop)
                self.losses |= {member: mean} if member else {}
                loss, wants_to_stop, is_taken = loss + mean, wants_to_stop or stops, is_taken or took
        if self.replicas is not None:
            self.replicas.after_step(self.step + 1, self.lr_now())
        if self.ema is not None and is_taken:
            self.ema.update_parameters(self.model)
        self.pass_over(passes)
        return loss, wants_to_stop

    def _turn(self, turn: Turn, passes: list[Batch], stop: bool) -> tuple[float, bool, bool]:
        """Forward and backward of all passes, and an update.  Returns the mean loss, who stops, and whether it was taken."""
        nominal = len(self.steps.positions(self.step)) * self.losses_per_image(self.dummy_batch)
        self.optimizer.zero_grad(set_to_none=True)
        before = {name: buffer.clone() for name, buffer in self.buffers()} if self.guard.may_skip else {}
        with nullcontext() if turn.after else self.in_passes():  # after an update a step can no longer be given up
            loss_sum, count, own_count, wants_to_stop = self._gradients(turn, passes, stop, nominal)
        if self.reports is not None:
            self.reports.sums.append((loss_sum, count))
        elif count == 0:
            raise AgreedError(nothing_counted(self.step + 1))
        self.freezing.drop_gradients(self.model, self._epochs_done)
        drop_gradients_of_others(self.model, turn.member)
        # of the copies that step together; a replica without a sample leaves out the step
        scale = nominal * self.replica.copies / self.mesh.copies / own_count if own_count else 0.0
        loss = loss_sum / count if count else 0.0
        is_taken = self._is_taken(turn, loss, passes, scale=scale)
        if is_taken:
            self.before_update()
            turn.means.update()
            if own_count:
                self._update(turn.scaler, scale=scale)
            if self.replicas is not None and not turn.after:
                self.replicas.count += own_count
        else:
            self.undo(before)
        return loss, wants_to_stop, is_taken

    @property
    def _epochs_done(self) -> int:
        return self.steps.seen(self.step) // self.steps.samples

    def scaler_of(self, member: str) -> torch.amp.GradScaler:
        """That of the member's loss; of a model that is one, `scaler`."""
        return self.scalers.get(member, self.scaler)

    def pass_over(self, passes: list[Batch]) -> None:
        """Count the samples of a step as seen."""
        self.reads.add(passes, epochs=Fraction(len(self.steps.positions(self.step)), self.steps.samples))
        self.step += 1
        self.order = chained(self.order, passes)
        if self.mesh.is_first_of_copy:
            self.skipped += [name for batch in passes for name in batch.skipped]

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Those that this rank has: running statistics, and others that a pass may change."""
        return [(name, buffer) for name, buffer in self.model.named_buffers() if not buffer.is_meta]

    @torch.no_grad()
    def undo(self, before: dict[str, Tensor]) -> None:
        """Leave nothing of a step that is skipped: its running statistics may be NaN."""
        for name, buffer in self.buffers():
            buffer.copy_(before[name])
        self.optimizer.zero_grad(set_to_none=True)

    def _is_taken(self, turn: Turn, loss: float, passes: list[Batch], *, scale: float) -> bool:
        """Whether the optimizer may step; False where the step is skipped.  RefusedStepError, RollBack: on every rank."""
        refusal = self.guard.judge(self.step, loss, self._gradient_norm(turn.scaler, scale) if math.isfinite(loss) else None)
        if refusal is None:
            return True
        own = [int(i) for batch in passes if batch.samples and self.mesh.is_first_of_copy for i in batch.index]
        index = [index for part in self.together.gather_objects(own) for index in part]
        refusal = replace(refusal, index=index, member=turn.member, after=turn.after)
        if refusal.action == "stop":
            raise refused(refusal)
        self.guard.count(refusal)
        if refusal.action == "roll_back":
            raise RollBack(refusal.in_words(), refusal)
        self.guard.told.append(refusal)
        return False

    def _gradient_norm(self, scaler: torch.amp.GradScaler, scale: float) -> float | None:
        """The norm of the whole gradient as it would be stepped, before it is clipped, the same on every rank.

        Of replicas that count steps together, the root of the mean square of their norms.
        None where the guard does not look at it, and where float16's scaler leaves out the step by itself.
        """
        if not self.guard.config.gradient:
            return None
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        own = sharded_state.square_norm(self.model, self.mesh, named) * scale**2
        square = self.together.start_sum(own)()[0] / self.together.size
        if not scaler.is_enabled():
            return square**0.5 if square >= 0 else math.nan
        norm = square**0.5 / scaler.get_scale()
        return norm if math.isfinite(norm) else None

    def losses_per_image(self, batch: Batch) -> int:
        """The number of losses of one image: 1, or that of its pixels, times that of its classes if it has several."""
        if getattr(self.task, "counts_images", False) or self._finish is not None or members_named(self.task):
            return 1
        each = batch.target.shape[1:]
        if batch.whole_shape is None or not is_per_pixel(self.task):
            return math.prod(each)
        pixels = [scale_of(self.task) * extent for extent in batch.whole_shape[1:]]
        return math.prod((*each[: len(each) - len(pixels)], *pixels))

    @property
    def _finish(self) -> Callable[[Tensor], Tensor] | None:
        return None if members_named(self.task) else getattr(self.task, "finish", None)

    def _gradients(self, turn: Turn, passes: list[Batch], stop: bool, nominal: int) -> tuple[float, float, float, bool]:
        """Run every pass.  Returns sums over `together`, the loss and its count; the count of this replica; whether to stop."""
        own = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        totals: list[Callable[[], list[float]]] = []

        def on_loss(loss: Tensor, count: int | Tensor, *, last: bool) -> None:
            if self.mesh.is_first_of_copy:
                own[0] += loss if self._finish is None else loss / self.replica.copies  # every copy has the loss of all
                own[1] += count
            if last:
                totals.append(self._start_total(own, turn.means, passes, stop))
                if self.together is not self.replica:
                    totals.append(self.replica.start_sum(own[1:].clone()))

        for number, batch in enumerate(passes):
            last, self.pass_number = number == len(passes) - 1, number + 1
            if number and not turn.after:
                self.between_passes()
            with ExitStack() as stack:
                if not last:
                    stack.enter_context(without_sync(self.model))
                for module in members_of(self.model).values() if batch.samples == 0 else ():
                    stack.enter_context(inactive(module))
                self._pass(turn, batch, nominal, partial(on_loss, last=last))
        loss_sum, count, *of_means, problems, stops = totals[0]()
        turn.means.set_sums_of_step(of_means, count)
        own_count = count if len(totals) == 1 else totals[1]()[0]
        if problems:
            self.together.agree(next((batch.problem for batch in passes if batch.problem is not None), None))
        return loss_sum, count, own_count, stops > 0

    def _pass(self, turn: Turn, batch: Batch, nominal: int, on_loss: Callable[[Tensor, int | Tensor], None]) -> None:
        """Forward and backward of one pass.  A dummy batch runs too, with its loss multiplied by 0 and a count of 0.

        on_loss: called with the loss sum and the count as soon as this rank has them.
        """
        factor = self.mesh.copies / nominal
        if turn.member:
            loss, count = self._loss_of_turn(turn, batch)
            on_loss(loss.detach(), count)
            return turn.scaler.scale(loss * factor).backward()
        image, target = self.prepared(batch)
        count = self.task.count(target) if batch.samples else 0
        own = partial(self.loss_of, seeds=batch.seeds)
        loss_of: Any = own if batch.samples else lambda output, target: own(output, target) * 0.0
        if self._finish is not None:
            loss_of = partial(self._loss_of_all, samples=batch.samples, seeds=batch.seeds)
        backward_of(
            self.model,
            image,
            target,
            loss_of=loss_of,
            scaled=lambda loss: turn.scaler.scale(loss * factor),
            autocast=self.arithmetic.autocast,
            on_loss=lambda loss: on_loss(loss, count),
        )

    def _loss_of_turn(self, turn: Turn, batch: Batch) -> tuple[Tensor, int]:
        """The loss and the samples that count.  Images and targets that no backward reads are gone when it returns."""
        image, target = self.prepared(batch)
        with self.arithmetic.autocast():
            loss = loss_of_turn(self.task, turn, self.model, image, target, batch)
        return (loss, len(target)) if batch.samples else (loss * 0.0, 0)

    def loss_of(self, output: Any, target: Tensor, *, seeds: Sequence[int] = (), model: nn.Module | None = None) -> Tensor:
        """The task's loss sum, computed in float32 or wider, outside of autocast; with those of auxiliary heads, if any.

        seeds: of the samples, for a loss that draws.  model: that gave the output, if it is not the learner's.
        """
        if has_heads(self.config.model, output):
            sums = not getattr(self.task, "counts_images", False)
            return loss_of_heads(self.config.model, output, target, self.loss_of, sums=sums)
        return self.task.loss_sum(self._for_loss(output, target, seeds, model), target)

    def _for_loss(self, output: Any, target: Tensor, seeds: Sequence[int], model: nn.Module | None = None) -> Any:
        """In float32 or wider; of boxes whole, and with what a second stage gives."""
        return for_loss(self.task, model or self.model, output, target, autocast=self.arithmetic.autocast, seeds=seeds)

    def _loss_of_all(self, output: Any, target: Tensor, *, samples: int, seeds: Sequence[int]) -> Tensor:
        """The loss of this pass's samples on all copies, of one replica, times their number; see the module's docstring.

        samples: how many of them this copy has; of a dummy batch 0, and its sums are multiplied by 0.
        """
        if has_heads(self.config.model, output):
            of_all = partial(self._loss_of_all, samples=samples, seeds=seeds)
            return loss_of_heads(self.config.model, output, target, of_all, sums=False)
        own = whole(self.task.sums(self._for_loss(output, target, seeds), target)).double() * float(samples > 0)
        parts = torch.cat([own.detach().flatten(), own.new_full((1,), samples)])
        total = self.replica.sum_(parts if self.mesh.is_first_of_copy else torch.zeros_like(parts))
        sums = total[:-1].view(own.shape) + (own - own.detach())
        return self.task.finish(sums) * total[-1]

    def _start_total(self, own: Tensor, means: RunningMeans, passes: list[Batch], stop: bool) -> Callable[[], list[float]]:
        told = [own, means.sums(own) * float(self.mesh.is_first_of_copy)] if means.decays else [own]
        problem = any(batch.problem is not None for batch in passes)
        rest = torch.tensor([float(problem), float(stop)], dtype=torch.float64).to(own.device, non_blocking=True)
        return self.together.start_sum(torch.cat([*told, rest]))

    def _update(self, scaler: torch.amp.GradScaler, scale: float) -> None:
        """Scale and clip gradients, and step.  scale: nominal / actual count of losses."""
        if scale != 1.0:
            foreach_mul_([sharded_state.local(p.grad) for p in self._trained if p.grad is not None], scale)
        if self.config.optimizer.clip_norm is not None:
            scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model, self.replica, self.config.optimizer.clip_norm)
        scaler.step(self.optimizer)
        scaler.update()

    def is_finite(self) -> bool:
        """Whether all weights are finite, on all ranks.  Every rank calls it."""
        return sharded_state.are_finite(self.mesh, self._trained)

    def consensus(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Inside, replicas that step by themselves have the mean of all; see replicas.py."""
        averages = [] if self.ema is None else list(self.ema.module.parameters())
        return nullcontext() if self.replicas is None else self.replicas.consensus(averages, optimizer=optimizer)
