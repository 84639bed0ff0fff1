"""Runs that are to fail at one worker: without a pause the others could take all steps before that worker begins."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_failure(run: Path, *, seconds: float = 60) -> None:
    """Until the rank that writes the run's files has reported its end; TimeoutError: it does not."""
    deadline = time.monotonic() + seconds
    while not (run / "report.html").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} has no report after {seconds:.0f} s: the worker's failure ended nothing")
        time.sleep(0.01)
