"""Starts ranks on this machine, watches them, and leaves no process behind.

`start` gives ranks torchrun's variables, and hosts the store at which they meet on a free port.  It is no agent of torchrun's,
which waits 30 s for a rank that hangs after another's crash, leaves orphans when a second signal comes meanwhile, and cannot
fork a rank from a process that has loaded torch (_forking.py).  How ranks end:

    a rank fails      the others get 1 s to end by themselves (each may be about to print an error), then SIGTERM, 1 s later
                      SIGKILL
    a first signal    is passed on to all ranks, which save and end; they have `grace_seconds`, unless one of them fails
    a second signal   SIGKILL to all, at once

The output of ranks goes to the terminal unchanged.  A rank reads torchrun's variables (torchrun.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING

from widefield.launchers._forking import Forking, RankProcess
from widefield.refusal import FOLLOWED

if TYPE_CHECKING:
    from widefield.comm.mesh import World

PRIORITY = 90

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""SIGUSR1 is how Slurm warns that a job's time is nearly over."""
OWN_END_SECONDS = 1.0
"""How long the other ranks may go on after one has failed, before SIGTERM and once more before SIGKILL.  They hear of it and
end by themselves, see comm/failure.py."""
POLL_SECONDS = 0.05
RANKS_PER_CORE = "WIDEFIELD_RANKS_PER_CORE"
"""The environment variable with the largest number of CPU ranks per core that the command starts."""
RANKS_PER_CORE_MOST = 8
"""That number where the variable is not set."""


def detect(environment: Mapping[str, str]) -> World | None:
    """None: the ranks started here have torchrun's variables."""
    return None


CASES: list[tuple[dict[str, str], World | str | None]] = [({}, None)]


def local_ranks(asked: int | None, gpus: int, each: int = 1, *, replica: int = 1) -> tuple[int, str]:
    """How many ranks to start on this machine, and the reason: as the mesh asks, else `each` per GPU, else one replica's.

    asked: the ranks of the mesh; None where mesh.replicate is null.  gpus: those of this machine.  each: ranks per GPU.
    replica: the ranks of all axes but replicate.
    ValueError: the machine has GPUs, but too few, or far fewer cores than ranks.
    """
    share = "one" if each == 1 else str(each)
    if asked is None and gpus * each >= replica:
        used, all_of = gpus * each // replica * replica, gpus * each
        left_out = f", and {all_of - used} left out, since replicas have {replica} ranks" if used < all_of else ""
        return used, f"{used} {_ranks(used)}: {share} per GPU{left_out}"
    if asked is None and replica == 1:
        return 1, "1 rank: no GPU here; mesh.replicate=N starts N CPU ranks"
    asked = asked or replica
    if 0 < gpus * each < asked:
        raise ValueError(
            f"the mesh asks for {asked} ranks and this machine has {gpus} {'GPU' if gpus == 1 else 'GPUs'}, for {share} "
            f"{_ranks(each)} each; set mesh.replicate so that all axes together make {gpus * each}, start on more machines "
            f"(torchrun, srun), hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU, or let {-(-asked // gpus)} ranks "
            f"share a GPU, which is slow (WIDEFIELD_RANKS_PER_GPU={-(-asked // gpus)})"
        )
    return asked, f"{asked} {_ranks(asked)}: as the mesh asks{'' if gpus else _crowded(asked)}"


