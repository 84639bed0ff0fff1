"""When was what computed and sent?  A Chrome trace of some steps, by torch's profiler, and what it says of communication.

Open `timeline-rank0.json` in https://ui.perfetto.dev or chrome://tracing: operations, and every collective as `gloo:all_reduce`
(CPU) or `nccl:all_reduce` with its kernel (GPU).  Recording makes steps slower, so nothing is timed while it runs.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_BYTES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2,
    "unsigned char": 1, "byte": 1, "signed char": 1, "char": 1, "bool": 1,
}  # fmt: skip


class Timeline:
    """Records steps of a training run: `step()` where each begins, `close()` at the end.

    Writes `timeline-rankR.json` once `steps` of them are over, or at `close`; the first `after` are left out, for they pay for
    warm-up.  Every rank has its own, with its own clock.
    """

    def __init__(self, folder: Path, *, rank: int, after: int = 2, steps: int = 10) -> None:
        self.path = folder / f"timeline-rank{rank}.json"
        self._first, self._last, self._begun = after, after + steps, 0
        self._profile: profile | None = None
        self._mark: record_function | None = None

    def step(self) -> None:
        """A step begins."""
        if self._begun == self._last:
            self.close()
        elif self._first <= self._begun < self._last:
            if self._profile is None:
                self._profile = _profile()
                self._profile.start()
            self._close_mark()
            self._mark = record_function(f"step {self._begun + 1} of this process")
            self._mark.__enter__()
        self._begun += 1

    def close(self) -> None:
        """Write what was recorded; a second call does nothing."""
        self._close_mark()
        if self._profile is not None:
            self._profile.stop()
            _write(self._profile, self.path)
            self._profile = None

    def _close_mark(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Record what this process does inside, into `path`."""
    with _profile() as recorder:
        yield
    _write(recorder, path)


def _profile() -> profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it tells of its start, its end, and GPUs that are not there
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)


def _write(recorder: profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(path))


# ---------------------------------------------------------------------------------------------- communication


@dataclass(frozen=True)
class MessageLog:
    """What a rank said to others while it was recorded.

    busy_seconds: how long at least one message or collective was under way, waiting for slower ranks included; most of it may
        have gone on behind computation, so its share of the time is an upper bound on what communication costs.
    handed_bytes: of the tensors that this rank handed to collectives and sends.  A ring all-reduce over p ranks moves
        2 (p - 1) / p times as much over each rank's link, an all-gather p - 1 times.
    messages: how many of each kind.
    """

    busy_seconds: float = 0.0
    handed_bytes: int = 0
    messages: dict[str, int] | None = None


def traffic_of(path: Path) -> MessageLog:
    """What the Chrome trace at `path` says of communication."""
    return traffic(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def traffic(events: Sequence[dict[str, Any]]) -> MessageLog:
    """The same, of a trace's events: `gloo:*` are gloo's, `record_param_comms` and kernels are NCCL's."""
    runs, count, handed = [], Counter[str](), 0
    for event in events:
        name, arguments = str(event.get("name", "")), event.get("args", {})
        if event.get("ph") != "X":
            continue
        if name.startswith("gloo:") or (event.get("cat") == "kernel" and name.startswith("ncclDevKernel")):
            runs.append((event["ts"], event["ts"] + event["dur"]))
        if name.startswith("gloo:") and name != "gloo:recv":
            count[name.removeprefix("gloo:")] += 1
            handed += _input_bytes(arguments)
        elif name == "record_param_comms" and arguments.get("Collective name", "wait") not in ("wait", "recv"):
            count[arguments["Collective name"]] += 1
            handed += int(arguments.get("In msg nelems", 0)) * _bytes_each(str(arguments.get("dtype", "byte")))
    return MessageLog(_covered(runs) / 1e6, handed, dict(count))


def _input_bytes(arguments: dict[str, Any]) -> int:
    """Bytes of the tensors among an operation's inputs."""
    pairs = zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=True)
    return sum(math.prod(dims) * _bytes_each(kind) for dims, kind in pairs if dims or kind.lower() in _BYTES)


def _bytes_each(kind: str) -> int:
    if kind.lower() not in _BYTES:
        raise AssertionError(f"a trace names the type {kind!r}, whose size is not known here; known are {', '.join(_BYTES)}")
    return _BYTES[kind.lower()]


def _covered(runs: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(runs):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
