"""Starts ranks on this machine, watches them, and leaves no process behind.

`start` gives ranks torchrun's variables, and hosts the store at which they meet on a free port.  It is no agent of torchrun's,
which waits 30 s for a rank that hangs after another's crash, leaves orphans when a second signal comes meanwhile, and cannot
fork a rank from a process that has loaded torch (_forking.py).  How ranks end is in _rank_processes.py, when they start again
in _restarting.py.

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

from widefield.comm.world import CAME_BACK
from widefield.cores import usable_cores
from widefield.launchers._forking import Forking, RankProcess
from widefield.launchers._rank_processes import POLL_SECONDS, RankProcesses, name_of, verdict
from widefield.launchers._restarting import Again, Restarts
from widefield.launchers._scratch import OURS, remove_folders
from widefield.refusal import TO_BE_CONTINUED

if TYPE_CHECKING:
    from widefield.comm.mesh import World

PRIORITY = 90

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""SIGUSR1 is how Slurm warns that a job's time is nearly over."""
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
    cores, most = usable_cores(), os.environ.get(RANKS_PER_CORE, str(RANKS_PER_CORE_MOST))
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


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def start(
    ranks: int,
    arguments: list[str],
    *,
    grace_seconds: float = 300.0,
    program: list[str] | None = None,
    forked: Forking | None = None,
    restarts: Restarts | None = None,
    may_be_lost: int = 0,
) -> int:
    """Run `widefield` with `arguments` on `ranks` ranks of this machine; returns the exit status for the command.

    It is 0 where all ranks succeeded; else the exit code of the failed rank, or 128 + the signal that killed it, and a sentence
    on stderr; TO_BE_CONTINUED where ranks that were asked to stop say so; 130 after Ctrl-C, 128 + the signal they ended of.
    grace_seconds: how long the ranks may take to save after the first signal; a second one kills them at once.
    program: the command to run in place of `python -m widefield`.
    forked: the process to fork the ranks from, in place of starting Python for each.
    restarts: whether and how to start again after a failure; None: never.
    may_be_lost: how many of the first ranks the others go on without, where a signal killed them.
    OMP_NUM_THREADS is set to the ranks' share of the cores, unless it is set.  Call it in the main thread: it handles signals.
    On Linux no process of the ranks outlives this call, not even one in a session of its own.
    """
    run_id, again = forked.run_id if forked else new_run_id(), Again(ranks, arguments)
    command = program or [*python_of_ranks(), "-m", "widefield"]
    group = RankProcesses(run_id, grace_seconds, may_be_lost)
    with _signals_to(lambda number, frame: group.on_signal(number)):
        while True:
            began = time.time()
            _run(again, group, command, forked, restarts)
            if group.verdict:
                print(f"widefield: {group.verdict}", file=sys.stderr, flush=True)
            if restarts is None or not group.verdict or group.received is not None:
                return group.status
            found = restarts.after(group.status, group.verdict, ranks=again.ranks, since=began)
            print(f"widefield: {restarts.told}", file=sys.stderr, flush=True)
            if found is None:
                return group.status
            before, again, group = group, found, RankProcesses(run_id, grace_seconds, may_be_lost)
            if before.received is not None:  # a signal that came since the ranks have ended
                return 128 + before.received if before.received == signal.SIGINT else TO_BE_CONTINUED


def _run(
    what: Again, group: RankProcesses, command: list[str], forked: Forking | None, restarts: Restarts | None
) -> None:  # fmt: skip
    """Start ranks and return when they have ended; `group` has how."""
    from widefield.comm.meeting import host_of_meeting

    told = restarts.environment if restarts else {}

    if forked is not None and forked.poll() is not None and group.received is None and told:
        forked.renew()
    group.spared = forked.pid if forked else None
    store = host_of_meeting()  # it serves as long as it lives
    environments = [{**one, **told} for one in _environments(what.ranks, group.run_id, store.host, store.port)]
    whole = [*command, *what.arguments]

    def revive(rank: int, verdict: str) -> RankProcess | None:
        if restarts is None or not restarts.takes_back or not restarts.one(verdict):
            return None
        print(f"widefield: {restarts.told}", file=sys.stderr, flush=True)
        return Popen(whole, env={**os.environ, **environments[rank], CAME_BACK: "1"}, start_new_session=True)

    group.revive = revive
    with environment_of_ranks(what.ranks):
        try:
            if forked:
                _fork_each(forked, what.arguments, group, environments)
            else:
                _start_each(whole, group, environments)
            if not group.verdict:
                group.watch()
        finally:
            group.kill()
            remove_folders(group.run_id)


def new_run_id() -> str:
    """What the environment of all processes of one start names, so that none is left behind."""
    return f"{OURS}{uuid.uuid4().hex}"


def python_of_ranks() -> list[str]:
    """The command to start Python on ranks, with `-P`, so that a torch.py in the current folder does not hide torch.

    Where widefield itself is imported from that folder, as in a checkout that is not installed, it is without.
    """
    package = Path(__file__).parents[1]
    return [sys.executable, *([] if package.parent == Path.cwd() else ["-P"])]


# ------------------------------------------------------------------------------------------------ starting


def _start_each(command: list[str], group: RankProcesses, environments: list[dict[str, str]]) -> None:
    """Start `command` once per environment, each in a session of its own.  OSError: it cannot be started."""
    for rank, environment in enumerate(environments):
        group.processes[rank] = Popen(command, env={**os.environ, **environment}, start_new_session=True)


def _fork_each(forked: Forking, arguments: list[str], group: RankProcesses, environments: list[dict[str, str]]) -> None:
    """Fork the ranks, and return when they have begun, or at a signal, or when the process that was to fork them has ended."""
    forked.fork(arguments, environments)
    while True:
        stopped = group.received  # asked first: a rank that has heard of it has begun by now
        code = forked.poll()  # likewise: what has ended by now has reported by now
        group.processes = forked.begun()
        if len(group.processes) == len(environments):
            return
        if code is not None:
            group.status, group.verdict = verdict("the process that forks ranks", code or 1)
            return
        if stopped is not None:
            group.status, group.verdict = 128 + stopped, f"{name_of(stopped)}: ended before the ranks had begun"
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
    wanted = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // ranks))}
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
