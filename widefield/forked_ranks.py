"""The process that local ranks are forked from: `python -m widefield.forked_ranks FORMAT PIPE`, see launchers/_forking.py.

It loads what a rank loads, waits for the order, forks, and reports how each rank ended.  Signals that stop a run are blocked in
it from its first line on, so it lives as long as its ranks; a rank unblocks them once it has its own session.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from typing import Any

import numpy

from widefield import naming
from widefield.__main__ import entry, forget_the_folder
from widefield.launchers.local import STOP_SIGNALS

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main() -> bool:
    """Fork the ranks and wait for them.  True in a rank, which has yet to run the command; False in the parent, at its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the launcher: ranks watch their parent
    data, reports = sys.argv[1], int(sys.argv[2])
    forget_the_folder()
    load_all_of(data)
    gc.collect()
    gc.freeze()  # else the ranks' collectors would write to, and so copy, every page that they share
    while line := sys.stdin.readline():  # "": the launcher has ended, or wants no more ranks
        if _forked(json.loads(line), reports):
            return True
    return False


def _forked(order: dict[str, Any], reports: int) -> bool:
    """Fork the ranks of an order and wait for them.  True in a rank."""
    ranks, number = {}, order["order"]
    for rank, environment in enumerate(order["environments"]):
        pid = os.fork()
        if pid == 0:
            os.close(reports)
            _become_rank(rank, order["arguments"], environment)
            return True
        ranks[pid] = rank
        _report(reports, order=number, rank=rank, pid=pid)
    while ranks:
        pid, status = os.waitpid(-1, 0)
        if pid in ranks:
            _report(reports, order=number, rank=ranks.pop(pid), code=os.waitstatus_to_exitcode(status))
    return False


def load_all_of(data: str) -> None:
    """Import what a rank needs whose recipe has this data.name."""
    import torch
    import torchvision  # noqa: F401

    import widefield.cli.train
    import widefield.run  # noqa: F401

    torch.compiler.disable(lambda: None)  # as the first optimizer does: imports torch's compiler, which takes a second
    naming.load_all("widefield.launchers")
    naming.load_all("widefield.parallel.strategies")
    if data in naming.names_in("widefield.data.formats"):
        getattr(naming.load("widefield.data.formats", data), "load_libraries", lambda: None)()


def _report(pipe: int, **report: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher was killed
        os.write(pipe, json.dumps(report).encode() + b"\n")


def _become_rank(rank: int, arguments: list[str], environment: dict[str, str]) -> None:
    """Make of this process, a moment after the fork, what Popen would have started, but for what is loaded."""
    os.setsid()
    os.environ.update(environment)
    sys.argv = ["widefield", *arguments]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    numpy.random.seed()  # else all ranks would draw the same; Python's own `random` sees to that itself
    _prctl(PR_SET_NAME, f"widefield-{rank}".encode())  # what ps and top call it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__" and main():
    entry()
