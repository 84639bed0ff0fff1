"""events.jsonl of a run folder: what happened at the server, a line each, as widefield/agreement/events.py says.

A run that goes on from a checkpoint leaves out what came after it, so the file has one run from its first step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

from widefield.agreement.events import Event, EventLog

NAME = "events.jsonl"


class EventFile:
    """Open for writing.  log: the header of a new file, without events.

    samples: of how many samples the weights have learned that the run goes on from.  stood: of how many steps, of workers that
    stand where the run may go on from.
    """

    def __init__(self, path: Path, log: EventLog, *, samples: int = 0, stood: int = 0) -> None:
        self.path = path
        before = list[Event]()
        if path.is_file() and (samples or stood):
            before = _events_until(path, samples) if samples else _events_until_stand(path, stood)
        workers = max([log.workers, *(1 + event.workers[0] for event in before)])  # it may go on with fewer
        self.gradients = 1 + max((event.numbers[0] for event in before if event.kind == "gradient"), default=-1)
        """The number of the next one."""
        self.before = before
        self._began = time.monotonic() - (before[-1].time if before else 0.0)
        exact = log.exact and (not before or _is_exact(path))
        _write(path, dataclasses.replace(log, workers=workers, events=tuple(before), exact=exact))
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, *workers: int, **further: object) -> None:
        self.add(Event(self.now, kind, workers, **further))  # type: ignore[arg-type]

    def add(self, event: Event) -> None:
        self._file.write(event.to_json() + "\n")

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Write into the header when the run ended."""
        self._file.close()
        header, _, events = self.path.read_text(encoding="utf-8").partition("\n")
        _replace(self.path, json.dumps(json.loads(header) | {"seconds": self.now}) + "\n" + events)


def _is_exact(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return bool(json.loads(file.readline()).get("exact", True))


def _events_until(path: Path, samples: int) -> list[Event]:
    """The events until so many samples were learned from; a torn last line is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]
    events = [Event.from_json(line) for line in lines if line.endswith("\n")]
    late = {event.numbers[0] for event in events if event.kind == "drop"}
    found, learned = list[Event](), 0
    for event in events:
        is_late = event.kind == "gradient" and event.numbers[0] in late
        learned += 0 if is_late else {"gradient": 1, "die": -1}.get(event.kind, 0) * len(event.samples)
        if learned > samples:
            break
        found.append(event)
    return found


def _events_until_stand(path: Path, steps: int) -> list[Event]:
    """The events until all stood after so many steps, the last time that they did; none where they never did."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True)[1:] if line.endswith("\n")]
    events = [Event.from_json(line) for line in lines]
    stood = [place for place, event in enumerate(events) if event.kind == "stand" and event.part == steps]
    return events[: stood[-1] + 1] if stood else []


def _write(path: Path, log: EventLog) -> None:
    _replace(path, log.to_text())


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
