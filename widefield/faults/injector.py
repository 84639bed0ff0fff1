"""Which fault is due at a call of this rank, and what it does.  Each leaves a line in the run's record before it comes.

The line has the rank, the step under `at`, the fault, and the words that asked for it.  A run that goes on from a checkpoint
passes the same step again: a fault that came is not due any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from widefield.faults.fault import ACTS, PlantedFault


class InjectedFaultError(RuntimeError):
    """What a fault of the kind `exception` raises."""


class Injector:
    """The faults of this rank.  step: the current one, set by whoever runs the steps.

    device: where a fault of the kind out_of_memory asks for memory.  note: called with a fault and its step before it comes.
    """

    def __init__(
        self, faults: Sequence[PlantedFault], *, rank: int, device: torch.device, note: Callable[[PlantedFault, int], None]
    ) -> None:
        self.step = 0
        self.rank, self.device, self._note = rank, device, note
        self._left = [fault for fault in faults if fault.rank == rank]
        self._calls: Counter[tuple[PlantedFault, int]] = Counter()
        self._lock = threading.Lock()  # checkpoints are written by a thread

    @property
    def left(self) -> list[PlantedFault]:
        """The faults that have not come, without those that come again and again."""
        return [fault for fault in self._left if not fault.every]

    def expects(self, phase: str) -> bool:
        """Whether a fault of this rank is left in a phase."""
        return any(fault.phase == phase for fault in self._left)

    def due(self, phase: str, kinds: Collection[str], *, step: int | None = None) -> PlantedFault | None:
        """The fault of one of these kinds that befalls this call of a phase, noted; None where none does."""
        now = self.step if step is None else step
        with self._lock:
            for fault in self._left:
                if fault.phase != phase or fault.kind not in kinds or not fault.is_at(now):
                    continue
                self._calls[fault, now] += 1
                if self._calls[fault, now] == fault.call:
                    self._left = [one for one in self._left if one is not fault or fault.every]
                    self._note(fault, now)
                    return fault
        return None

    def before(self, phase: str, *, step: int | None = None) -> None:
        """Called where a phase begins: raises, sleeps or ends the process where a fault of such a kind is due."""
        fault = self.due(phase, ACTS, step=step)
        if fault is not None:
            act(fault, self.device)


def act(fault: PlantedFault, device: torch.device) -> None:
    """Let a fault of one of the kinds ACTS befall this process."""
    where = f"injected on rank {fault.rank} in {fault.phase}"
    match fault.kind:
        case "exception":
            raise InjectedFaultError(where)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(fault.seconds)
        case "out_of_memory":
            torch.empty(2**50, dtype=torch.uint8, device=device)  # a pebibyte: the allocator's own refusal, in its own words
        case "disk_full":
            raise _error_of_the_system(errno.ENOSPC, where)
        case "io_error":
            raise _error_of_the_system(errno.EIO, where)


def _error_of_the_system(number: int, where: str) -> OSError:
    return OSError(number, f"{os.strerror(number)} ({where})")


# ---------------------------------------------------------------------------------------------- the record


def note_in(record: Path) -> Callable[[PlantedFault, int], None]:
    """A note that prints a fault and appends its line to a run's record; without a record it only prints."""

    def note(fault: PlantedFault, step: int) -> None:
        print(f"widefield: fault: {fault} (at step {step})", file=sys.stderr, flush=True)
        line = {"kind": "fault", "time": time.time(), "rank": fault.rank, "at": step, "fault": str(fault), "asked": fault.asked}
        with contextlib.suppress(OSError):  # no record yet, or a full disk
            file = os.open(record, os.O_WRONLY | os.O_APPEND)
            os.write(file, f"{json.dumps(line)}\n".encode())  # one line at once, beside those of rank 0
            os.close(file)

    return note


def left_of(faults: Sequence[PlantedFault], record: Path) -> list[PlantedFault]:
    """The faults that a run's record does not have yet, and those that come again and again."""
    if not record.is_file():
        return list(faults)
    lines = [line for line in record.read_text(errors="replace").splitlines() if '"kind": "fault"' in line]
    came = [json.loads(line).get("asked") for line in lines]
    return [fault for fault in faults if fault.every or fault.asked not in came]
