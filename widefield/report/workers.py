"""What workers that do not step together did, from a run's events.jsonl: computing, waiting, staleness, bytes."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from widefield.agreement.events import Event
from widefield.quantity import count_of, size_text
from widefield.report.plots import FAINT, SERIES, WIDTH_IN, drawn, style
from widefield.training.record import Line

NAME = "events.jsonl"
HEAD = ("worker", "gradients", "samples", "computing", "idle", "sent")
MOST_BARS = 40


@dataclass
class _Worker:
    """Of one worker.  lived: seconds in all, between its first event and its death or the end."""

    gradients: int = 0
    samples: int = 0
    computing: float = 0.0
    nbytes: int = 0
    lived: float = 0.0
    since: float | None = None
    ends: list[str] = field(default_factory=list)

    def hears(self, event: Event) -> None:
        self.nbytes += event.bytes
        if event.kind == "die":
            self.lived += event.time - (event.time if self.since is None else self.since)
            self.since, self.ends = None, [*self.ends, "gone"]
            return
        if self.since is None:
            self.since = event.time - event.seconds
            self.ends = [*self.ends, "back"] if self.ends else []
        if event.kind == "gradient":
            self.gradients, self.samples = self.gradients + 1, self.samples + len(event.samples)
            self.computing += event.seconds

    def row(self, number: int, end: float) -> tuple[str, ...]:
        lived = self.lived + (0.0 if self.since is None else end - self.since)
        idle = max(0.0, lived - self.computing)
        share = f"{idle:.1f} s, {idle / lived:.0%}" if lived else "–"
        name = f"{number}{', ' + ', '.join(self.ends) if self.ends else ''}"
        return name, f"{self.gradients:,}", f"{self.samples:,}", f"{self.computing:.1f} s", share, size_text(self.nbytes)


def workers(folder: Path, updates: list[Line]) -> dict[str, Any] | None:
    """`head`, `rows`, `caption` and `picture` (of staleness; None without) of a run; None of one without events.

    updates: the record's lines of that kind.  ValueError: the file is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as lines:
        header = _header(next(lines, ""), path)
        found, last = _heard(_events(lines, path))
    end = max(last, float(header.get("seconds", 0.0)))
    rows = [one.row(number, end) for number, one in sorted(found.items())]
    staleness = Counter(age for line in updates for age in line.get("staleness", ()))
    caption = (
        "Idle is the time in which a worker lived and computed no gradient: it waited for weights, others, an evaluation or "
        "messages. Sent are bytes to and from the worker, without headers."
    )
    picture = Markup(_picture(staleness)) if staleness else None
    return {"head": HEAD, "rows": rows, "caption": caption, "picture": picture, "staleness": _in_words(staleness)}


def _header(text: str, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
        assert isinstance(header, dict)
        return header
    except (ValueError, AssertionError, RecursionError):
        raise ValueError(f"{path} is damaged: it begins with {text[:60]!r} and not with what run it is of; delete it") from None


def _events(lines: Iterable[str], path: Path) -> Iterator[Event]:
    """Those of whole lines: the last one may be torn."""
    for number, line in enumerate(lines, start=2):
        if not line.endswith("\n"):
            return
        try:
            yield Event.from_json(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is damaged ({error}); delete the file, and the report leaves it out"
            ) from None


def _heard(events: Iterable[Event]) -> tuple[dict[int, _Worker], float]:
    """By number, what each worker did; and when the last event was."""
    found: dict[int, _Worker] = {}
    last = 0.0
    for event in events:
        last = max(last, event.time)
        if event.kind in ("read", "gradient", "pair", "die", "join") and event.workers:
            found.setdefault(event.workers[0], _Worker()).hears(event)
    return found, last


def _in_words(staleness: Counter[int]) -> str:
    if not staleness:
        return ""
    ages = sorted(staleness.elements())
    return (
        f"Staleness of {count_of(len(ages), 'update')}, in updates between the reading of weights and the update with their "
        f"gradient: {statistics.fmean(ages):.2f} in the mean, {ages[-1]} at most."
    )


def _picture(staleness: Counter[int]) -> str:
    """SVG of how many updates had which staleness; the oldest ones together where there are many kinds."""
    most = max(staleness)
    width = -(-(most + 1) // MOST_BARS)
    counts = np.zeros(most // width + 1)
    for age, count in staleness.items():
        counts[age // width] += count
    with style():
        figure = Figure(figsize=(WIDTH_IN, 2.6))
        axes = figure.subplots()
        axes.bar(np.arange(len(counts)) * width + (width - 1) / 2, counts, width=0.8 * width, color=SERIES[0])
        axes.set_xlabel("staleness", color=FAINT)
        axes.set_ylabel("updates", color=FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False, axis="x")
        return drawn(figure, "updates by staleness")
