"""How a run ended, for whoever starts it again: a launcher, torchrun, a batch script.

stopped.json    is in the run folder from the end of a run that was asked to stop, {"step": 34, "signal": "SIGUSR1"}, until
                the run goes on.  A batch script looks for it where a launcher hides the exit status of the ranks.
record.jsonl    its last lines tell a launcher what failed and at which step.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from widefield.launchers._restarting import Failure
from widefield.training import record
from widefield.training.disk import replace_text

STOPPED = "stopped.json"
_ELSEWHERE = ("SIGINT", "SIGUSR1")
"""Signals that torchrun never sends to ranks by itself: whoever sent one wants the run to end here."""


def write_stopped(folder: Path, *, step: int, by: signal.Signals | None) -> Path:
    """Write stopped.json.  by: the signal that rank 0 got; None where another rank got it, or the launcher has ended."""
    replace_text(folder / STOPPED, json.dumps({"step": step, "signal": None if by is None else by.name}) + "\n")
    return folder / STOPPED


def forget_stopped(folder: Path) -> None:
    """Remove stopped.json, as the run goes on."""
    (folder / STOPPED).unlink(missing_ok=True)


def stop_that_stands(folder: Path, environment: Mapping[str, str] = os.environ) -> int | None:
    """The step at which the run was asked to stop, where torchrun has started it again all the same; else None.

    torchrun takes a rank that ends with another status than 0 for failed, and starts all again while it has restarts left.
    """
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        stopped = json.loads((folder / STOPPED).read_text(encoding="utf-8"))
        stands = restarts.isdecimal() and int(restarts) > 0 and stopped["signal"] in _ELSEWHERE
        return int(stopped["step"]) if stands else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def failure_since(folder: Path, since: float) -> Failure:
    """What the record in `folder` says of a start that began at `since` (time.time()) and failed."""
    try:
        lines = record.read(folder)
    except (OSError, ValueError):  # none was written yet, or it is damaged, which the next start tells
        return Failure()
    steps = [line for line in lines if line.get("kind") == "step"]
    ends = [line for line in lines if line.get("kind") == "end" and line.get("time", 0) >= since]
    words = ends[-1].get("text", "") if ends and ends[-1].get("reason") == "failed" else ""
    stepped = bool(steps) and steps[-1].get("time", 0) >= since
    return Failure(steps[-1]["step"] if steps else 0, stepped, str(words))