def _crowded(asked: int) -> str:
    """A warning where CPU ranks share cores, else "".  ValueError: more of them than RANKS_PER_CORE allows."""
    cores, most = _cores(), os.environ.get(RANKS_PER_CORE, str(RANKS_PER_CORE_MOST))
    if not (most.isdecimal() and int(most)):
        raise ValueError(f"{RANKS_PER_CORE}={most!r} is no count; set it to a whole number, 1 or more, or leave it out")
    if asked > cores * int(most):
        raise ValueError(
            f"the mesh asks for {asked} ranks and this machine has no GPU and {cores} {'core' if cores == 1 else 'cores'}; at "
            f"most {int(most)} ranks per core are started, since each takes some 300 MB of memory and its share of a core. Set "
            f"mesh.replicate so that all axes together make at most {cores * int(most)}, start on more machines (torchrun, "
            f"srun), or set {RANKS_PER_CORE}={-(-asked // cores)}"
        )
    if asked <= cores:
        return ""
    return f"; warning: they share {cores} {'core' if cores == 1 else 'cores'}, so more ranks are no faster than {cores}"


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def start(
    ranks: int,
    arguments: list[str],
    *,
    grace_seconds: float = 300.0,
    program: list[str] | None = None,
    forked: Forking | None = None,
) -> int:
    """Run `widefield` with `arguments` on `ranks` ranks of this machine; returns the exit status for the command.

    It is 0 where all ranks succeeded; else the exit code of the failed rank, or 128 + the signal that killed it, with one
    sentence on stderr; 130 after Ctrl-C and 143 after SIGTERM where the ranks then ended normally.
    grace_seconds: how long the ranks may take to save after the first signal; a second one kills them at once.
    program: the command to run in place of `python -m widefield`.
    forked: the process to fork the ranks from, in place of starting Python for each.
    OMP_NUM_THREADS is set to the ranks' share of the cores, unless it is set.  Call it in the main thread: it handles signals.
    On Linux no process of the ranks outlives this call, not even one in a session of its own.
    """
    from widefield.comm.meeting import host_of_meeting

    group = _RankProcesses(forked.run_id if forked else new_run_id(), grace_seconds)
    store = host_of_meeting()  # it serves as long as it lives
    environments = _environments(ranks, group.run_id, store.host, store.port)
    with environment_of_ranks(ranks), _signals_to(group.on_signal):
        try:
            if forked:
                _fork_each(forked, arguments, group, environments)
            else:
                _start_each([*(program or [*python_of_ranks(), "-m", "widefield"]), *arguments], group, environments)
            if not group.verdict:
                group.watch()
        finally:
            group.kill()
    if group.verdict:
        print(f"widefield: {group.verdict}", file=sys.stderr, flush=True)
    return group.status


def new_run_id() -> str:
    """What the environment of all processes of one start names, so that none is left behind."""
    return f"widefield-{uuid.uuid4().hex}"


def python_of_ranks() -> list[str]:
    """The command to start Python on ranks, with `-P`, so that a torch.py in the current folder does not hide torch.

    Where widefield itself is imported from that folder, as in a checkout that is not installed, it is without.
    """
    package = Path(__file__).parents[1]
    return [sys.executable, *([] if package.parent == Path.cwd() else ["-P"])]


# ------------------------------------------------------------------------------------------------ endings


