"""One optimizer step, and the order of things around it.

    for each step:
        passes <- this rank's batches of the step, from the loader
        for each pass:  loss_sum <- task's loss of the model's output;  backward of loss_sum * copies / nominal count
        all ranks add up [loss_sum, count, problem, stop] while the last backward runs
        a problem or a loss that is not finite: raise on every rank, weights untouched
        gradients -> clip -> optimizer -> average;  record
        at the end of an epoch, or as asked: evaluate;  save

Gradients are averaged over ranks, so a loss scaled by copies of the model / count gives the gradient of the mean over the
whole batch, however unevenly it is shared.  The count is known when the backward has begun; so first it is taken for the
nominal one, of all samples (or all their pixels), and where fewer counted the gradients are scaled by nominal / count.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from widefield import sharded_state
from widefield.comm.mesh import AgreedError, Mesh
from widefield.config import RunConfig
from widefield.data.device import Preparation
from widefield.data.loader import Batch, Steps, close
from widefield.parallel.inactive import inactive
from widefield.parallel.optimizer_steps import clip_grad_norm_
from widefield.parallel.passes import backward_of, without_sync
from widefield.private_torch.tensors import foreach_mul_
from widefield.tasks import Task, is_per_pixel
from widefield.training.arithmetic import Arithmetic
from widefield.training.batch_sharding import on_tiles
from widefield.training.schedule import Schedule


class NonFiniteLossError(AgreedError):
    """The loss is NaN or infinite; `index` numbers the images of the step, over all ranks."""

    def __init__(self, text: str, *, step: int, index: list[int]) -> None:
        super().__init__(text)
        self.step, self.index = step, index


@dataclass
class Learner:
    """A model with all that changes as it learns."""

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
    """A batch of one image, for a rank that has none of its own."""
    ema: AveragedModel | None = None
    step: int = 0
    """Optimizer steps done."""
    skipped: list[str] = field(default_factory=list)
    """Unreadable images this rank left out, and names as the first of its copy."""
    order: str = ""
    """SHA-256 chain over the images this rank has learnt from, in order: two runs with the same one saw the same images."""

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
        """Loss of the model on one image twice: a trial pass, for strategies that look at the graph first."""
        image, target = self._placed(self.dummy_batch)
        with self.arithmetic.autocast():
            output = (self.model if model is None else model)(torch.cat([image, image]))
        target = torch.cat([target, target])
        return self._loss_of(output, target) / len(target)

    def images_of_a_pass(self) -> Tensor:
        """As many images as this rank's first pass has, all of them the spare one: what the model is going to be given."""
        image, _ = self._placed(self.dummy_batch)
        return torch.cat([image] * self._rows_of_a_pass())

    def like_a_pass(self) -> Tensor:
        """The same without memory, on meta; whole images, where the mesh cuts them."""
        image, _ = self.prepare(self.dummy_batch)
        shape = self.dummy_batch.whole_shape or image.shape[1:]
        like = torch.empty((self._rows_of_a_pass(), *shape), dtype=image.dtype, device="meta")
        return like.to(memory_format=self.prepare.format_of(like))

    def _rows_of_a_pass(self) -> int:
        return -(-len(self.steps.positions(0)) // (self.mesh.copies * self.config.gradient.accumulate))

    def _placed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and targets as the model and the task take them: tiled where the mesh cuts images."""
        image, target = self.prepare(batch)
        pixels = is_per_pixel(self.task)
        return on_tiles(image, batch, self.mesh), on_tiles(target, batch, self.mesh) if pixels else target

    def learn(self, passes: list[Batch], *, stop: bool) -> tuple[float, bool]:
        """One optimizer step on this rank's passes; the loss of the whole batch, and whether any rank wants to stop.

        AgreedError on every rank, weights untouched: a rank could not read its data.  NonFiniteLossError likewise.
        """
        passes = [batch for batch in passes if not batch.idle]
        nominal = len(self.steps.positions(self.step)) * self._counted_in(self.dummy_batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_now()
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, count, wants_to_stop = self._gradients(passes, stop, nominal)
        self._check(loss_sum, count, passes)
        self._update(scale=nominal / count)
        self.step += 1
        self.order = _chained(self.order, passes)
        if self.mesh.is_first_of_copy:
            self.skipped += [name for batch in passes for name in batch.skipped]
        return loss_sum / count, wants_to_stop

    @staticmethod
    def _counted_in(batch: Batch) -> int:
        """How many losses an image has: one, or one per pixel of the whole."""
        pixels = batch.target.shape[1:]
        return math.prod(pixels if batch.whole_shape is None or not pixels else batch.whole_shape[1:])

    def _gradients(self, passes: list[Batch], stop: bool, nominal: int) -> tuple[float, float, bool]:
        """Backward of every pass; sums over ranks of the loss and its count, and whether to stop."""
        own = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        totals: list[Callable[[], list[float]]] = []

        def known(loss: Tensor, count: int | Tensor, *, last: bool) -> None:
            if self.mesh.is_first_of_copy:
                own[0] += loss
                own[1] += count
            if last:
                totals.append(self._start_total(own, passes, stop))

        for number, batch in enumerate(passes):
            last = number == len(passes) - 1
            with ExitStack() as stack:
                if not last:
                    stack.enter_context(without_sync(self.model))
                if batch.samples == 0:
                    stack.enter_context(inactive(self.model))
                self._pass(batch, nominal, partial(known, last=last))
        loss_sum, count, problems, stops = totals[0]()
        if problems:
            self.mesh.agree(next((batch.problem for batch in passes if batch.problem is not None), None))
        return loss_sum, count, stops > 0

    def _pass(self, batch: Batch, nominal: int, known: Callable[[Tensor, int | Tensor], None]) -> None:
        """Forward and backward of one pass.  A batch that is a stand-in has a loss and a count of 0, with a graph all the same.

        known: told the loss sum and the count as soon as this rank has them.
        """
        image, target = self._placed(batch)
        count = self.task.count(target) if batch.samples else 0
        backward_of(
            self.model,
            image,
            target,
            loss_of=self._loss_of if batch.samples else lambda output, target: self._loss_of(output, target) * 0.0,
            scaled=lambda loss: self.scaler.scale(loss * (self.mesh.copies / nominal)),
            autocast=self.arithmetic.autocast,
            on_loss=lambda loss: known(loss, count),
        )

    def _loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        """Losses are taken in float32 or wider, outside autocast."""
        if isinstance(output, Tensor):
            output = output.to(torch.promote_types(output.dtype, torch.float32))
        return self.task.loss_sum(output, target)

    def _start_total(self, own: Tensor, passes: list[Batch], stop: bool) -> Callable[[], list[float]]:
        problem = any(batch.problem is not None for batch in passes)
        rest = torch.tensor([float(problem), float(stop)], dtype=torch.float64).to(own.device, non_blocking=True)
        return self.mesh.start_sum(torch.cat([own, rest]))

    def _check(self, loss_sum: float, count: float, passes: list[Batch]) -> None:
        if count == 0:
            raise AgreedError(
                f"no image of step {self.step + 1} could be read, or none has a pixel that counts, so there is nothing to "
                "learn from; see data.path"
            )
        if not abs(loss_sum) < float("inf"):
            own = [int(i) for batch in passes if batch.samples and self.mesh.is_first_of_copy for i in batch.index]
            gathered = self.mesh.gather_objects(own)
            raise NonFiniteLossError(
                f"the loss of step {self.step + 1} is {loss_sum}; the optimizer did not step and the weights are those of "
                f"step {self.step}. Look at its images, which nan.json in the run folder names; a lower optimizer.lr, "
                "optimizer.clip_norm=1 or a longer schedule.warmup are the usual cures",
                step=self.step + 1,
                index=[index for part in gathered for index in part],
            )

    def _update(self, scale: float) -> None:
        """Clip, step, average.  `scale` corrects gradients where not every sample or pixel of the batch counted."""
        if scale != 1.0:
            foreach_mul_(self._gradients_here(), scale)
        if self.config.optimizer.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model, self.mesh, self.config.optimizer.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def _gradients_here(self) -> list[Tensor]:
        """This rank's part of every gradient; they share the gradients' memory."""
        return [sharded_state.local(p.grad) for p in self._trained if p.grad is not None]

    def is_finite(self) -> bool:
        """Whether every weight is a finite number, on every rank; where ranks hold parts, every rank calls it."""
        return sharded_state.are_finite(self.mesh, self._trained)


def _chained(order: str, passes: list[Batch]) -> str:
    digest = hashlib.sha256(order.encode())
    for batch in passes:
        digest.update(batch.index[: batch.samples].numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class StepTimes:
    """Wall seconds of a step, and how many of them went into waiting for data."""

    seconds: float
    data_seconds: float


class Passes:
    """Groups a loader's batches into steps and notes the time spent waiting for them.

    begins: called as each step does.
    """

    def __init__(self, batches: Iterator[Batch], passes: int, begins: Callable[[], None] | None = None) -> None:
        self._batches, self._passes, self._begins = batches, passes, begins
        self.in_step_since: float | None = None
        """When the step that runs now began; None between steps.  Other threads may read it."""
        self._waited, self._began = 0.0, time.perf_counter()

    def next(self) -> list[Batch]:
        if self._begins is not None:
            self._begins()
        self.in_step_since = start = time.perf_counter()
        group = [next(self._batches) for _ in range(self._passes)]
        self._waited = time.perf_counter() - start
        return group

    def lap(self) -> StepTimes:
        """Times since the last lap."""
        now = time.perf_counter()
        times = StepTimes(now - self._began, self._waited)
        self._began, self.in_step_since = now, None
        return times

    def close(self) -> None:
        """End the processes that read ahead."""
        close(self._batches)

    def skip_lap(self) -> None:
        """Leave what has happened since the last lap (evaluation, a save) out of the next one."""
        self._began = time.perf_counter()
