"""Measures this machine, in less than two minutes: products, convolutions, memory, the host's share, messages of local ranks.

What a CNN runs is timed at the shapes that CNNs have; a plan's own kernels may be added later (timing.measure_signatures).
"""

from __future__ import annotations

import datetime
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from widefield.comm.link_times import KINDS, cpu_share_of_sums, message_seconds
from widefield.comm.mesh import Mesh
from widefield.parallel.parallelize import parallelize
from widefield.planner.machines.calibration import Calibration, Kernel, SentMessage, calibration_path, write_calibration
from widefield.planner.machines.catalogue import CPU_LINK, DEVICES, cpu_core, gpu_named
from widefield.planner.machines.cnn_kernels import cnn_kernels, convolution, pointwise
from widefield.planner.machines.device import SHORT_SECONDS, Device
from widefield.planner.machines.lateness import lateness
from widefield.planner.machines.link import Link
from widefield.planner.machines.signature import call_of
from widefield.planner.machines.timing import cpu_clock, measure_events, on_cpu
from widefield.plans import Plan
from widefield.private_torch.dispatcher import TorchDispatchMode
from widefield.streaming.storage.heap import keep_freed_memory
from widefield.tiled.api import tile
from widefield.verification.own_ranks import on_own_ranks

KERNEL_SHARE = 0.6
"""Of the seconds, for kernels; the rest is for messages."""
SIZES = (2**10, 2**16, 2**20, 2**22, 2**24)
"""Bytes of the messages that are timed."""
LARGE_BYTES = 2**22
"""Of a message of which it is asked how much of its time its thread computes."""
RANKS = (2, 4)
NO_SHEET = "a GPU that the catalogue does not know"


def calibrate(
    *,
    device: torch.device | None = None,
    seconds: float = 100.0,
    say: Callable[[str], None] = lambda line: None,
    keep: bool = True,
) -> Calibration:
    """Measure this machine and keep the result in the user's cache.

    device: the CPU by default, with torch's number of threads and, as ranks that share its cores have them, with one.
    seconds: that it may take, about.  say: told each part.
    keep: whether to write a file for each number of threads; see calibration.py for where they are.
    Returns what was measured with torch's number of threads.  On the CPU this process keeps the memory that tensors give up.
    """
    device = device or torch.device("cpu")
    messages = _messages(seconds, say) if device.type == "cpu" else {}
    if device.type == "cpu":
        keep_freed_memory()  # as in a step
    own = torch.get_num_threads()
    counts = sorted({1, own}) if device.type == "cpu" else [own]
    try:
        for count in counts:
            torch.set_num_threads(count)
            calibration = Calibration(_conditions(device), _guess(device), CPU_LINK, **messages)
            _add_kernels(calibration, device, seconds * KERNEL_SHARE / len(counts), say)
            if messages:
                calibration.link = _link(calibration.messages)
            if keep:
                path = calibration_path(device.type, _threads(device))
                write_calibration(calibration, path)
                say(f"kept in {path}")
    finally:
        torch.set_num_threads(own)
    return calibration


