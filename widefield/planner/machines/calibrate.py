"""Measures this machine, in less than two minutes: products, convolutions, memory, the host's share, messages of local ranks.

What a CNN runs is timed at the shapes that CNNs have; a plan's own kernels may be added later (timing.measure_signatures).
"""

from __future__ import annotations

import datetime
import functools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from widefield.comm.link_times import KINDS, message_seconds
from widefield.comm.mesh import Mesh
from widefield.parallel.parallelize import parallelize
from widefield.planner.machines.calibration import Calibration, Kernel, SentMessage, calibration_path, write_calibration
from widefield.planner.machines.catalogue import CPU_LINK, cpu_core, gpu_named
from widefield.planner.machines.device import Device
from widefield.planner.machines.link import Link
from widefield.planner.machines.signature import call_of
from widefield.planner.machines.timing import cpu_clock, measure_events, on_cpu
from widefield.planner.step_record import OpEvent
from widefield.plans import Plan
from widefield.tiled.api import tile
from widefield.verification.own_ranks import on_own_ranks

KERNEL_SHARE = 0.6
"""Of the seconds, for kernels; the rest is for messages."""
SIZES = (2**10, 2**16, 2**20, 2**22, 2**24)
"""Bytes of the messages that are timed."""
RANKS = (2, 4)


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
    Returns what was measured with torch's number of threads.
    """
    device = device or torch.device("cpu")
    messages, per_message = _messages(seconds, say) if device.type == "cpu" else ([], 0.0)
    own = torch.get_num_threads()
    counts = sorted({1, own}) if device.type == "cpu" else [own]
    try:
        for count in counts:
            torch.set_num_threads(count)
            calibration = Calibration(_conditions(device), _guess(device), CPU_LINK, {}, messages, 0.0, per_message)
            _add_kernels(calibration, device, seconds * KERNEL_SHARE / len(counts), say)
            if messages:
                calibration.link = _link(messages)
            if keep:
                write_calibration(calibration, calibration_path(device.type, _threads(device)))
    finally:
        torch.set_num_threads(own)
    return calibration


def _messages(seconds: float, say: Callable[[str], None]) -> tuple[list[SentMessage], float]:
    """Messages of local ranks, and the host's share of one; before this process has threads that a fork would lose."""
    found: list[SentMessage] = []
    for ranks in RANKS:
        say(f"messages of {ranks} ranks")
        found += local_messages(ranks, sizes=SIZES, timeout_seconds=max(60.0, 2 * seconds))
    try:
        return found, message_host_seconds(timeout_seconds=max(60.0, 2 * seconds))
    except RuntimeError:  # a process that has run a backward cannot be forked into one that does
        say("the host's share of a message is not measured, and counts as none: measure in a new process")
        return found, 0.0


def _add_kernels(calibration: Calibration, device: torch.device, seconds: float, say: Callable[[str], None]) -> None:
    say("kernels" if device.type != "cpu" else f"kernels, threads: {torch.get_num_threads()}")
    measure_events(cnn_kernels(device), calibration, time.monotonic() + seconds, device)
    calibration.device = _fitted(calibration.device, calibration.kernels.values())
    if device.type == "cpu":
        calibration.host_seconds = host_seconds(device)


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
    return replace(gpu_named(properties.name), memory_bytes=properties.total_memory)


# ------------------------------------------------------------------------------------------------ kernels


def cnn_kernels(device: torch.device) -> Iterator[OpEvent]:
    """Events of the operations that CNNs are made of, the most telling first.  GPUs are asked in half precision too."""
    dtypes = ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32", "float64")
    for dtype in dtypes:
        for batch, channels, size, out, kernel, stride in CONVOLUTIONS:
            yield from convolution((batch, channels, size, size), out, kernel, stride, dtype)
        yield from convolution((1, 16, 32, 32, 32), 32, 3, 1, dtype)
        for rows, inner, columns in ((8, 512, 1000), (512, 512, 512), (64, 2048, 1000)):
            yield product(rows, inner, columns, dtype)
        for shape in ((8, 64, 32, 32), (8, 64, 64, 64), (4, 256, 16, 16), (2, 32, 256, 256)):
            yield from pointwise(shape, dtype)
        for numbers in (512, 2**16, 2**20, 2**22):
            yield from optimizer_steps(numbers, dtype)


