"""`data.batch_size=auto`: the largest batch that fits the memory of every rank and leaves 20 steps an epoch.

The first candidate is the smallest batch of which each copy of the model has a sample in every pass, and the next one is
always twice as large.  Each is tried in STEPS steps of training and one batch of an evaluation, with a model built for them and
process groups of their own (comm/attempt.py), and every rank measures its peak of memory.  From the last two peaks the next one
follows on a line: the search ends before it would exceed SHARE of what a rank may use, or where a rank runs out of memory after
all.  Nothing is left of it, since the run builds its model anew.  All ranks decide from the numbers of all, so they choose the
same.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from widefield import sharded_state
from widefield.comm.attempt import attempt
from widefield.comm.mesh import AgreedError, Mesh
from widefield.config import ScheduleConfig
from widefield.data.order import Steps
from widefield.quantity import bytes_text, count_of
from widefield.streaming.storage.heap import trim_heap
from widefield.training.assemble import Parts, evaluate_parts, learner_of, rebuilt, training_batches
from widefield.training.given import share_given
from widefield.training.loop import Learner, NonFiniteLossError
from widefield.training.memory import memory_bytes, peak_memory_bytes, reset_peak, usable_bytes
from widefield.training.out_of_memory import is_full
from widefield.training.passes import Passes
from widefield.training.state import load_random_state, random_state
from widefield.training.terminal import say

SHARE = 0.8
"""Of the memory that a rank may use: the rest is for fragments, and for what a few steps do not show."""
STEPS = 2
"""For each candidate; from the second one on, the optimizer has its state."""
LEAST_STEPS = 20
"""An epoch has at least as many, but for the smallest batch."""
_FULL = "out of memory"
_TOO_SMALL = "Expected more than 1 value per channel"
"""What torch's batch normalization says of a single image of one pixel."""


@dataclass(frozen=True)
class MemoryPeak:
    """What the steps of a batch take on one rank, in bytes.  fixed: the part that a batch of no images would take."""

    peak: int
    fixed: int
    is_lifetime: bool = False
    """Whether memory before these steps may have been the peak: the system cannot reset it."""


Measure = Callable[[Parts, Mesh, int, Callable[[], bool]], MemoryPeak]


class _RefusedBatchError(Exception):
    """All ranks refuse a batch, as one that recompute.memory does not hold."""


def find_batch_size(
    parts: Parts, *, is_asked_to_stop: Callable[[], bool], measure: Measure | None = None, usable: int | None = None
) -> tuple[int, list[str]]:
    """The batch size, and the reason with the peaks, the same on every rank.  Every rank calls it.

    parts: `without_model`, for the memory of one would count.
    measure, usable: in place of steps of training, and of the bytes that this rank may use.
    AgreedError, on every rank: not even the smallest batch fits, data cannot be read, or a rank is asked to stop.
    """
    mesh, measure = parts.mesh, measure or measured
    search = _TriedBatches(parts, mesh.gather_objects(int(SHARE * (usable or _usable(mesh)))))
    if mesh.is_main:
        say(f"data.batch_size=auto: {STEPS} steps with each batch, the smallest first")
    with _as_before(parts):
        for batch in candidates(parts):
            if search.ends_before(batch):
                break
            peaks, problem = attempt(
                mesh, lambda own, batch=batch: measure(parts, own, batch, is_asked_to_stop), gives_up=_reason_of(mesh)
            )
            _free(mesh)
            if not search.goes_on(batch, peaks, problem):
                break
    return search.chosen, search.in_words()


def without_model(parts: Parts) -> Parts:
    """The same parts, whose model was not needed: its memory is free."""
    return replace(parts, model=nn.Identity())


def candidates(parts: Parts) -> Iterator[int]:
    """The batches to try, the smallest first."""
    samples, batch = len(parts.dataset.train), smallest_batch(parts)
    yield batch
    while Steps(samples, 2 * batch).per_epoch >= LEAST_STEPS:
        batch *= 2
        yield batch


