"""How long does an operation take?  As it was measured, as its nearest measured neighbours, or by the roofline.

The roofline is max(flops / peak, bytes / bandwidth), each peak times the part of it that kernels reach; where a GPU's kernel is
bound by neither, its own rate counts (gpu_kernels.py).  A neighbour has the same operation and dtype; it gives its efficiency,
roofline over seconds, and not its seconds, so that a shape twice as large takes about twice as long.  Neighbours count by their
distance in log flops and log bytes; those of a convolution by the logs of its channels, kernel, stride and groups too, on which
its speed depends more than on its size.

Parts of the peaks: Device.flops_reached is what NVIDIA's ResNet-50 of `DeepLearningExamples` reaches on a V100 (see the tests).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from widefield.planner.cost.gpu_kernels import convolution_flops, is_one_pass, least_seconds, tensors_of
from widefield.planner.machines.calibration import Kernel
from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.device import SHORT_SECONDS, Device
from widefield.planner.step_record import OpEvent

Source = Literal["measured", "interpolated", "roofline"]
ERROR: dict[str, float] = {"measured": 0.05, "interpolated": 0.2, "roofline": 0.4}
"""By how much of itself a figure may be off, by where it is from; of messages too."""

NEIGHBOURS = 3
FAR = math.log(16)
"""A neighbour counts up to a factor of 16 in flops and bytes together."""
FILLING_SECONDS = 6e-6
"""A GPU's kernels reach their share of the peak from this time at the peak on; below, the share falls with the square root."""
CONVERTED = 2.5
"""Passes of a convolution on tensor cores over an image with its channels first: to channels last, itself, and back."""
FEW_NUMBERS = 20480
"""Up to so many, not counting the last dim, an image alone is not oneDNN's (ConvParams::use_mkldnn of torch)."""
ZERO_KERNELS = ("fsdp.all_gather_copy_in", "fsdp.chunk_cat")
"""Each takes all weights, or all gradients, of one of ZeRO's units."""
ZERO_TIMES = 3
"""A step of ZeRO-3 gathers each weight twice and scatters its gradient once."""
HOST_LINKS = {("V100", "T4"): 12e9, ("H100", "H200", "B200", "RTX5090"): 50e9}
"""Bytes per second, by the names of devices: four fifths of PCIe 3 x16 and of PCIe 5 x16 (PCI-SIG: 15.8 and 63 GB/s)."""
HOST_LINK_ELSE = 25e9
"""Of PCIe 4 x16, which has 31.5 GB/s."""
WITHOUT_KERNEL = ("aten.empty", "aten.new_empty")
"""They give memory and write nothing."""


@dataclass(frozen=True)
class Timed:
    """Seconds of a kernel, without what the host needs to start it, and where the figure is from."""

    seconds: float
    source: Source

    @property
    def error_seconds(self) -> float:
        return self.seconds * ERROR[self.source]


class OpTimes:
    """Seconds of operations on one device.

    precision: of the recipe; `tf32` makes products of float32 run as TF32.
    """

    def __init__(self, cluster: Cluster, precision: str | None = None) -> None:
        self.device, self.precision = cluster.device, precision
        calibration = cluster.calibration
        self.zero_host_seconds = 0.0 if calibration is None else calibration.zero_host_seconds
        self.kernels = {} if calibration is None else calibration.kernels
        least = 0.0 if self.device.is_cpu else SHORT_SECONDS
        self.neighbours = _by_operation(row for row in self.kernels.values() if row.seconds >= least)
        self.known: dict[object, Timed] = {}

    def of(self, event: OpEvent) -> Timed:
        """Of a kernel of ZeRO's together with the Python around it."""
        key = (event.signature, event.flops, event.bytes_read + event.bytes_written, event.is_transfer)
        if key not in self.known:
            timed = self._time(event)
            self.known[key] = replace(timed, seconds=timed.seconds + self._python_of_zero(event))
        return self.known[key]

    def _time(self, event: OpEvent) -> Timed:
        if not event.runs_kernel or event.name.startswith(WITHOUT_KERNEL):
            return Timed(0.0, "measured")
        if event.is_transfer:
            return Timed(event.bytes_written / host_bytes_per_second(self.device), "roofline")
        kernel = self.kernels.get(event.signature)
        if kernel is not None:
            return Timed(kernel.seconds, "measured")
        size = event.bytes_read + event.bytes_written
        seconds = self.roofline(event.name, _flops(event), size, event.dtype, event.signature)
        efficiency = self._efficiency(event, size)
        return Timed(seconds, "roofline") if efficiency is None else Timed(seconds / efficiency, "interpolated")

    def _python_of_zero(self, event: OpEvent) -> float:
        """What surrounds one of ZERO_KERNELS; of other operations none."""
        if not event.name.startswith(ZERO_KERNELS):
            return 0.0
        return self.zero_host_seconds / ZERO_TIMES * sum(1 for _ in tensors_of(event.signature))

    def roofline(self, name: str, flops: float, size: int, dtype: str, signature: Hashable = None) -> float:
        """Seconds of a kernel of `flops` operations on `size` bytes, read and written."""
        device = self.device
        precision = "tf32" if self.precision == "tf32" and dtype == "float32" else dtype
        on_cores = device.uses_tensor_cores(precision)
        reached = device.flops_reached if on_cores or device.is_cpu else device.flops_reached_plain
        filled = _filling(flops, device.peak_flops(precision)) if not device.is_cpu else 1.0
        moved = 1.0 if not device.is_cpu and is_one_pass(name, signature) else passes(name)
        moved *= CONVERTED if on_cores and is_converted(name, signature) else 1.0
        return max(
            flops / (device.peak_flops(precision) * reached * filled),
            moved * size / (device.memory_bytes_per_second * device.bandwidth_reached),
            0.0 if device.is_cpu else least_seconds(name, signature, size, dtype),
        )

    def _efficiency(self, event: OpEvent, size: int) -> float | None:
        """Roofline over seconds of the nearest neighbours, the geometric mean by 1 / distance²; None: none is near."""
        rows = self.neighbours.get((event.name, event.dtype), [])
        form = convolution_form(event.name, event.signature)
        near = sorted(
            (distance + _difference(form, convolution_form(row.name, row.signature)), index)
            for index, row in enumerate(rows)
            if (distance := _distance(row, _flops(event), size)) <= FAR
        )[:NEIGHBOURS]
        if not near:
            return None
        total = logs = 0.0
        for distance, index in near:
            row, weight = rows[index], 1 / (0.05 + distance) ** 2
            roofline = self.roofline(row.name, row.flops, row.bytes, row.dtype, row.signature)
            total += weight
            logs += weight * math.log(max(roofline, 1e-9) / max(row.seconds, 1e-9))
        return math.exp(logs / total)


