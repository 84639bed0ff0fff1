"""Commands forked from a process that has loaded what they load, which takes each five seconds of a core otherwise.

`PreloadedCommand` is the Popen of `python -m widefield ...` with its output in a pipe, but for the loading: a test process
starts this file once, and that process forks a command per request.  What a command forks its ranks from is forked of the
command likewise.  All else is as the product does it.  `may_be_forked` says which commands are to be started anew instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

READ_AT_LOADING = re.compile(r"PYTHON(?!PATH)|(LD_PRELOAD|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|RANK|WORLD_SIZE|LOCAL_RANK)$")
"""Names of variables that count before a fork could set them, of those that tests set.  Libraries set further ones themselves,
as sklearn does KMP_INIT_AT_FORK and torch TORCHINDUCTOR_CACHE_DIR, and a test process may have loaded them."""

AT_START = dict(os.environ)
"""Before any test has changed it."""


# ---------------------------------------------------------------------------------------------- in the test's process


def may_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether what is loaded in the tests' environment is what a command in this one would have."""
    from widefield.launchers._forking import may_fork

    ours, its = ({name: value for name, value in one.items() if READ_AT_LOADING.match(name)} for one in (AT_START, environment))
    return may_fork() and ours == its


class PreloadedCommand:
    """What tests use of a Popen with stdout and stderr in one pipe, as text."""

    def __init__(self, arguments: Sequence[str], *, cwd: str | Path | None, env: Mapping[str, str]) -> None:
        self.args, self.returncode = ["widefield", *arguments], None
        reader, writer = os.pipe()
        self.stdout = open(reader, encoding="utf-8")
        self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": arguments, "cwd": os.path.abspath(cwd or "."), "environment": dict(env)}
        socket.send_fds(_server(), [json.dumps(request).encode()], [writer, theirs.fileno()])
        os.close(writer)
        theirs.close()
        self.pid = self._number()

    def _number(self) -> int:
        told = self._told.recv(64)
        assert told, f"the process that commands are forked from has ended before {self.args} has"
        return int(told)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self._told.close()
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, None]:
        deadline, parts, pipe = time.monotonic() + (timeout or 1e9), [], self.stdout.fileno()
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            parts.append(os.read(pipe, 1 << 16))
            if not parts[-1]:
                self.wait(max(0.0, deadline - time.monotonic()))
                self.stdout.close()
                return io.IncrementalNewlineDecoder(None, translate=True).decode(b"".join(parts).decode(), final=True), None
        raise subprocess.TimeoutExpired(self.args, timeout or 0.0, b"".join(parts))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> socket.socket:
    """Where to send requests of this test process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=AT_START, pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # before
    return ours


# ---------------------------------------------------------------------------------------------- in the process that forks


def serve(requests: socket.socket) -> bool:
    """Fork a command per request.  True in a command; False here, once the tests have ended."""
    commands = selectors.DefaultSelector()
    commands.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in commands.select():
            if key.fileobj is not requests:
                _tell_end(commands, key.fd, *key.data)
                continue
            text, handles, *_ = socket.recv_fds(requests, 1 << 20, 2)
            if not text:
                return False
            teller = socket.socket(fileno=handles[1])
            pid = os.fork()
            if pid == 0:
                _become_command(json.loads(text), handles[0], [requests, teller], commands)
                return True
            os.close(handles[0])
            _tell(teller, pid)
            commands.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, teller))


def _tell_end(commands: selectors.BaseSelector, handle: int, pid: int, teller: socket.socket) -> None:
    """handle: of the process that has ended."""
    commands.unregister(handle)
    os.close(handle)
    _tell(teller, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    teller.close()


def _tell(teller: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        teller.send(b"%d" % number)


def _become_command(
    request: dict[str, Any], output: int, sockets: list[socket.socket], commands: selectors.BaseSelector
) -> None:
    """Make of this process, a moment after the fork, what Popen would have started, but for what is loaded."""
    for key in list(commands.get_map().values()):
        if key.data:
            os.close(key.fd)
            key.data[1].close()
    commands.close()
    for one in sockets:
        one.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    _set_environment(request["environment"])
    sys.argv = ["widefield", *request["arguments"]]

    import numpy

    from widefield.launchers import _forking

    numpy.random.seed()
    _forking.Popen = _popen_by_fork  # type: ignore[misc, assignment]


def _set_environment(environment: Mapping[str, str]) -> None:
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [*places, *(place for place in sys.path if place not in before and place not in places)]
    tempfile.tempdir = None


# ---------------------------------------------------------------------------------------------- in a command


def _popen_by_fork(words: list[str], **options: Any) -> subprocess.Popen[bytes] | _ForksRanks:
    """For `widefield.forked_ranks`: a fork of this process, unless it has threads, whose locks a fork would never open."""
    if len(os.listdir("/proc/self/task")) > 1:
        return subprocess.Popen(words, **options)
    return _ForksRanks(words, options["pass_fds"], options["env"])


class _ForksRanks:
    """What the launcher uses of the Popen of `python -m widefield.forked_ranks FORMAT PIPE`."""

    def __init__(self, words: list[str], pass_fds: Sequence[int], environment: Mapping[str, str]) -> None:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid, self._code = os.fork(), None
        if self.pid == 0:
            os.dup2(reader, 0)
            _become_parent_of_ranks(words, pass_fds, environment)
        os.close(reader)
        self.stdin = open(writer, "wb")

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, flags: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, flags)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_parent_of_ranks(words: list[str], pass_fds: Sequence[int], environment: Mapping[str, str]) -> NoReturn:
    """Be that process, and then a rank, deep in the stack of the command that this was a moment ago."""
    status: Any = 1
    try:
        os.setsid()
        for first, end in zip([3, *(one + 1 for one in sorted(pass_fds))], [*sorted(pass_fds), 1 << 16], strict=True):
            os.closerange(first, end)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # a signal that is ignored stays so
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _set_environment(environment)
        if threads := environment.get("OMP_NUM_THREADS"):
            import torch

            torch.set_num_threads(int(threads))  # the launcher may have set that for ranks; who loads torch then, has so many
        sys.argv, sys.stdin = words[words.index("widefield.forked_ranks") :], open(0, closefd=False)

        from widefield import forked_ranks

        if forked_ranks.main():
            forked_ranks.entry()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # in place of this folder, which no command has there
    from widefield.forked_ranks import load_all_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal
    load_all_of("digits")
    gc.collect()
    gc.freeze()  # else the commands' collectors would write to, and so copy, every page that they share
    if serve(socket.socket(fileno=int(sys.argv[1]))):
        from widefield.__main__ import entry

        entry()
