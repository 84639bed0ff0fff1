"""What a run prints: dense lines, and a progress bar on a terminal.

On a file or a pipe, as under Slurm, there are plain lines without control characters.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

GIB, MIB = 2**30, 2**20


class Terminal(Protocol):
    """Prints lines and progress.  `begin` is called before the first `advance`, `say` at any time."""

    def begin(self, done: int, steps: int) -> None: ...
    def advance(self, step: int, loss: float, images_per_second: float, eta: str) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


def terminal(stream: TextIO) -> Terminal:
    """Lines on `stream`, with a progress bar below them if it is a terminal that can redraw."""
    redraws = stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return _Bar(stream) if redraws else _PlainTerminal(stream)


@contextmanager
def ignoring_closed(stream: TextIO) -> Iterator[None]:
    """Inside, if writing to `stream` fails (a full disk, a closed pipe), redirect it to /dev/null from then on."""
    try:
        yield
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str) -> None:
    """Print a line at once, before a run has its record; a full disk or a closed pipe does not matter."""
    _PlainTerminal(sys.stdout).say(text)


class _PlainTerminal:
    """Lines on a file or a pipe, as under Slurm: no control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, done: int, steps: int) -> None: ...

    def advance(self, step: int, loss: float, images_per_second: float, eta: str) -> None: ...

    def say(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"  # ASCII under LANG=C, and paths may have other characters
        with ignoring_closed(self._stream):
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()

    def close(self) -> None: ...


class _Bar:
    """A progress bar at the bottom of a terminal, with lines above it.

    Redrawn by `advance` and not by a thread: a worker forked while the thread holds its lock would hang when it prints.
    """

    REDRAW_SECONDS = 0.1

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._stream, ours = stream, stream is sys.stdout
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[facts]}"),
            console=Console(file=stream, force_terminal=True), auto_refresh=False, expand=True,
            redirect_stdout=ours, redirect_stderr=ours,
        )  # fmt: skip
        self._task: Any = None
        self._drawn = 0.0

    def begin(self, done: int, steps: int) -> None:
        self._task = self._progress.add_task("", total=steps, completed=done, facts="")
        self._progress.start()

    def advance(self, step: int, loss: float, images_per_second: float, eta: str) -> None:
        facts = f"loss {loss:.4g}  {rate_text(images_per_second)} img/s  eta {eta}"
        self._progress.update(self._task, completed=step, facts=facts)
        now = time.monotonic()
        if now - self._drawn >= self.REDRAW_SECONDS:
            with ignoring_closed(self._stream):
                self._progress.refresh()
            self._drawn = now

    def say(self, text: str) -> None:
        with ignoring_closed(self._stream):
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        with ignoring_closed(self._stream):
            self._progress.stop()


class ImageProgress:
    """Progress over images on standard error: a line that is redrawn on a terminal, else one at least every SECONDS.

    each: how many ranks work at the same time, of which this one shows the progress of all.
    noun: what is counted.
    """

    SECONDS = 10.0

    def __init__(self, images: int, *, each: int = 1, stream: TextIO | None = None, noun: str = "images") -> None:
        self._images, self._each, self._stream, self._noun = images, each, stream or sys.stderr, noun
        self._redraws = self._stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._done, self._began = 0, time.monotonic()
        self._shown = self._began

    def add(self) -> None:
        """One more image of this rank is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown >= (_Bar.REDRAW_SECONDS if self._redraws else self.SECONDS):
            self._shown = now
            self._show(now)

    def _show(self, now: float) -> None:
        done = min(self._images, self._done * self._each)
        rate = done / max(now - self._began, 1e-9)
        speed = f"  {rate_text(rate)} img/s" if self._noun == "images" else ""
        text = f"{done:,}/{self._images:,} {self._noun}{speed}  eta {clock_text((self._images - done) / rate)}"
        with ignoring_closed(self._stream):
            self._stream.write(f"\r{text}\x1b[K" if self._redraws else f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        if self._redraws and self._done:
            with ignoring_closed(self._stream):
                self._stream.write("\r\x1b[K")
                self._stream.flush()


@dataclass
class Throughput:
    """Throughput and time left, from the steps of this process.

    The first step includes warm-up (allocation, the search for kernels, compilation), so it counts only until there is a
    second.
    """

    images_per_second: float = math.nan
    """Of the last interval; in the first interval, of the steps so far."""
    _seen: int = 0
    _spent: float = 0.0
    _samples: int = 0
    _seconds: float = 0.0
    _data_seconds: float = 0.0

    def add(self, samples: int, seconds: float, data_seconds: float) -> None:
        if self._seen == 1:
            self._samples, self._seconds, self._data_seconds = 0, 0.0, 0.0
        self._spent += seconds if self._seen else 0.0
        self._seen += 1
        self._samples += samples
        self._seconds += seconds
        self._data_seconds += data_seconds
        if math.isnan(self.images_per_second) or self._seen == 2:
            self.images_per_second = self._samples / max(self._seconds, 1e-9)

    def add_evaluation(self, seconds: float) -> None:
        """Add the time of an evaluation, since there will be further ones."""
        self._spent += seconds if self._seen > 1 else 0.0

    def seconds_left(self, steps: int) -> float | None:
        """The time of `steps` more steps; None after the first step only."""
        return steps * self._spent / (self._seen - 1) if self._seen > 1 else None

    def interval(self) -> tuple[float, float]:
        """(images per second, share of time spent waiting for data) since the last call."""
        seconds = max(self._seconds, 1e-9)
        self.images_per_second, share = self._samples / seconds, self._data_seconds / seconds
        self._samples, self._seconds, self._data_seconds = 0, 0.0, 0.0
        return self.images_per_second, share


def clock_text(seconds: float | None) -> str:
    """`0:23`, `1:02:03`, `2d 03:04`; `-:--` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def rate_text(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def memory_text(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