def host_bytes_per_second(device: Device) -> float:
    """Of copies between a GPU and pinned memory of the host, in one direction."""
    return next((rate for names, rate in HOST_LINKS.items() if device.name.startswith(names)), HOST_LINK_ELSE)


def _flops(event: OpEvent) -> float:
    """Those that are done: torch's counter takes the backward of a convolution in groups for one without."""
    return convolution_flops("convolution_backward", event.signature) if "convolution_backward" in event.name else event.flops


def passes(name: str) -> float:
    """How many times a kernel moves what it reads and writes: normalization takes its statistics in a pass of its own.

    Training forward: 3 passes over the input, of which 2 are counted in the bytes of an input and an output.  Backward: 5 for
    3.
    """
    if "norm_backward" in name:
        return 5 / 3
    return 1.5 if "norm" in name and "_foreach" not in name and "linalg" not in name else 1.0


def is_converted(name: str, signature: Hashable) -> bool:
    """Whether cuDNN lays a convolution's images out anew: tensor cores want channels last, and its image has them first."""
    if "convolution" not in name:
        return False
    images = [one for one in tensors_of(signature) if len(one[1]) > 3 and max(one[1][2:]) > 1 and one[1][1] > 1]
    return bool(images) and all(one[2][1] != 1 for one in images)


def _filling(flops: float, peak: float) -> float:
    """The share of what large kernels reach that a small one does: the faster the device, the larger it has to be."""
    return min(1.0, max(0.1, math.sqrt(flops / (FILLING_SECONDS * peak)))) if flops else 1.0


def _distance(row: Kernel, flops: float, size: int) -> float:
    return abs(math.log((row.flops + 1) / (flops + 1))) / 2 + abs(math.log((row.bytes + 1) / (size + 1))) / 2


def convolution_form(name: str, signature: Hashable) -> tuple[float, ...]:
    """Of a convolution; empty: it is none.

    Logs of channels out, channels in of a group, numbers of a kernel, stride and groups; then FAR where a CPU has a kernel of
    its own for it, which may be many times slower: for one image alone of few numbers.
    """
    if "convolution" not in name or len(list(tensors_of(signature))) < 2:
        return ()
    assert isinstance(signature, tuple)
    args = signature[1][1:] if "backward" in name else signature[1]
    image, weight, stride, groups = args[0][1], args[1][1], args[3], args[-2 if "backward" in name else -1]
    logs = [math.log(max(1, one)) for one in (weight[0], weight[1], math.prod(weight[2:]), math.prod(stride), groups)]
    is_few = image[0] == 1 and groups == 1 and math.prod(image[:-1]) <= FEW_NUMBERS
    return (*logs, FAR if is_few else 0.0)


def _difference(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=False)) / 2


def _by_operation(kernels: Iterable[Kernel]) -> dict[tuple[str, str], list[Kernel]]:
    found: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name, kernel.dtype].append(kernel)
    return dict(found)
