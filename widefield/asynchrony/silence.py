"""Ends a run whose workers live and send nothing: a link that is idle tells the rank that answers nothing of them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from widefield.comm.mesh import AgreedError


class Silence:
    """seconds: how long nothing may come, `log.hang_seconds`; None: for ever.  Begins where it is made."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._since = seconds, time.monotonic()

    def look(self, came: object | None, *, due: Iterable[int]) -> None:
        """came: what a worker sent; None: nobody did.  due: workers that wait for no answer.  AgreedError: it is too long."""
        now = time.monotonic()
        if came is not None:
            self._since = now
        elif self._seconds is not None and now - self._since > self._seconds:
            raise AgreedError(
                f"no worker has sent anything for {now - self._since:.0f} s, and worker {', '.join(map(str, sorted(due)))} "
                f"should: it hangs, or a share takes it longer than log.hang_seconds={self._seconds:g}, which is then to be "
                "larger. The same command goes on from the newest checkpoint"
            )