CONVOLUTIONS = (
    (8, 64, 32, 64, 3, 1), (8, 64, 32, 256, 1, 1), (8, 128, 16, 128, 3, 1), (8, 3, 64, 64, 7, 2), (8, 256, 8, 256, 3, 1),
    (8, 512, 4, 512, 3, 1), (4, 512, 16, 128, 1, 1), (4, 64, 64, 128, 3, 2), (2, 32, 128, 32, 3, 1), (8, 256, 16, 512, 1, 2),
    (32, 64, 16, 64, 3, 1), (2, 16, 256, 16, 3, 1),
)  # fmt: skip
"""Batch, channels, pixels a side, channels out, kernel, stride: of ResNets and U-Nets."""


def spec(shape: tuple[int, ...], dtype: str) -> tuple:
    """A contiguous tensor in a signature."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return ("tensor", shape, strides, dtype)


def event(name: str, args: tuple, *, flops: float, read: int, written: int, dtype: str) -> OpEvent:
    """read, written: numbers, whose bytes are those of `dtype`."""
    size = {"float64": 8, "float32": 4}.get(dtype, 2)
    return OpEvent(name, "forward", "", (name, args, ()), flops, read * size, written * size, dtype)


def convolution(shape: tuple[int, ...], out: int, kernel: int, stride: int, dtype: str) -> Iterator[OpEvent]:
    """Forward and backward of a convolution that keeps the size, up to its stride."""
    dims = len(shape) - 2
    weight = (out, shape[1], *[kernel] * dims)
    image_out = (shape[0], out, *((size - 1) // stride + 1 for size in shape[2:]))
    x, w, y = math.prod(shape), math.prod(weight), math.prod(image_out)
    flops = 2.0 * y * w / out
    rest = ((stride,) * dims, (kernel // 2,) * dims, (1,) * dims, False, (0,) * dims, 1)
    forward = (spec(shape, dtype), spec(weight, dtype), None, *rest)
    yield event("aten.convolution.default", forward, flops=flops, read=x + w, written=y, dtype=dtype)
    backward = (spec(image_out, dtype), spec(shape, dtype), spec(weight, dtype), (0,), *rest, (True, True, False))
    yield event("aten.convolution_backward.default", backward, flops=2 * flops, read=y + x + w, written=x + w, dtype=dtype)


def product(rows: int, inner: int, columns: int, dtype: str) -> OpEvent:
    args = (spec((rows, inner), dtype), spec((inner, columns), dtype))
    read = rows * inner + inner * columns
    return event("aten.mm.default", args, flops=2.0 * rows * inner * columns, read=read, written=rows * columns, dtype=dtype)


def pointwise(shape: tuple[int, ...], dtype: str) -> Iterator[OpEvent]:
    """What is bound by memory: additions, ReLU, batch norm, pooling, copies."""
    x, channels = math.prod(shape), shape[1]
    image, channel, one = spec(shape, dtype), spec((channels,), dtype), functools.partial(event, flops=0.0, dtype=dtype)
    yield one("aten.add.Tensor", (image, image), read=2 * x, written=x)
    yield one("aten.add_.Tensor", (image, image), read=2 * x, written=x)
    yield one("aten.relu.default", (image,), read=x, written=x)
    yield one("aten.relu_.default", (image,), read=x, written=x)
    yield one("aten.threshold_backward.default", (image, image, 0), read=2 * x, written=x)
    yield one("aten.clone.default", (image,), read=x, written=x)
    norm = (image, channel, channel, channel, channel, True, 0.1, 1e-5)
    yield one("aten.native_batch_norm.default", norm, read=x + 4 * channels, written=x + 2 * channels)
    statistics_of = (channel, channel, channel, channel, channel, True, 1e-5, (True, True, True))
    backward = (image, image, *statistics_of)
    yield one("aten.native_batch_norm_backward.default", backward, read=2 * x + 5 * channels, written=x + 2 * channels)
    yield one("aten.max_pool2d_with_indices.default", (image, (3, 3), (2, 2), (1, 1)), read=x, written=x // 4 * 3)
    yield one("aten.mean.dim", (image, (-1, -2), True), read=x, written=shape[0] * channels)


def optimizer_steps(numbers: int, dtype: str) -> Iterator[OpEvent]:
    """What optimizers do with each weight."""
    weight, one = spec((numbers,), dtype), functools.partial(event, flops=0.0, dtype=dtype)
    yield one("aten.mul_.Tensor", (weight, 0.9), read=numbers, written=numbers)
    yield one("aten.add_.Tensor", (weight, weight), read=2 * numbers, written=numbers)
    yield one("aten.lerp_.Scalar", (weight, weight, 0.1), read=2 * numbers, written=numbers)
    yield one("aten.addcmul_.default", (weight, weight, weight), read=3 * numbers, written=numbers)
    yield one("aten.addcdiv_.default", (weight, weight, weight), read=3 * numbers, written=numbers)
    yield one("aten.sqrt.default", (weight,), read=numbers, written=numbers)
    yield one("aten._foreach_mul_.Scalar", ((weight,) * 4, 0.9), read=4 * numbers, written=4 * numbers)
    yield one("aten._foreach_add_.List", ((weight,) * 4, (weight,) * 4), read=8 * numbers, written=4 * numbers)


def _fitted(device: Device, kernels: Iterable[Kernel]) -> Device:
    """The device with the best rates that were measured as its peaks, and what kernels reach of them in the median."""
    kernels = list(kernels)
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


def small_net(layers: int, kernel: int) -> nn.Sequential:
    """Convolutions of two channels with batch norm and ReLU: nearly all of its time is the host's."""
    blocks = [(nn.Conv2d(2, 2, kernel, padding=kernel // 2), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(module for block in blocks for module in block))


def step_seconds(step: Callable[[], None], runs: int = 30) -> float:
    """The median, by this thread's clock where it is alone, after 5 runs."""
    clock, seconds = cpu_clock(), []
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
    body: Any = functools.partial(_messages_on_rank, sizes=sizes, kinds=kinds)
    rows: Any = on_own_ranks(Plan(replicate=ranks), body, timeout_seconds)
    return [SentMessage(kind, ranks, size, seconds) for kind, size, seconds in rows]


def _messages_on_rank(mesh: Mesh, sizes: tuple[int, ...], kinds: tuple[str, ...]) -> list[tuple[str, int, float]]:
    assert mesh.group is not None, "messages have two ranks or more"
    return message_seconds(sizes, group=mesh.group, device=mesh.device, kinds=kinds)


def message_host_seconds(*, timeout_seconds: float = 60.0) -> float:
    """Of the host around one message: what a step in two tiles takes more than one on a rank, for each of its messages.

    A convolution in tiles has three (the halo forward, again in the backward, and its gradient), batch norm two.  The clock is
    that of the thread, which stands still while a message is under way.  RuntimeError: the ranks failed.
    """
    body: Any = _tiles_on_rank
    seconds: Any = on_own_ranks(Plan(space=[2, 1]), body, timeout_seconds)
    return float(seconds)


def _tiles_on_rank(mesh: Mesh, layers: int = 8) -> float:
    torch.manual_seed(0)
    image, net = torch.rand(1, 2, 16, 16), small_net(layers, 3)
    alone = step_seconds(lambda: net(image).square().sum().backward(), runs=15)
    net, cut = parallelize(net, mesh), tile(image, mesh)  # type: ignore[assignment]
    tiled = step_seconds(lambda: net(cut).square().sum().backward(), runs=15)
    return max(0.0, (tiled - alone) / (5 * layers))


def _link(messages: Iterable[SentMessage]) -> Link:
    """Latency of the smallest send, bandwidth of the largest."""
    sends = sorted((one.bytes, one.seconds) for one in messages if one.kind == "send")
    (_, latency), (size, seconds) = sends[0], sends[-1]
    return replace(CPU_LINK, latency_seconds=latency, bytes_per_second=size / seconds, source="measured on this machine")
