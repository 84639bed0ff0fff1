"""One optimizer step.

    for each step:
        passes <- this rank's batches of the step, from the loader
        for each pass:  loss_sum <- task's loss of the model's output;  backward of loss_sum * copies / nominal count
        all ranks add up [loss_sum, count, problem, stop] while the last backward runs
        a problem: raise on every rank, weights untouched
        all ranks add up the squared norms of their gradients;  the guard looks at loss and norm: stop, skip or roll back
        gradients -> clip -> optimizer -> average;  record
        at the end of an epoch, or as asked: evaluate;  save

Gradients are averaged over ranks, so a loss scaled by copies of the model / count gives the gradient of the mean over the
whole batch, however unevenly it is divided among ranks.  The count of the batch is known only after the backward has begun.  So
the loss is scaled by the nominal count, of all samples (or all their pixels), and where fewer counted, the gradients are
multiplied by nominal / count.

A loss with `finish`, which is no sum over a count, is finished from the sums of a pass over all ranks: they are added up
between forward and backward, and the parts of other ranks are constants in this rank's backward.  Its batch is that of the
pass; passes weigh as many samples as they have.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
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
from widefield.data.device import Preparation
from widefield.data.loader import Batch, close
from widefield.data.order import Steps
from widefield.parallel.inactive import inactive
from widefield.parallel.optimizer_steps import clip_grad_norm_
from widefield.parallel.passes import backward_of, without_sync
from widefield.private_torch.tensors import foreach_mul_
from widefield.tasks import Task, is_per_pixel, labels_of, scale_of
from widefield.tiled.api import whole
from widefield.training.arithmetic import Arithmetic, widened
from widefield.training.batch_sharding import on_tiles
from widefield.training.best import Best
from widefield.training.freezing import Freezing
from widefield.training.guard import Guard, NonFiniteLossError, RollBack, refused
from widefield.training.heads import has_heads, loss_of_heads
from widefield.training.reads import Reads
from widefield.training.schedule import Schedule

__all__ = ["Learner", "NonFiniteLossError", "Passes", "RollBack", "StepTimes"]


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
    reads: Reads = field(default_factory=Reads)
    """What this rank has read from files since this process began to train."""
    guard: Guard = field(default_factory=Guard)
    """Looks at each step before the optimizer steps."""

    @property
    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def epoch(self) -> float:
        """Epochs done, with the fraction."""
        return self.steps.seen(self.step) / self.steps.samples

    def lr_now(self) -> float:
        """The learning rate of the next step."""
        return self.lr * self.schedule.factor(self.steps.seen(self.step))

    def trial_step(self, model: nn.Module | None = None) -> Tensor:
        """The mean loss on a batch of one image twice: the `trial_step` of `parallelize`.  model: in place of the learner's."""
        image, target = self._on_tiles(self.dummy_batch)
        with self.arithmetic.autocast():
            output = (self.model if model is None else model)(torch.cat([image, image]))
        target = torch.cat([target, target])
        return self._loss_of(output, target) / len(target)

    def images_of_a_pass(self) -> Tensor:
        """The dummy image repeated to the size of this rank's first pass; tiled where the mesh cuts images."""
        image, _ = self._on_tiles(self.dummy_batch)
        return torch.cat([image] * self._rows_of_a_pass())

    def meta_pass(self) -> Tensor:
        """A meta tensor like the images of this rank's first pass, whole images even where the mesh cuts them."""
        image, _ = self.prepare(self.dummy_batch)
        shape = self.dummy_batch.whole_shape or image.shape[1:]
        like = torch.empty((self._rows_of_a_pass(), *shape), dtype=image.dtype, device="meta")
        return like.to(memory_format=self.prepare.format_of(like))

    def _rows_of_a_pass(self) -> int:
        return -(-len(self.steps.positions(0)) // (self.mesh.copies * self.config.gradient.accumulate))

    def _on_tiles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Prepared images and targets, as TiledTensors where the mesh cuts images."""
        image, target = self.prepare(batch)
        if is_per_pixel(self.task):
            target = on_tiles(target, batch, self.mesh, scale=scale_of(self.task))
        return on_tiles(image, batch, self.mesh), target

    def learn(self, passes: list[Batch], *, stop: bool) -> tuple[float, bool]:
        """One optimizer step on this rank's passes.  Returns the mean loss of the whole batch, and whether any rank has `stop`.

        A step that the guard skips changes nothing but the counts.
        On every rank, with the weights unchanged: AgreedError, a rank could not read its data; RefusedStepError, which is
        NonFiniteLossError of NaN and Inf, and RollBack, as the guard says.
        """
        passes = [batch for batch in passes if not batch.idle]
        nominal = len(self.steps.positions(self.step)) * self.losses_per_image(self.dummy_batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_now() * group.get("lr_scale", 1.0)
        epoch = self.steps.seen(self.step) // self.steps.samples
        self.freezing.begin_step(self.model, epoch)
        self.optimizer.zero_grad(set_to_none=True)
        before = {name: buffer.clone() for name, buffer in self._buffers()} if self.guard.may_skip else {}
        with self.in_passes():
            loss_sum, count, wants_to_stop = self._gradients(passes, stop, nominal)
        self._check(count)
        self.freezing.drop_gradients(self.model, epoch)
        if self._is_taken(loss_sum / count, passes, scale=nominal / count):
            self.before_update()
            self._update(scale=nominal / count)
        else:
            self._undo(before)
        self.pass_over(passes)
        return loss_sum / count, wants_to_stop

    def pass_over(self, passes: list[Batch]) -> None:
        """Count the samples of a step as seen."""
        self.reads.add(passes, epochs=Fraction(len(self.steps.positions(self.step)), self.steps.samples))
        self.step += 1
        self.order = _chained(self.order, passes)
        if self.mesh.is_first_of_copy:
            self.skipped += [name for batch in passes for name in batch.skipped]

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Those that this rank has: running statistics, and others that a pass may change."""
        return [(name, buffer) for name, buffer in self.model.named_buffers() if not buffer.is_meta]

    @torch.no_grad()
    def _undo(self, before: dict[str, Tensor]) -> None:
        """Leave nothing of a step that is skipped: its running statistics may be NaN."""
        for name, buffer in self._buffers():
            buffer.copy_(before[name])
        self.optimizer.zero_grad(set_to_none=True)

    def _is_taken(self, loss: float, passes: list[Batch], *, scale: float) -> bool:
        """Whether the optimizer may step; False where the step is skipped.  RefusedStepError, RollBack: on every rank."""
        refusal = self.guard.judge(self.step, loss, self._gradient_norm(scale) if math.isfinite(loss) else None)
        if refusal is None:
            return True
        own = [int(i) for batch in passes if batch.samples and self.mesh.is_first_of_copy for i in batch.index]
        refusal = replace(refusal, index=[index for part in self.mesh.gather_objects(own) for index in part])
        if refusal.action == "stop":
            raise refused(refusal)
        self.guard.count(refusal)
        if refusal.action == "roll_back":
            raise RollBack(refusal.in_words(), refusal)
        self.guard.told.append(refusal)
        return False

    def _gradient_norm(self, scale: float) -> float | None:
        """The norm of the whole gradient as it would be stepped, before it is clipped, the same on every rank.

        None where the guard does not look at it, and where float16's scaler leaves out the step by itself.
        """
        if not self.guard.config.gradient:
            return None
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        square = self.mesh.start_sum(sharded_state.square_norm(self.model, self.mesh, named))()[0] / self.mesh.size
        if not self.scaler.is_enabled():
            return scale * square**0.5 if square >= 0 else math.nan
        norm = scale * square**0.5 / self.scaler.get_scale()
        return norm if math.isfinite(norm) else None

    def losses_per_image(self, batch: Batch) -> int:
        """The number of losses of one image: 1, or the number of its pixels, times that of its classes if it has several."""
        if getattr(self.task, "counts_images", False) or self._finish is not None:
            return 1
        each = batch.target.shape[1:]
        if batch.whole_shape is None or not is_per_pixel(self.task):
            return math.prod(each)
        pixels = [scale_of(self.task) * extent for extent in batch.whole_shape[1:]]
        return math.prod((*each[: len(each) - len(pixels)], *pixels))

    @property
    def _finish(self) -> Callable[[Tensor], Tensor] | None:
        return getattr(self.task, "finish", None)

    def _gradients(self, passes: list[Batch], stop: bool, nominal: int) -> tuple[float, float, bool]:
        """Run every pass.  Returns the sums over ranks of the loss and its count, and whether to stop."""
        own = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        totals: list[Callable[[], list[float]]] = []

        def on_loss(loss: Tensor, count: int | Tensor, *, last: bool) -> None:
            if self.mesh.is_first_of_copy:
                own[0] += loss if self._finish is None else loss / self.mesh.copies  # every copy has the loss of all
                own[1] += count
            if last:
                totals.append(self._start_total(own, passes, stop))

        for number, batch in enumerate(passes):
            last, self.pass_number = number == len(passes) - 1, number + 1
            if number:
                self.between_passes()
            with ExitStack() as stack:
                if not last:
                    stack.enter_context(without_sync(self.model))
                if batch.samples == 0:
                    stack.enter_context(inactive(self.model))
                self._pass(batch, nominal, partial(on_loss, last=last))
        loss_sum, count, problems, stops = totals[0]()
        if problems:
            self.mesh.agree(next((batch.problem for batch in passes if batch.problem is not None), None))
        return loss_sum, count, stops > 0

    def _pass(self, batch: Batch, nominal: int, on_loss: Callable[[Tensor, int | Tensor], None]) -> None:
        """Forward and backward of one pass.  A dummy batch runs too, with its loss multiplied by 0 and a count of 0.

        on_loss: called with the loss sum and the count as soon as this rank has them.
        """
        image, target = self._on_tiles(batch)
        count = self.task.count(target) if batch.samples else 0
        loss_of = self._loss_of if batch.samples else lambda output, target: self._loss_of(output, target) * 0.0
        if self._finish is not None:
            loss_of = partial(self._loss_of_all, samples=batch.samples)
        backward_of(
            self.model,
            image,
            target,
            loss_of=loss_of,
            scaled=lambda loss: self.scaler.scale(loss * (self.mesh.copies / nominal)),
            autocast=self.arithmetic.autocast,
            on_loss=lambda loss: on_loss(loss, count),
        )

    def _loss_of(self, output: Any, target: Tensor) -> Tensor:
        """The task's loss sum, computed in float32 or wider, outside of autocast; with those of auxiliary heads, if any."""
        if has_heads(self.config.model, output):
            sums = not getattr(self.task, "counts_images", False)
            return loss_of_heads(self.config.model, output, target, self._loss_of, sums=sums)
        return self.task.loss_sum(self._for_loss(output), target)

    def _for_loss(self, output: Any) -> Any:
        """In float32 or wider; whole where targets are boxes, which anchors of all places are matched with."""
        return widened(whole(output) if labels_of(self.task) == "boxes" else output)

    def _loss_of_all(self, output: Any, target: Tensor, *, samples: int) -> Tensor:
        """The loss of this pass's samples on all copies times their number, the same on every rank; see the module's docstring.

        samples: how many of them this copy has; of a dummy batch 0, and its sums are multiplied by 0.
        """
        if has_heads(self.config.model, output):
            of_all = partial(self._loss_of_all, samples=samples)
            return loss_of_heads(self.config.model, output, target, of_all, sums=False)
        own = whole(self.task.sums(self._for_loss(output), target)).double() * float(samples > 0)
        parts = torch.cat([own.detach().flatten(), own.new_full((1,), samples)])
        total = self.mesh.sum_(parts if self.mesh.is_first_of_copy else torch.zeros_like(parts))
        sums = total[:-1].view(own.shape) + (own - own.detach())
        return self.task.finish(sums) * total[-1]

    def _start_total(self, own: Tensor, passes: list[Batch], stop: bool) -> Callable[[], list[float]]:
        problem = any(batch.problem is not None for batch in passes)
        rest = torch.tensor([float(problem), float(stop)], dtype=torch.float64).to(own.device, non_blocking=True)
        return self.mesh.start_sum(torch.cat([own, rest]))

    def _check(self, count: float) -> None:
        if count == 0:
            raise AgreedError(
                f"no image of step {self.step + 1} could be read, or none has a pixel that counts, so there is nothing to "
                "learn from; see data.path"
            )

    def _update(self, scale: float) -> None:
        """Scale and clip gradients, step, update the moving average.  scale: nominal / actual count of losses."""
        if scale != 1.0:
            foreach_mul_(self._local_gradients(), scale)
        if self.config.optimizer.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model, self.mesh, self.config.optimizer.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def _local_gradients(self) -> list[Tensor]:
        """This rank's shard of every gradient, sharing its memory."""
        return [sharded_state.local(p.grad) for p in self._trained if p.grad is not None]

    def is_finite(self) -> bool:
        """Whether all weights are finite, on all ranks.  Every rank calls it."""
        return sharded_state.are_finite(self.mesh, self._trained)


def _chained(order: str, passes: list[Batch]) -> str:
    digest = hashlib.sha256(order.encode())
    for batch in passes:
        digest.update(batch.index[: batch.samples].numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class StepTimes:
    """The wall time of a step, and the part of it spent waiting for data."""

    seconds: float
    data_seconds: float


class Passes:
    """Groups a loader's batches into steps and measures the time spent waiting for them.

    passes: batches per step.  begins: called at the beginning of each step.
    """

    def __init__(self, batches: Iterator[Batch], passes: int, begins: Callable[[], None] | None = None) -> None:
        self._batches, self._passes, self._begins = batches, passes, begins
        self.in_step_since: float | None = None
        """The `time.perf_counter()` at the beginning of the current step; None between steps.  Other threads may read it."""
        self._waited, self._began = 0.0, time.perf_counter()

    def next(self) -> list[Batch]:
        """The batches of the next step."""
        if self._begins is not None:
            self._begins()
        self.in_step_since = start = time.perf_counter()
        group = [next(self._batches) for _ in range(self._passes)]
        self._waited = time.perf_counter() - start
        return group

    def lap(self) -> StepTimes:
        """The times since the last lap."""
        now = time.perf_counter()
        times = StepTimes(now - self._began, self._waited)
        self._began, self.in_step_since = now, None
        return times

    def close(self) -> None:
        """End the loader's worker processes."""
        close(self._batches)

    def restart(self, batches: Iterator[Batch]) -> None:
        """Go on with other batches."""
        self._batches = batches
        self.skip_lap()

    def skip_lap(self) -> None:
        """Exclude the time since the last lap (evaluation, a save) from the next one."""
        self._began = time.perf_counter()
