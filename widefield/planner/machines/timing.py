"""How long do kernels take on this machine?  Each is run on random data of the recorded shapes.

In a step the operation before has just written a kernel's first operand, an image or its gradient.  The others were last used
long ago: weights a step, saved activations a forward.  So on a CPU each kernel is timed with the caches full of other numbers
but for its first operand (ResNet-50's 53 convolutions: 42 ms forward and 94 backward; 43 and 94 in a step of one process; 35
and 85 with all operands in the caches).  One thread is timed by its own clock, which other programs on the machine do not move.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from widefield.planner.machines.calibration import Calibration, Kernel
from widefield.planner.machines.signature import Call, call_of
from widefield.planner.step_record import OpEvent, StepRecord
from widefield.private_torch.gpu_clock import sleep_on_gpu

OTHER_BYTES = 64 * 2**20
"""Read between two runs, to have other numbers in the caches; larger than a core's share of any."""
SMALL_BYTES = 2**18
"""Below it a kernel is timed with its operands in the caches alone: after other numbers it would wait for its own code, which
in a step is there."""
REPEATS_MOST, SECONDS_EACH = 15, 0.3
GPU_SECONDS_EACH = 0.03
NOT_TIMED = ("resize", "set_", "_local_scalar_dense", "record_stream", "empty", "random_", "bernoulli", "dropout")
"""Parts of names of operations that change their operands' storages, wait for numbers, or do nothing."""


def measure_signatures(
    record: StepRecord | Sequence[OpEvent],
    calibration: Calibration,
    *,
    budget_seconds: float = 60.0,
    device: torch.device | None = None,
) -> list[Kernel]:
    """Time the kernels of a record that are not known yet, those first that are likely to take longest; adds them.

    calibration: of this machine, which gets the kernels.  budget_seconds: after which the rest stays unmeasured.
    device: the CPU by default.  Returns what was measured.
    """
    device = device or torch.device("cpu")
    events = list(record.operations if isinstance(record, StepRecord) else record)
    counts = Counter(event.signature for event in events)
    first = {event.signature: event for event in reversed(events)}
    wanted = [event for signature, event in first.items() if signature not in calibration.kernels and _can_be_timed(event.name)]
    wanted.sort(key=lambda event: -_weight(event, calibration) * counts[event.signature])
    return measure_events(wanted, calibration, time.monotonic() + budget_seconds, device)


def measure_events(events: Iterable[OpEvent], calibration: Calibration, until: float, device: torch.device) -> list[Kernel]:
    """Time kernels in their order, until the clock of time.monotonic() says `until`; adds them to the calibration."""
    found = []
    for event in events:
        if time.monotonic() > until:
            break
        seconds = kernel_seconds(event, device)
        if seconds is not None:
            size = event.bytes_read + event.bytes_written
            found.append(Kernel(event.signature, event.name, event.dtype, event.flops, size, seconds))
    calibration.add(found)
    return found


def kernel_seconds(event: OpEvent, device: torch.device) -> float | None:
    """Seconds of one kernel; None: it cannot be rebuilt from its signature, or fails on random numbers."""
    call = call_of(event.signature, device)
    if call is None:
        return None
    try:
        with torch.no_grad(), _float32_as_such(device):
            call()
            if device.type == "cuda":
                return _on_gpu(call)
            return on_cpu(call, other=event.bytes_read + event.bytes_written >= SMALL_BYTES)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None


@contextlib.contextmanager
def _float32_as_such(device: torch.device) -> Iterator[None]:
    """Inside, a GPU computes float32 in float32, as recipes have it; torch's convolutions would be in TF32."""
    before = torch.backends.cudnn.allow_tf32
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def on_cpu(call: Call, *, other: bool) -> float:
    """The median of runs.  other: whether the caches have other numbers than those of all operands but the first."""
    clock = cpu_clock()
    filler = _filler() if other else None
    just_written = call.args[0] if call.args and isinstance(call.args[0], torch.Tensor) else None
    seconds: list[float] = []
    until = time.monotonic() + SECONDS_EACH
    while len(seconds) < 3 or (len(seconds) < REPEATS_MOST and time.monotonic() < until):
        if filler is not None:
            filler.sum()
            if just_written is not None:
                just_written.sum()
        began = clock()
        call()
        seconds.append(clock() - began)
    return statistics.median(seconds)


def cpu_clock() -> Callable[[], float]:
    """Of this thread alone where there is one; else of the wall."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


_FILLERS: list[torch.Tensor] = []


def _filler() -> torch.Tensor:
    if not _FILLERS:
        _FILLERS.append(torch.ones(OTHER_BYTES // 4))
    return _FILLERS[0]


def _on_gpu(call: Call) -> float:
    """The mean of runs that follow each other, without their launches: the GPU sleeps until the host has started all."""
    first = _run_of(call, 3, wait_seconds=0.0)
    repeats = max(3, min(50, int(GPU_SECONDS_EACH / max(first, 1e-6))))
    return _run_of(call, repeats, wait_seconds=min(2 * repeats * first, GPU_SECONDS_EACH))


def _run_of(call: Call, repeats: int, *, wait_seconds: float) -> float:
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sleep_on_gpu(wait_seconds)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _can_be_timed(name: str) -> bool:
    return name.startswith("aten.") and not any(part in name for part in NOT_TIMED)


def _weight(event: OpEvent, calibration: Calibration) -> float:
    """Roughly the seconds of a kernel."""
    device = calibration.device
    size = event.bytes_read + event.bytes_written
    return event.flops / device.peak_flops(event.dtype) + size / device.memory_bytes_per_second + 1e-6
