"""What real ranks hold and send in one training step: of the allocator, of the process groups, of torch's counter of FLOPs.

The learner is made and called as in a run, and learns the same batch again and again; the step that counts is one after the
optimizer's states are there.  Nothing here knows of the emulation that is compared with it.
"""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from planner.allocations import allocations, mark
from planner.truth_cases import Case
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from widefield.comm.mesh import Mesh
from widefield.training.assemble import Parts, assemble, learner_of, training_batches
from widefield.training.loop import Learner
from widefield.training.passes import Passes

WARMUP = 3
STEPS = 2
GLOO_SECONDS = 1e-3
RUNS_WORK = "pt_gloo_runloop"
"""The name that torch gives the threads that run a group's messages."""

Message = tuple[str, int, int]
"""Its kind, the bytes of this rank's input, and the number of ranks of its group."""


@dataclass
class MeasuredStep:
    """One step of one rank.

    peak_bytes: the largest that the CPU's allocator held, the model's weights and all the rest included.
    at_start_bytes: held when the step begins.  peaks: of each measured step.
    messages: as the process groups were given them, in order.  gloo: their number by kind, as the profiler saw them.
    """

    peak_bytes: int = 0
    at_start_bytes: int = 0
    at_end_bytes: int = 0
    peaks: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    gloo: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    refused: str = ""


def measured(mesh: Mesh, case: Case) -> MeasuredStep:
    """Run on every rank; `refused` holds the words where the plan is refused."""
    gc.collect()
    step = MeasuredStep()
    with _unhurried(), allocations() as found:
        try:
            learner, batches = learner_and_batches(mesh, case)
        except (ValueError, NotImplementedError) as error:
            step.refused = re.sub(r"^rank \d+: ", "", str(error))  # whose error it is comes first, where ranks agree on one
        else:
            step.losses = [learner.learn(batches, stop=False)[0] for _ in range(WARMUP)]
            for number in range(STEPS):
                gc.collect()
                mesh.barrier()
                with mark(f"step {number}"), _messages() as step.messages:
                    learner.learn(batches, stop=False)
            del learner, batches
    if not step.refused:
        last = f"step {STEPS - 1}"
        step.peaks = [found.peak(f"step {number}") for number in range(STEPS)]
        step.peak_bytes, step.at_start_bytes, step.at_end_bytes = found.peak(last), found.before(last), found.after(last)
        step.gloo = _gloo(found.recorder, *found.spans[last])
    gc.collect()
    return step


def learner_and_batches(mesh: Mesh, case: Case) -> tuple[Learner, list[Any]]:
    """As a run makes them: the learner, and this rank's batches of the first step."""
    parts: Parts = mesh.together(lambda: assemble(case.config, mesh, given=case.given))
    learner, _ = mesh.together(lambda: learner_of(parts))
    passes = Passes(training_batches(parts, first=0, last=1), parts.config.gradient.accumulate)
    try:
        return learner, passes.next()
    finally:
        passes.close()


# ---------------------------------------------------------------------------------------------- messages

_KINDS: dict[str, tuple[str, Callable[[tuple], Any]]] = {
    "allreduce": ("all_reduce", lambda args: args[0]),
    "allreduce_coalesced": ("all_reduce", lambda args: args[0]),
    "broadcast": ("broadcast", lambda args: args[0]),
    "allgather": ("all_gather", lambda args: args[1]),
    "_allgather_base": ("all_gather", lambda args: args[1]),
    "all_gather_single": ("all_gather", lambda args: args[1]),
    "allgather_into_tensor_coalesced": ("all_gather", lambda args: args[1]),
    "all_gather_single_coalesced": ("all_gather", lambda args: args[1]),
    "reduce_scatter": ("reduce_scatter", lambda args: args[1]),
    "_reduce_scatter_base": ("reduce_scatter", lambda args: args[1]),
    "reduce_scatter_single": ("reduce_scatter", lambda args: args[1]),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", lambda args: args[1]),
    "reduce_scatter_single_coalesced": ("reduce_scatter", lambda args: args[1]),
    "alltoall_base": ("all_to_all", lambda args: args[1]),
    "alltoall": ("all_to_all", lambda args: args[1]),
    "gather": ("gather", lambda args: args[1]),
    "scatter": ("scatter", lambda args: args[0]),
    "send": ("send", lambda args: args[0]),
    "recv": ("receive", lambda args: args[0]),
    "barrier": ("barrier", lambda args: ()),
}
"""By the method of a process group: the kind of its message, and where its arguments have what this rank gives."""


@contextmanager
def _unhurried() -> Iterator[None]:
    """Wait a little longer for messages: gloo's threads hold tensors a moment after, and what they free no profiler sees."""
    method, wait = vars(dist.Work)["wait"], dist.Work.wait

    def waits(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        found = wait(work, *args, **kwargs)
        time.sleep(GLOO_SECONDS)
        while _gloo_runs():
            time.sleep(GLOO_SECONDS)
        return found

    dist.Work.wait = waits  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = method  # type: ignore[method-assign]


def _gloo_runs() -> bool:
    """Whether a thread that runs a group's messages has a core or waits for one, as on a busy machine."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # ended meanwhile
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == RUNS_WORK and rest.split()[0] == "R":
                return True
    return False


@contextmanager
def _messages() -> Iterator[list[Message]]:
    """Note every call of a process group's methods inside, whoever makes it from Python."""
    found: list[Message] = []
    before = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _KINDS}
    for name in before:
        setattr(dist.ProcessGroup, name, _noting(name, getattr(dist.ProcessGroup, name), found))
    try:
        yield found
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _noting(name: str, method: Callable, found: list[Message]) -> Callable:
    kind, given = _KINDS[name]

    def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(given(args)))
        found.append((kind, size, group.size()))
        return method(group, *args, **kwargs)

    return noted


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


def _gloo(recorder: torch.profiler.profile, first: int, last: int) -> dict[str, int]:
    """The number of gloo's messages by kind between two times, another count than that of `_messages`."""
    assert recorder.profiler is not None and recorder.profiler.kineto_results is not None
    events = recorder.profiler.kineto_results.events()
    names = [event.name() for event in events if event.name().startswith("gloo:") and first <= event.start_ns() < last]
    return dict(Counter(name.removeprefix("gloo:") for name in names))


# ---------------------------------------------------------------------------------------------- FLOPs


def flops_of(mesh: Mesh, case: Case) -> int:
    """Of a step of the plain model on one rank: forward and backward of its whole batch."""
    learner, batches = learner_and_batches(mesh, case)
    with FlopCounterMode(display=False) as counter:
        learner.learn(batches, stop=False)
    return counter.get_total_flops()
