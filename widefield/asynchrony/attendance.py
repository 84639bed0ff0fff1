"""Which workers have had a share for so long that they must hang?  A process that is stopped does not end, so no message fails.

A worker that has a share is given `log.hang_seconds`, or, where the run's slowest gradient so far took long, PATIENCE times
that, since workers may be slow for a reason.  One that waits for an answer is given all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from widefield.agreement.serving import Share

PATIENCE = 5.0


@dataclass
class Attendance:
    """seconds: log.hang_seconds; None: nobody is struck out.  now: the clock, in seconds."""

    workers: Sequence[int]
    seconds: float | None
    now: Callable[[], float] = time.monotonic
    longest: float = 0.0
    """The seconds that the slowest gradient took, from the answer to the push."""
    _since: dict[int, float] = field(default_factory=dict)
    """By worker, when it was last heard of or given something."""
    _given: dict[tuple[int, Share], float] = field(default_factory=dict)
    _struck: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since = dict.fromkeys(self.workers, self.now())

    def hears(self, worker: int) -> None:
        self._since[worker] = self.now()

    def comes_back(self, worker: int) -> None:
        self._struck.pop(worker, None)
        self.hears(worker)

    def gives(self, worker: int, share: Share) -> None:
        self._since[worker] = self._given[worker, share] = self.now()

    def pushes(self, worker: int, share: Share) -> None:
        self.longest = max(self.longest, self.now() - self._given.pop((worker, share), self.now()))

    def hanging(self, busy: Collection[int]) -> dict[int, str]:
        """Of the workers that a message is awaited from, those that are struck out now, with why."""
        if self.seconds is None:
            return {}
        most = max(self.seconds, PATIENCE * self.longest)
        found = {worker: self.now() - self._since[worker] for worker in busy if self.now() - self._since[worker] > most}
        for worker, silent in found.items():
            self._given = {key: value for key, value in self._given.items() if key[0] != worker}
            self._struck[worker] = (
                f"was struck out after {silent:.1f} s without a message, and its share was given to another; it ends, and the "
                "others go on. log.hang_seconds says after how long"
            )
        return {worker: f"hangs: no message for {silent:.1f} s" for worker, silent in found.items()}

    def reason(self, worker: int) -> str:
        """What a worker is told that was struck out."""
        return self._struck.get(worker, "was taken for dead, since a message to it failed; it ends, and the others go on")