def _messages(seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """What a Calibration has of messages of local ranks; before this process has threads that a fork would lose."""
    timeout = max(60.0, 2 * seconds)
    sent: list[SentMessage] = []
    for ranks in RANKS:
        say(f"messages of {ranks} ranks")
        sent += local_messages(ranks, sizes=SIZES, timeout_seconds=timeout)
    say("ranks that compute side by side")
    found: dict[str, Any] = {
        "messages": sent,
        "message_cpu_share": message_cpu_share(timeout_seconds=timeout),
        **lateness(timeout_seconds=timeout),
    }
    try:
        return found | {
            "message_host_seconds": message_host_seconds(timeout_seconds=timeout),
            "zero_host_seconds": zero_host_seconds(timeout_seconds=timeout),
        }
    except RuntimeError:  # a process that has run a backward cannot be forked into one that does
        say("the host's share of messages and of ZeRO is not measured, and counts as none: measure in a new process")
        return found


def _add_kernels(calibration: Calibration, device: torch.device, seconds: float, say: Callable[[str], None]) -> None:
    say("kernels" if device.type != "cpu" else f"kernels, threads: {torch.get_num_threads()}")
    measure_events(cnn_kernels(device), calibration, time.monotonic() + seconds, device)
    calibration.device = _fitted(calibration.device, calibration.kernels.values())
    calibration.host_seconds = host_seconds(device) if device.type == "cpu" else gpu_host_seconds(device)


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 0


def _conditions(device: torch.device) -> dict[str, str]:
    name = platform.processor() or platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "device": name,
        "kind": device.type,
        "threads": str(_threads(device)),
        "torch": torch.__version__,
        "host": platform.node(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _guess(device: torch.device) -> Device:
    if device.type == "cpu":
        return cpu_core()
    properties = torch.cuda.get_device_properties(device)
    known = gpu_named(properties.name, properties.total_memory)
    if known is None:  # its peaks are what its kernels reach
        known = replace(DEVICES["a100-80g"], name=properties.name.replace(" ", ""), source=NO_SHEET)
    return replace(known, memory_bytes=properties.total_memory)


def _fitted(device: Device, kernels: Iterable[Kernel]) -> Device:
    """The device with the best rates that were measured as its peaks, and what kernels reach of them in the median.

    The peaks of a GPU of the catalogue stay those of its data sheet: a kernel that is hardly longer than its launch, or whose
    numbers fit the cache, says nothing of them, and the nearest of those that were measured count anyway.
    """
    if not device.is_cpu and device.source != NO_SHEET:
        return replace(device, source=f"{device.source}; kernels measured on this machine")
    kernels = [kernel for kernel in kernels if device.is_cpu or kernel.seconds > SHORT_SECONDS]
    flops, reached = dict(device.flops_per_second), []
    for dtype in {kernel.dtype for kernel in kernels}:
        rates = [kernel.flops / kernel.seconds for kernel in kernels if kernel.dtype == dtype and kernel.flops]
        if rates:
            flops[dtype] = max(rates)
            reached += [rate / max(rates) for rate in rates]
    moved = [kernel.bytes / kernel.seconds for kernel in kernels if not kernel.flops and kernel.bytes > 2**20]
    return replace(
        device,
        flops_per_second=flops,
        flops_reached=statistics.median(reached) if reached else device.flops_reached,
        memory_bytes_per_second=max(moved, default=device.memory_bytes_per_second),
        bandwidth_reached=statistics.median(moved) / max(moved) if moved else device.bandwidth_reached,
        source="measured on this machine",
    )


def host_seconds(device: torch.device) -> float:
    """Of modules, autograd and Python for each operation, beside what a kernel's own call takes: a net of few numbers."""
    net, image = small_net(20, 1).to(device), torch.rand(1, 2, 2, 2, device=device)
    shape, operations = (1, 2, 2, 2), 20 * 3 * 2
    kinds = [*convolution(shape, 2, 1, 1, "float32"), *(one for one in pointwise(shape, "float32") if _in_net(one.name))]
    calls = [call for one in kinds if (call := call_of(one.signature, device)) is not None]
    with torch.no_grad():
        kernels = sum(on_cpu(call, other=False) for call in calls) * 20

    seconds = step_seconds(lambda: net(image).square().sum().backward())
    return max(1e-6, (seconds - kernels) / operations)


HOST_OF_A_STEP = 1.9
"""An operation of a model's step, with autocast and the model's own Python, takes the host so many times as long as one of a
plain net of few numbers: the geometric mean of six models on an H200, from 1.4 (DenseNet) to 2.5 (EfficientNet)."""


def gpu_host_seconds(device: torch.device) -> float:
    """Of the host for each operation of a step on a GPU, from a net of few numbers, whose kernels are shorter than that."""
    net, image = small_net(20, 1).to(device), torch.rand(1, 2, 2, 2, device=device)

    def step() -> None:
        net(image).square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    with OperationCounter() as counter:
        step()
    return HOST_OF_A_STEP * step_seconds(step, clock=time.perf_counter) / counter.operations


class OperationCounter(TorchDispatchMode):
    """Counts the operations that torch starts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def small_net(layers: int, kernel: int) -> nn.Sequential:
    """Convolutions of two channels with batch norm and ReLU: nearly all of its time is the host's."""
    blocks = [(nn.Conv2d(2, 2, kernel, padding=kernel // 2), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(module for block in blocks for module in block))


def step_seconds(step: Callable[[], None], runs: int = 30, *, clock: Callable[[], float] | None = None) -> float:
    """The median after 5 runs.  clock: None is this thread's where it is alone."""
    clock, seconds = clock or cpu_clock(), []
    for _ in range(runs + 5):
        began = clock()
        step()
        seconds.append(clock() - began)
    return statistics.median(seconds[5:])


def _in_net(name: str) -> bool:
    return name in ("aten.relu.default", "aten.threshold_backward.default") or "batch_norm" in name


# ------------------------------------------------------------------------------------------------ messages


def local_messages(ranks: int, *, sizes: tuple[int, ...] = SIZES, timeout_seconds: float = 60.0) -> list[SentMessage]:
    """Messages between `ranks` processes of this machine, over gloo.  RuntimeError: they failed."""
    kinds = KINDS if ranks == 2 else tuple(kind for kind in KINDS if kind != "send")
    body = functools.partial(_messages_on_rank, sizes=sizes, kinds=kinds)
    rows = on_own_ranks(Plan(replicate=ranks), body, timeout_seconds)
    return [SentMessage(kind, ranks, size, seconds) for kind, size, seconds in rows]


def _messages_on_rank(mesh: Mesh, sizes: tuple[int, ...], kinds: tuple[str, ...]) -> list[tuple[str, int, float]]:
    assert mesh.group is not None, "messages have two ranks or more"
    return message_seconds(sizes, group=mesh.group, device=mesh.device, kinds=kinds)


def message_cpu_share(*, timeout_seconds: float = 60.0) -> float:
    """As Calibration has it, of sums over two ranks of this machine's CPU.  RuntimeError: they failed."""
    return on_own_ranks(Plan(replicate=2), _cpu_share_on_rank, timeout_seconds)


def _cpu_share_on_rank(mesh: Mesh) -> float:
    assert mesh.group is not None, "messages have two ranks or more"
    return cpu_share_of_sums(LARGE_BYTES, group=mesh.group)


def message_host_seconds(*, timeout_seconds: float = 60.0) -> float:
    """Of the host around one message: what a step in two tiles takes more than one on a rank, for each of its messages.

    A convolution in tiles has three (the halo forward, again in the backward, and its gradient), batch norm two.  The clock is
    that of the thread, which stands still while a message is under way.  RuntimeError: the ranks failed.
    """
    return on_own_ranks(Plan(space=[2, 1]), _tiles_on_rank, timeout_seconds)


def _tiles_on_rank(mesh: Mesh, layers: int = 8) -> float:
    torch.manual_seed(0)
    image, net = torch.rand(1, 2, 16, 16), small_net(layers, 3)
    alone = step_seconds(lambda: net(image).square().sum().backward(), runs=15)
    net, cut = parallelize(net, mesh), tile(image, mesh)  # type: ignore[assignment]
    tiled = step_seconds(lambda: net(cut).square().sum().backward(), runs=15)
    return max(0.0, (tiled - alone) / (5 * layers))


def zero_host_seconds(*, timeout_seconds: float = 60.0) -> float:
    """As Calibration has it: what a step of two ranks takes more where they share the weights than where each has all.

    By the clock of the thread, which stands still while a message is under way.  RuntimeError: the ranks failed.
    """
    layers, plans = 40, (Plan(replicate=2), Plan(shard=2))
    body = functools.partial(_steps_on_rank, layers=layers)
    copies, shards = (on_own_ranks(plan, body, timeout_seconds) for plan in plans)
    return max(0.0, shards - copies) / (2 * layers)


def _steps_on_rank(mesh: Mesh, layers: int) -> float:
    """Seconds of a step of convolutions with a weight and a bias each."""
    torch.manual_seed(0)
    net = parallelize(nn.Sequential(*(nn.Conv2d(2, 2, 1) for _ in range(layers))), mesh)
    image, optimizer = torch.rand(1, 2, 2, 2), torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        net(image).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step_seconds(step, runs=15)


def _link(messages: Iterable[SentMessage]) -> Link:
    """Latency of the smallest send, bandwidth of the largest."""
    sends = sorted((one.bytes, one.seconds) for one in messages if one.kind == "send")
    (_, latency), (size, seconds) = sends[0], sends[-1]
    return replace(CPU_LINK, latency_seconds=latency, bytes_per_second=size / seconds, source="measured on this machine")