class _RankProcesses:
    """The processes of the ranks, the signal that asked them to end, and how they ended."""

    def __init__(self, run_id: str, grace_seconds: float) -> None:
        self.run_id = run_id
        self.grace_seconds = grace_seconds
        self.processes: dict[int, RankProcess] = {}
        self.received: signal.Signals | None = None
        self.ended_at_once = False
        self.expected: tuple[int, ...] = (0,)
        """The exit codes of ranks that have not failed."""
        self.status = 0
        self.verdict = ""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
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
                return None
            time.sleep(POLL_SECONDS)

    def running(self) -> list[int]:
        """The ranks that are still running."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def all_succeeded(self) -> bool:
        return all(process.poll() == 0 for process in self.processes.values())

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
        return {rank: code for rank, code in ended.items() if code not in self.expected}

    def _blame(self, codes: dict[int, int]) -> None:
        if codes:
            rank = min(codes, key=lambda rank: (codes[rank] > 0 or codes[rank] == -signal.SIGABRT, rank))
            self.status, self.verdict = _verdict(f"rank {rank}", codes[rank])

    def end_after_signal(self, received: signal.Signals) -> None:
        """Pass the signal on and wait for the ranks to save and end, unless one of them fails."""
        name = _name(received)
        text = f"{name}: the ranks save and end, in {self.grace_seconds:.0f} s at most; a second signal ends them at once"
        print(f"widefield: {text}", file=sys.stderr, flush=True)
        passed_on = signal.SIGINT if received == signal.SIGINT else signal.SIGTERM  # ranks save on both
        self.expected = (0, 128 + received, 128 + passed_on, -passed_on)
        self.status = 128 + received
        self.send(passed_on)
        self.wait(self.grace_seconds, unless=lambda: not self.ended_at_once and self.has_failure())
        if self.ended_at_once or self.has_failure():
            self.end_after_failure()
        elif late := self.running():
            self.status = 128 + signal.SIGKILL
            self.verdict = f"rank {late[0]} had not ended {self.grace_seconds:.0f} s after {name} and was killed"

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
        """SIGKILL the ranks and, on Linux, all processes with their run's id in the environment, as a dead rank's workers."""
        self.send(signal.SIGKILL)
        for _ in range(20):  # a process may fork while we search, and a killed one takes a moment to disappear
            left = _processes_of(self.run_id)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(POLL_SECONDS)
        self.wait(OWN_END_SECONDS)  # poll the killed ranks, so that they are no zombies


def _verdict(who: str, code: int) -> tuple[int, str]:
    """The exit status for a process that failed, and a sentence.  code: as of Popen, negative for a signal."""
    if code > 0:
        return code, f"{who} ended with exit code {code}; its message is above"
    hints = {signal.SIGKILL: "; the machine may be out of memory", signal.SIGABRT: "; its message is above"}
    number = signal.Signals(-code)
    return 128 - code, f"{who} was killed by {number.name}{hints.get(number, '')}"


def _name(number: signal.Signals) -> str:
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


# ------------------------------------------------------------------------------------------------ starting


def _start_each(command: list[str], group: _RankProcesses, environments: list[dict[str, str]]) -> None:
    """Start `command` once per environment, each in a session of its own.  OSError: it cannot be started."""
    for rank, environment in enumerate(environments):
        group.processes[rank] = Popen(command, env={**os.environ, **environment}, start_new_session=True)


def _fork_each(forked: Forking, arguments: list[str], group: _RankProcesses, environments: list[dict[str, str]]) -> None:
    """Fork the ranks, and return when they have begun, or at a signal, or when the process that was to fork them has ended."""
    forked.fork(arguments, environments)
    while True:
        stopped = group.received  # asked first: a rank that has heard of it has begun by now
        code = forked.poll()  # likewise: what has ended by now has reported by now
        group.processes = forked.begun()
        if len(group.processes) == len(environments):
            return
        if code is not None:
            group.status, group.verdict = _verdict("the process that forks ranks", code or 1)
            return
        if stopped is not None:
            group.status, group.verdict = 128 + stopped, f"{_name(stopped)}: ended before the ranks had begun"
            return
        time.sleep(POLL_SECONDS / 5)


def _environments(ranks: int, run_id: str, address: str, port: int) -> list[dict[str, str]]:
    """What torchrun sets for each of the ranks of one machine.  address, port: of the store at which they meet."""
    shared = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default", "MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }  # fmt: skip
    own = [{"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, **shared} for rank in range(ranks)]
    return [{name: str(value) for name, value in one.items()} for one in own]


# ------------------------------------------------------------------------------------------------ surroundings


@contextlib.contextmanager
def environment_of_ranks(ranks: int) -> Iterator[None]:
    """Set the environment variables that the ranks inherit, and restore them afterwards."""
    wanted = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // ranks))}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals that stop a program by `handler`; those that were ignored, as SIGHUP under nohup, stay ignored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handled = [number for number, action in before.items() if action is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
