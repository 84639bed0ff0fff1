"""When a run began, was resumed and ended, and its newest checkpoint, from its record."""

from __future__ import annotations

from datetime import UTC, datetime

from widefield.quantity import count_of
from widefield.training.record import Line


def history(lines: list[Line]) -> list[tuple[str, str]]:
    """(time, what happened): starts, ends and the newest checkpoint."""
    events = []
    for line in lines:
        if line.get("kind") == "start":
            resumed = line["resumed_from"]
            events.append((_when(line), "started" if resumed is None else f"resumed from step {resumed:,}"))
        if line.get("kind") == "end":
            events.append((_when(line), f"{line['reason']} at step {line['step']:,}"))
    checkpoints = [line for line in lines if line.get("kind") == "checkpoint"]
    if checkpoints:
        name = checkpoints[-1]["name"]
        events.append((_when(checkpoints[-1]), f"newest of {count_of(len(checkpoints), 'checkpoint')}: {name}"))
    return events


def _when(line: Line) -> str:
    return datetime.fromtimestamp(line["time"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