def smallest_batch(parts: Parts) -> int:
    """The batch with one sample for each copy of the model, pass and micro-batch, or two where pairs are mixed."""
    config, plan = parts.config, parts.mesh.plan
    micro_batches = (plan.pipeline.micro_batches or 1) if plan.stage > 1 else 1
    return config.data.cut_multiple * parts.mesh.copies * config.gradient.accumulate * micro_batches


# ---------------------------------------------------------------------------------------------- one candidate


def measured(parts: Parts, mesh: Mesh, batch: int, is_asked_to_stop: Callable[[], bool]) -> MemoryPeak:
    """The memory of steps of training with `batch`.  mesh: one for these steps alone."""
    tried = rebuilt(_with_plain_schedule(parts), mesh, batch=batch)
    tried = replace(tried, task=_copy(parts.task))
    share_given(tried.given, tried.dataset, tried.model, mesh)
    try:
        learner, _ = mesh.together(lambda: learner_of(tried))
    except AgreedError as error:
        raise _RefusedBatchError(str(error)) from None
    _free(mesh)  # else the steps take what the process has had for long, and seem to need nothing
    before = memory_bytes(mesh.device)
    was_reset = reset_peak(mesh.device)
    _take_steps(tried, learner, is_asked_to_stop)
    evaluate_parts(tried, learner.model, batches=1)
    peak = peak_memory_bytes(mesh.device)
    return MemoryPeak(peak, min(peak, before + _kept_bytes(learner)), is_lifetime=not was_reset)


def _take_steps(tried: Parts, learner: Learner, is_asked_to_stop: Callable[[], bool]) -> None:
    batches = training_batches(tried, first=0, last=STEPS, dummy_batch=learner.dummy_batch)
    passes = Passes(batches, tried.config.gradient.accumulate)
    try:
        for _ in range(STEPS):
            _, stopped = learner.learn(passes.next(), stop=is_asked_to_stop())
            if stopped:
                raise AgreedError("stopped in the search for a batch size, so nothing was trained; start it again")
    except NonFiniteLossError:  # the memory is known by then, and training will say where it comes to that
        pass
    finally:
        passes.close()


def _with_plain_schedule(parts: Parts) -> Parts:
    """The same parts with a constant rate: of a smaller batch, a warm-up of epochs may be longer than a run of some steps."""
    return replace(parts, config=parts.config.model_copy(update={"schedule": ScheduleConfig(name="constant")}))


def _copy(task: Any) -> Any:
    """A copy, since a loss of the user's may change with each call; the task itself where it cannot be copied."""
    with contextlib.suppress(Exception):
        return copy.deepcopy(task)
    return task


