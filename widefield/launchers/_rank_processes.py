"""The processes of the ranks of this machine: watched, signalled, and ended with all that they started.

a rank fails      the others get 1 s to end by themselves (each may be about to print an error), then SIGTERM, 1 s later
                  SIGKILL
a first signal    is passed on to all ranks, which save and end; they have `grace_seconds`, unless one of them fails
a second signal   SIGKILL to all, at once
a signal kills    a rank that may be lost, as the worker of a parameter server: the others go on, and it may be started again
only such are left  they get 15 s, then SIGKILL: one that was stopped would never end
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from widefield.launchers._forking import RankProcess
from widefield.refusal import FOLLOWED, TO_BE_CONTINUED

OWN_END_SECONDS = 1.0
"""How long the other ranks may go on after one has failed, before SIGTERM and once more before SIGKILL.  They hear of it and
end by themselves, see comm/failure.py."""
LOST_END_SECONDS = 15.0
"""How long ranks that may be lost may go on after all others have ended well."""
POLL_SECONDS = 0.05


class RankProcesses:
    """The processes of the ranks, the signal that asked them to end, and how they ended."""

    def __init__(self, run_id: str, grace_seconds: float, may_be_lost: int = 0) -> None:
        self.run_id = run_id
        self.grace_seconds = grace_seconds
        self.spared: int | None = None
        """The process that forks the ranks, which has their run's id too."""
        self.processes: dict[int, RankProcess] = {}
        self.received: signal.Signals | None = None
        self.ended_at_once = False
        self.expected: tuple[int, ...] = (0, TO_BE_CONTINUED)
        """The exit codes of ranks that have not failed."""
        self.may_be_lost = may_be_lost
        """How many of the first ranks the others go on without, where a signal killed them."""
        self.revive: Callable[[int, str], RankProcess | None] = lambda rank, verdict: None
        """Starts such a rank again, or does not; it is told what became of it."""
        self._mourned: set[int] = set()
        """The processes of such ranks that stay dead."""
        self.status = 0
        """The exit status for the command."""
        self.verdict = ""

    def on_signal(self, number: int) -> None:
        """Record the first signal, for `watch` to act on; kill all ranks at the second."""
        if self.received is None:
            self.received = signal.Signals(number)
        else:
            self.ended_at_once = True
            self.kill()

    def watch(self) -> None:
        """Wait until the ranks have ended: by themselves, upon a signal, or because one has failed."""
        while True:
            running = self.running()
            if self.received is not None and not self.all_succeeded():
                return self.end_after_signal(self.received)
            if self.has_failure():
                return self.end_after_failure()
            if not running:
                self.status = TO_BE_CONTINUED if self.has_stopped() else 0
                return None
            if max(running) < self.may_be_lost:
                self.wait(LOST_END_SECONDS)
                self.kill()
            else:
                self._revive_lost()
            time.sleep(POLL_SECONDS)

    def _revive_lost(self) -> None:
        for rank, process in list(self.processes.items()):
            code = process.poll()
            if code is None or not self._is_lost(rank, code) or process.pid in self._mourned:
                continue
            self._mourned.add(process.pid)
            new = self.revive(rank, verdict(f"rank {rank}", code)[1])
            if new is not None:
                self.processes[rank] = new

    def running(self) -> list[int]:
        """The ranks that are still running."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def all_succeeded(self) -> bool:
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        return all(code == 0 or self._is_lost(rank, code) for rank, code in codes.items())

    def _is_lost(self, rank: int, code: int | None) -> bool:
        return rank < self.may_be_lost and code is not None and code < 0

    def has_stopped(self) -> bool:
        """Whether a rank ended as it was asked to stop: by a signal to it alone, or the one that was passed on."""
        return any(process.poll() == TO_BE_CONTINUED for process in self.processes.values())

    def has_failure(self) -> bool:
        """Whether a rank has failed; sets `status` and `verdict` for the rank to blame.

        It is the first one found, unless its code says that it ended because another rank failed.  Of several found at once
        it is one that a signal killed, since the others may have failed on losing it.  (SIGABRT counts as an exit: Gloo's
        threads raise it in a rank that ends with an exception.)
        """
        codes = self._codes()
        if not self.verdict:
            self._blame({rank: code for rank, code in codes.items() if code != FOLLOWED})
        return bool(codes)

    def _codes(self) -> dict[int, int]:
        """The exit codes of the failed ranks."""
        ended = {rank: code for rank, process in self.processes.items() if (code := process.poll()) is not None}
        return {rank: code for rank, code in ended.items() if code not in self.expected and not self._is_lost(rank, code)}

    def _blame(self, codes: dict[int, int]) -> None:
        if codes:
            rank = min(codes, key=lambda rank: (codes[rank] > 0 or codes[rank] == -signal.SIGABRT, rank))
            self.status, self.verdict = verdict(f"rank {rank}", codes[rank])

    def end_after_signal(self, received: signal.Signals) -> None:
        """Pass the signal on and wait for the ranks to save and end, unless one of them fails."""
        name = name_of(received)
        text = f"{name}: the ranks save and end, in {self.grace_seconds:.0f} s at most; a second signal ends them at once"
        print(f"widefield: {text}", file=sys.stderr, flush=True)
        passed_on = signal.SIGINT if received == signal.SIGINT else signal.SIGTERM  # ranks save on both
        self.expected = (0, TO_BE_CONTINUED, 128 + received, 128 + passed_on, -passed_on)
        self.status = 128 + received
        self.send(passed_on)
        self.wait(self.grace_seconds, unless=lambda: not self.ended_at_once and self.has_failure())
        if self.ended_at_once or self.has_failure():
            self.end_after_failure()
        elif late := self.running():
            self.status = 128 + signal.SIGKILL
            self.verdict = f"rank {late[0]} had not ended {self.grace_seconds:.0f} s after {name} and was killed"
        elif self.all_succeeded():
            self.status = 0
        elif self.has_stopped() and received != signal.SIGINT:
            self.status = TO_BE_CONTINUED

    def end_after_failure(self) -> None:
        """Give the remaining ranks a moment, then send SIGTERM, then SIGKILL."""
        self.wait(OWN_END_SECONDS)
        if (
            not self.ended_at_once and self.has_failure() and not self.verdict
        ):  # every failed rank says that another failed; blame one now, before our signals change codes
            self._blame(self._codes())
        self.send(signal.SIGTERM)
        self.wait(OWN_END_SECONDS)
        self.kill()

    def wait(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until all ranks have ended, or `seconds` are over, or `unless` comes true."""
        deadline = time.monotonic() + seconds
        while not unless() and self.running() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every running rank and the processes it started: each rank leads a session."""
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, number)

    def kill(self) -> None:
        """SIGKILL the ranks and, on Linux, all processes with their run's id in the environment, as a dead rank's workers.

        The process that forks ranks is left.
        """
        self.send(signal.SIGKILL)
        for _ in range(20):  # a process may fork while we search, and a killed one takes a moment to disappear
            left = [pid for pid in _processes_of(self.run_id) if pid != self.spared]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(POLL_SECONDS)
        self.wait(OWN_END_SECONDS)  # poll the killed ranks, so that they are no zombies


def verdict(who: str, code: int) -> tuple[int, str]:
    """The exit status for a process that failed, and a sentence.  code: as of Popen, negative for a signal."""
    if code > 0:
        return code, f"{who} ended with exit code {code}; its message is above"
    hints = {signal.SIGKILL: "; the machine may be out of memory", signal.SIGABRT: "; its message is above"}
    number = signal.Signals(-code)
    return 128 - code, f"{who} was killed by {number.name}{hints.get(number, '')}"


def name_of(number: signal.Signals) -> str:
    return "Ctrl-C" if number == signal.SIGINT else number.name


def _processes_of(run_id: str) -> list[int]:
    """The processes with this run's id in their environment; [] without /proc."""
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
