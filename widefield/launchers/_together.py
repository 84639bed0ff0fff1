"""Commands that run at the same time, as one per host; each line that they print is passed on with the host's name."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

AFTER_FAILURE_SECONDS = 30.0
"""How long the other commands may go on after one has failed: their ranks notice it and end by themselves."""
END_SECONDS = 10.0
"""How long a command may take to end after SIGTERM."""
POLL_SECONDS = 0.05


def run_together(commands: Sequence[tuple[str, Sequence[str]]]) -> int:
    """Run (name, command) until all have ended; returns 0, or the status of the first that failed.

    A failure, or Ctrl-C, ends the others too.  OSError: one cannot be started; those that were are ended.
    """
    running: list[tuple[str, subprocess.Popen[str]]] = []
    readers: list[threading.Thread] = []
    try:
        for name, words in commands:
            pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(list(words), text=True, errors="replace", **pipe)  # type: ignore[call-overload]
            running.append((name, process))
            readers.append(threading.Thread(target=_pass_on, args=(name, process), daemon=True))
            readers[-1].start()
        return _wait(running)
    finally:
        _end(running)
        for reader in readers:
            reader.join(1.0)


def _pass_on(name: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            print(f"[{name}] {line.rstrip()}", flush=True)


def _wait(running: Sequence[tuple[str, subprocess.Popen[str]]]) -> int:
    status, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [(name, process.poll()) for name, process in running]
        failed = [(name, code) for name, code in codes if code]
        if failed and not status:
            name, code = failed[0]
            status = code if code > 0 else 128 - code
            print(
                f"widefield: the command of {name} ended with status {status}; its output is above", file=sys.stderr, flush=True
            )
            deadline = time.monotonic() + AFTER_FAILURE_SECONDS
        if all(code is not None for _, code in codes):
            break
        time.sleep(POLL_SECONDS)
    return status


def _end(running: Sequence[tuple[str, subprocess.Popen[str]]]) -> None:
    left = [process for _, process in running if process.poll() is None]
    for process in left:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    for process in left:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
