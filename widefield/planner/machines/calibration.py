"""What was measured on this machine, kept in the user's cache as readable JSON.  Imports no torch.

Files are `$XDG_CACHE_HOME/widefield/machines/HOST-DEVICE-THREADS.json` (`~/.cache` where the variable is not set).  Kernels are
kept by signature, so that what was timed for one model serves the next.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from widefield.planner.machines.device import Device
from widefield.planner.machines.link import Link

FORMAT = 2
"""In 1, kernels were timed with more of their operands in the caches than a step finds there."""
MESSAGE_CPU_SHARE = 0.5
"""See Calibration; where it was not measured."""


@dataclass(frozen=True)
class Kernel:
    """One operation that was timed.

    signature: as OpEvent has it.  flops, bytes: of the event, read and written together.  seconds: the median of runs.
    """

    signature: Hashable
    name: str
    dtype: str
    flops: float
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SentMessage:
    """One message that was timed: `bytes` as MessageEvent has them, among `ranks` of this machine."""

    kind: str
    ranks: int
    bytes: int
    seconds: float


@dataclass
class Calibration:
    """conditions: device, torch, threads, date and host, in words.

    device, link: figures of this machine, fitted to the rest.
    kernels: by signature.  messages: in no order.
    host_seconds: of the Python of one operation of a module, on top of the kernel.
    message_host_seconds: of the Python around one message of a step, on top of the message.
    zero_host_seconds: of the Python of ZeRO's gathers, scatters and sharded tensors, for each weight tensor and step.
    waking_seconds: by which ranks of a CPU that have computed since they met go on later than their message takes alone: the
        threads that send and receive have slept, and wait for a core.
    unevenness: in square roots of seconds.  Of two ranks that have computed for t seconds since they met, the later one
        comes unevenness * sqrt(t) after its own time, in the mean: processors are never equally fast.
    message_cpu_share: of the seconds of a large message between CPU ranks, those in which its thread computes on each of them
        (copies, sums, the kernel's network stack).
    """

    conditions: dict[str, str]
    device: Device
    link: Link
    kernels: dict[Hashable, Kernel] = field(default_factory=dict)
    messages: list[SentMessage] = field(default_factory=list)
    host_seconds: float = 0.0
    message_host_seconds: float = 0.0
    unevenness: float = 0.0
    message_cpu_share: float = MESSAGE_CPU_SHARE
    zero_host_seconds: float = 0.0
    waking_seconds: float = 0.0

    def add(self, kernels: Iterable[Kernel]) -> None:
        self.kernels.update((kernel.signature, kernel) for kernel in kernels)


def cache_folder() -> Path:
    """Where measurements of machines are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widefield" / "machines"


def calibration_path(device: str, threads: int) -> Path:
    """The file of this host's device.  threads: of one CPU rank; 0 for a GPU."""
    words = f"{platform.node() or 'here'}-{device}-{threads}"
    return cache_folder() / f"{re.sub(r'[^A-Za-z0-9.]+', '_', words)}.json"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Replace the file at once, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    described = asdict(calibration) | {"format": FORMAT, "kernels": [asdict(one) for one in calibration.kernels.values()]}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
        json.dump(described, file, indent=1)
    os.replace(file.name, path)


def read_calibration(path: Path | None = None, *, kind: str = "") -> Calibration | None:
    """The file's contents; of this host's newest file where no path is given.  None: there is none.

    kind: `cpu` or `cuda`, where the newest file must be of such a device.
    ValueError: the file is damaged, or of another version of this program.
    """
    if path is None:
        host = re.sub(r"[^A-Za-z0-9.]+", "_", platform.node() or "here")
        files = sorted(cache_folder().glob(f"{host}_{kind}*.json"), key=lambda one: one.stat().st_mtime)
        if not files:
            return None
        path = files[-1]
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        again = "measure again with widefield plan --calibrate, or delete the file"
        raise ValueError(f"{path} holds no measurement that this version reads ({error}); {again}") from None


def _from_json(described: dict[str, Any]) -> Calibration:
    if described["format"] != FORMAT:
        raise ValueError(f"its format is {described['format']}, and {FORMAT} is read")
    kernels = [Kernel(**(row | {"signature": _as_tuples(row["signature"])})) for row in described["kernels"]]
    found = Calibration(
        described["conditions"],
        Device(**described["device"]),
        Link(**described["link"]),
        {kernel.signature: kernel for kernel in kernels},
        [SentMessage(**row) for row in described["messages"]],
        described["host_seconds"],
        described["message_host_seconds"],
        described["unevenness"],
        described["message_cpu_share"],
        described["zero_host_seconds"],
        described.get("waking_seconds", 0.0),  # once a part of unevenness
    )
    _check(found)
    return found


def _check(found: Calibration) -> None:
    """ValueError: a figure is no number above 0, or a name no text."""
    device, link = found.device, found.link
    above = [device.memory_bytes, device.memory_bytes_per_second, *device.flops_per_second.values(), link.bytes_per_second]
    above += [device.flops_reached, device.flops_reached_plain, device.bandwidth_reached, device.block_bytes]
    least = [device.launch_seconds, device.context_bytes, link.latency_seconds, found.host_seconds, found.message_host_seconds]
    least += [found.unevenness, found.waking_seconds, found.zero_host_seconds, found.message_cpu_share]
    least += [number for one in found.kernels.values() for number in (one.flops, one.bytes, one.seconds)]
    least += [number for one in found.messages for number in (one.ranks, one.bytes, one.seconds)]
    least += [] if device.dollars_per_hour is None else [device.dollars_per_hour]
    odd = next((one for one in (*above, *least) if not _is_number(one)), None)
    odd = next((one for one in above if not one > 0), next((one for one in least if one < 0), None)) if odd is None else odd
    if odd is not None:
        raise ValueError(f"{odd!r} is no figure of a machine")
    texts = [device.name, device.source, link.name, link.kind, link.source, *found.conditions, *found.conditions.values()]
    texts += [text for one in found.kernels.values() for text in (one.name, one.dtype)] + [one.kind for one in found.messages]
    odd = next((text for text in (*texts, *device.flops_per_second) if not isinstance(text, str)), None)
    if odd is not None or "float32" not in device.flops_per_second or type(device.is_cpu) is not bool:
        raise ValueError(f"{odd!r} is no text" if odd is not None else "the device has no speed in float32, or is of no kind")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_tuples(value: Any) -> Hashable:
    """Lists of JSON as the tuples that they were."""
    return tuple(_as_tuples(one) for one in value) if isinstance(value, list) else value
