"""Chrome traces of some steps, recorded by torch's profiler, and the communication in them.

Open `timeline-rank0.json` in https://ui.perfetto.dev or chrome://tracing.  It shows operations, and every collective as
`gloo:all_reduce` (CPU) or `nccl:all_reduce` with its kernel (GPU).  Recorded steps are slower, so none of them is timed.
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
    """Records steps of a training run: call `step()` where each begins, and `close()` at the end.

    Writes `timeline-rankR.json` after `steps` recorded steps, or at `close`.  The first `after` steps are not recorded, since
    they include warm-up.  Every rank writes its own file, with times of its own clock.
    """

    def __init__(self, folder: Path, *, rank: int, after: int = 2, steps: int = 10) -> None:
        self.path = folder / f"timeline-rank{rank}.json"
        self._first, self._last, self._begun = after, after + steps, 0
        self._profile: profile | None = None
        self._mark: record_function | None = None

    def step(self) -> None:
        """Mark the beginning of a step."""
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
        """Write the trace; a second call does nothing."""
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
    """Record a trace of the block into `path`."""
    with _profile() as recorder:
        yield
    _write(recorder, path)


def _profile() -> profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else the profiler prints its start, its end, and that there is no GPU
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)


def _write(recorder: profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(path))


# ---------------------------------------------------------------------------------------------- communication


@dataclass(frozen=True)
class MessageLog:
    """The communication of a rank during a trace.

    busy_seconds: how long at least one message or collective was under way, waits for slower ranks included.  Some of it may
        overlap computation, so its share of the time is an upper bound on the cost of communication.
    handed_bytes: of the tensors that this rank passed to collectives and sends.  A ring all-reduce over p ranks moves
        2 (p - 1) / p times as much over each rank's link, an all-gather p - 1 times.
    messages: their number by kind.
    """

    busy_seconds: float = 0.0
    handed_bytes: int = 0
    messages: dict[str, int] | None = None


def traffic_of(path: Path) -> MessageLog:
    """The communication in the Chrome trace at `path`."""
    return traffic(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def traffic(events: Sequence[dict[str, Any]]) -> MessageLog:
    """The communication in a trace's events: `gloo:*` are gloo's, `record_param_comms` and kernels are NCCL's."""
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