def _kept_bytes(learner: Learner) -> int:
    """The bytes of this rank's gradients and state of the optimizer on its device."""
    tensors = [parameter.grad for parameter in learner.model.parameters() if parameter.grad is not None]
    tensors += [value for values in learner.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    here = [sharded_state.local(tensor) for tensor in tensors]
    return sum(tensor.nbytes for tensor in here if tensor.device.type == learner.mesh.device.type)


def _reason_of(mesh: Mesh) -> Callable[[Exception], str | None]:
    """Of an error in a candidate's steps: why this rank gives up; None, and the error ends the run."""
    who = f"rank {mesh.rank}: " if mesh.size > 1 else ""

    def reason(error: Exception) -> str | None:
        text = str(error).strip()
        if isinstance(error, AgreedError):
            return None
        if isinstance(error, _RefusedBatchError):
            return text
        if is_full(error):
            return f"{who}{_FULL}" + (f" ({text.splitlines()[0][:200]})" if text else "")
        return f"{who}{text}" if _TOO_SMALL in text else None

    return reason


def _usable(mesh: Mesh) -> int:
    _free(mesh)
    return usable_bytes(mesh.device, mesh.world)


def _free(mesh: Mesh) -> None:
    gc.collect()
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


@contextlib.contextmanager
def _as_before(parts: Parts) -> Iterator[None]:
    """Afterwards random numbers go on as if there had been no steps, and no peak of memory or compiled code is left of them."""
    random = random_state()
    try:
        yield
    finally:
        load_random_state(random)
        reset_peak(parts.mesh.device)
        if parts.config.model.compile or (parts.config.stream is not None and parts.config.stream.compile):
            torch.compiler.reset()  # code for any batch is another than for the first one


# ---------------------------------------------------------------------------------------------- all candidates


class _TriedBatches:
    """What was found so far.  usable: the bytes that each rank may use for a step."""

    def __init__(self, parts: Parts, usable: list[int]) -> None:
        self.samples, self.usable = len(parts.dataset.train), usable
        self.peaks: dict[int, list[MemoryPeak]] = {}
        """Of the batches that fit, by rank."""
        self._end, self._problem = "", ""

    def ends_before(self, batch: int) -> bool:
        """Whether a rank's extrapolated peak is too large."""
        if not self.peaks:
            return False
        wanted = [self._extrapolated(rank, batch) for rank in range(len(self.usable))]
        if is_full := self._are_too_large(wanted):
            self._end = f"with {batch} images it would be {bytes_text(max(wanted))}"
        return is_full

    def goes_on(self, batch: int, peaks: list[MemoryPeak], problem: str | None) -> bool:
        """Note what was measured; whether a larger batch is to be tried."""
        if problem is not None:
            self._end, self._problem = f"with {batch} images: {problem}", problem
            return _TOO_SMALL in problem and not self.peaks
        if self.peaks and self._are_too_large([each.peak for each in peaks]):
            self._end = f"with {batch} images it was {bytes_text(max(each.peak for each in peaks))}"
            return False
        self.peaks[batch], self._end = peaks, ""
        return True

    def _extrapolated(self, rank: int, batch: int) -> float:
        """This rank's peak with `batch` images, on the line through its last two peaks, the first of which is that of none.

        Two lifetime peaks may be one and the same, of neither batch: the line from that of none is never too flat.
        """
        last = max(self.peaks)
        now = self.peaks[last][rank]
        before = None if now.is_lifetime else self.peaks.get(last // 2)
        growth = (now.peak - before[rank].peak) / (last / 2) if before else (now.peak - now.fixed) / last
        return now.peak + max(0.0, growth) * (batch - last)

    def _are_too_large(self, peaks: list[Any]) -> bool:
        return any(peak > most for peak, most in zip(peaks, self.usable, strict=True))

    @property
    def chosen(self) -> int:
        """AgreedError: nothing fits, or the smallest batch is refused as that number would be."""
        if not self.peaks and _FULL not in self._problem:
            raise AgreedError(self._problem)
        if not self.peaks:
            raise AgreedError(
                f"data.batch_size=auto: the smallest batch cannot be trained on, {self._end}; set gradient.accumulate=1, "
                "recompute, stream.memory or a mesh of more ranks, or a number for data.batch_size"
            )
        return max(self.peaks)

    def in_words(self) -> list[str]:
        batch = self.chosen
        peak, most = max(
            ((each.peak, most) for each, most in zip(self.peaks[batch], self.usable, strict=True)),
            key=lambda pair: pair[0] / max(1, pair[1]),
        )
        steps = [Steps(self.samples, size).per_epoch for size in (batch, 2 * batch)]
        few = "" if self._end else f", and {steps[1]:,} with twice as many images, fewer than {LEAST_STEPS}"
        memory = f"a step's peak is {bytes_text(peak)} of the {bytes_text(most)} that a rank may use"
        shown = "  ".join(f"{size:,}: {bytes_text(max(each.peak for each in its))}" for size, its in self.peaks.items())
        return [
            f"data.batch_size={batch}: {count_of(steps[0], 'step')} an epoch{few}; {memory}"
            + (f", and {self._end}" if self._end else ""),
            f"  peak by batch: {shown}",
        ]
