"""Says where a run is when a step or an evaluation takes long, so that there is a line every QUIET_SECONDS at least."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from widefield.streaming import progress
from widefield.training.loop import Learner
from widefield.training.passes import Passes
from widefield.training.record import QUIET_SECONDS, Record


class Heartbeat:
    """While open, a thread that prints a line where the record has printed none for long.  On rank 0 only.

    It writes to the file descriptor, without the locks of Python's streams: a process that is forked while the thread holds
    one, as a loader's worker, would hang when it prints.
    """

    def __init__(self, record: Record, learner: Learner, passes: Passes, *, last: int, stream: Callable[[], int]) -> None:
        self._record, self._learner, self._passes, self._last, self._stream = record, learner, passes, last, stream
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._said = 0.0

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(QUIET_SECONDS / 10):
            now = time.monotonic()
            if now - max(self._said, self._record.said) < QUIET_SECONDS:
                continue
            self._said = now
            with contextlib.suppress(OSError, ValueError):  # a closed pipe, or a stream that is no file
                os.write(self._stream(), f"{self.sentence()}\n".encode())

    def sentence(self) -> str:
        """Where the run is, as `step 3 of 100: pass 2 of 8, backward, segment 1 of 2, tile 5 of 16, for 25 s`."""
        since, learner, tile = self._passes.in_step_since, self._learner, progress.in_words()
        at = f"{tile}, " if tile else ""
        if since is None:
            quiet = time.monotonic() - self._record.said
            return f"after step {learner.step} of {self._last}: evaluating or saving, {at}for {quiet:.0f} s"
        passes = learner.config.gradient.accumulate
        if passes > 1:
            at = f"pass {max(1, learner.pass_number)} of {passes}, {at}"
        return f"step {learner.step + 1} of {self._last}: {at}for {time.perf_counter() - since:.0f} s"
