"""Ranks forked from one process that has loaded torch, and what the launcher knows of them.

Loading torch and the rest takes a rank some five seconds of a core.  `Forking` starts one process, `python -m
widefield.forked_ranks`, which loads them once, while the launcher still checks the plan, and then forks all ranks, and again
after a failure.  It is their parent, so it reports how each ended, and the launcher reads that here.

    to it, on its stdin     a line per order: {"order": 1, "arguments": [...], "environments": [{...}, ...]}
    from it, on a pipe      a line per rank that has begun, {"order": 1, "rank": 0, "pid": 123}, and per rank that has ended,
                            {"order": 1, "rank": 0, "code": -9}, its code as of Popen
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Protocol

GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Where one of these is there, ranks are started and not forked: a library that asks for the GPU before the fork spoils it."""


class RankProcess(Protocol):
    """What the launcher asks of a rank: its process number, and its exit code or None."""

    pid: int

    def poll(self) -> int | None: ...


def may_fork() -> bool:
    """Whether ranks of this machine can be forked from a process that has loaded torch: on Linux, without GPUs."""
    return sys.platform == "linux" and not any(Path(device).exists() for device in GPUS)


class Forking:
    """The process that forks ranks.  It is started here, with this process's environment, and begins to load.

    command: starts it; the number of the pipe to report on is added.  run_id: is in its environment, and so in the ranks'.
    """

    def __init__(self, command: list[str], run_id: str) -> None:
        self.run_id = run_id
        self._command = command
        self._order = 0
        self._ranks: dict[int, _ForkedRank] = {}
        self._begin()

    def _begin(self) -> None:
        self._reports, theirs = os.pipe()
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": self.run_id}
        try:
            self._process = Popen(
                [*self._command, str(theirs)], stdin=PIPE, pass_fds=[theirs], env=environment, start_new_session=True
            )
        finally:
            os.close(theirs)
        os.set_blocking(self._reports, False)
        self._unread = b""
        self._over = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def renew(self) -> None:
        """Start the process anew, after it has ended."""
        self.end()
        self._begin()

    def fork(self, arguments: list[str], environments: list[dict[str, str]]) -> None:
        """Order it to fork a rank per environment as soon as it has loaded, and all ranks of the order before have ended."""
        assert self._process.stdin is not None
        self.read()
        self._order, self._ranks = self._order + 1, {}
        order = {"order": self._order, "arguments": arguments, "environments": environments}
        with contextlib.suppress(BrokenPipeError):  # it has ended: poll() says so
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def begun(self) -> dict[int, RankProcess]:
        """The ranks that have begun so far, by rank."""
        self.read()
        return dict(self._ranks)

    def poll(self) -> int | None:
        """The exit code of the process itself; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kill the process.  Ranks that it has forked go on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self.read()

    def read(self) -> None:
        """Take in what the process has reported.  Where it is gone, ranks that it did not report count as killed with it."""
        while not self._over:
            try:
                text = os.read(self._reports, 65536)
            except BlockingIOError:
                return
            *lines, self._unread = (self._unread + text).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if not text:
                self._over = True
                os.close(self._reports)
                for rank in self._ranks.values():
                    rank.code = -signal.SIGKILL if rank.code is None else rank.code

    def _take(self, report: dict[str, int]) -> None:
        if report["order"] != self._order:
            return  # of a rank that was killed before this order
        if "pid" in report:
            self._ranks[report["rank"]] = _ForkedRank(self, report["pid"])
        else:
            self._ranks[report["rank"]].code = report["code"]


class _ForkedRank:
    """A rank of a Forking."""

    def __init__(self, forking: Forking, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._forking = forking

    def poll(self) -> int | None:
        self._forking.read()
        return self.code
