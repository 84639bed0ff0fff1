"""What the planner said of a run beside what was measured, from the run's record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from widefield.quantity import bytes_text

Line = dict[str, Any]
NEAR = {"memory": 0.05, "time": 0.10}
"""How far apart the two may be; beyond, recalibrating is offered."""


def predicted(start: Line, steps: Sequence[Line]) -> dict[str, Any] | None:
    """`rows` (what, predicted, measured, difference), `parts` (part, predicted), `words`; None for a run without a prediction.

    steps: those that are not warm-up.  The time is that of a step without its wait for data, which is not predicted.
    """
    said = start.get("prediction")
    if not said:
        return None
    rows, far = [], []
    if steps:
        took = statistics.median(line["seconds"] - line["data_seconds"] for line in steps)
        rows.append(_row("a step, without waiting for data", said["seconds"], took, _milliseconds))
        far += _far("time", said["seconds"], took)
    if steps and start.get("memory_of") == "GPU":
        held = max(line["memory_bytes"] for line in steps)
        size = said["peak_memory_bytes"] + said.get("library_bytes", 0)  # of cuBLAS, which torch counts with tensors
        rows.append(_row("memory that torch allocated, rank 0", size, held, bytes_text))
        far += _far("memory", size, held)
    elif steps:
        held = max(line["memory_bytes"] for line in steps)
        rows.append(("memory, rank 0", bytes_text(said["peak_memory_bytes"]), f"{bytes_text(held)} of the process", "–"))
    parts = [(f"memory: {name}", bytes_text(size)) for name, size in sorted(said["parts"].items(), key=lambda one: -one[1])]
    parts += [(f"time: {name}", _milliseconds(seconds)) for name, seconds in said["seconds_by"].items() if seconds]
    return {"rows": rows, "parts": parts, "words": _words(start, said, far, measured=bool(steps))}


def _row(what: str, said: float, found: float, text: Any) -> tuple[str, str, str, str]:
    return what, text(said), text(found), f"{100 * (said / max(found, 1e-12) - 1):+.1f} %"


def _far(what: str, said: float, found: float) -> list[str]:
    return [what] if abs(said / max(found, 1e-12) - 1) > NEAR[what] else []


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms"


def _words(start: Line, said: dict[str, Any], far: list[str], *, measured: bool) -> str:
    text = f"Predicted for {said['machines']} before the run began."
    if not measured:
        return f"{text} No step was recorded."
    if start.get("memory_of") != "GPU":
        text += " On a CPU the record has the memory of the process with its libraries, which is not what was predicted."
    if "time" in far and not said["measured_device"]:
        text += " The time is off, and was priced from data sheets: widefield plan --calibrate measures this machine."
    elif "time" in far:
        text += (
            " The time is off: the machine was busy, or is another than when it was measured; widefield plan --calibrate again."
        )
    if "memory" in far:
        text += " The memory is off by more than 5 %, which the planner's figures should not be; please report the recipe."
    return text if far else f"{text} What was measured is near it."
