"""A connection to a machine that is gone ends with an error, within LOST_AFTER seconds.

A killed process closes its connections, and its peers hear of it at once.  A machine without power, or behind a cut cable,
closes nothing: those that wait for its messages, or for an answer of the rendezvous store, would wait for the whole timeout
of a collective, or without end.  So the kernel is told to ask on all connections between ranks whether the other side is
still there (TCP_KEEPALIVE), and not to wait longer for what it has sent to be received (TCP_USER_TIMEOUT).  Kernels answer
each other, so a rank that is busy or stopped is not taken for lost.  NCCL's own connections are not among them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

LOST_AFTER = "WIDEFIELD_LOST_AFTER"
"""The environment variable with the seconds after which a machine that does not answer counts as lost."""
LOST_AFTER_SECONDS = 60
"""That number where the variable is not set: switches that fail over take some ten."""
PROBES = 4
"""Questions within that time, of which one must be answered."""


def lost_after_seconds() -> int:
    """ValueError: LOST_AFTER is no whole number of at least PROBES."""
    text = os.environ.get(LOST_AFTER, str(LOST_AFTER_SECONDS))
    if not (text.isascii() and text.isdecimal() and int(text) >= PROBES):
        raise ValueError(
            f"{LOST_AFTER}={text!r} is no number of seconds; set it to a whole number, {PROBES} or more, or leave it out"
        )
    return int(text)


@contextlib.contextmanager
def asking_whether_alive() -> Iterator[None]:
    """The connections of this process that are made inside end with an error where the other side is gone.

    ValueError: see lost_after_seconds.  Where there is no /proc, nothing is set.
    """
    seconds, before = lost_after_seconds(), _sockets()
    yield
    for number, file in _sockets().items():
        if number not in before:
            _ask_on(file, seconds)


def _sockets() -> dict[int, int]:
    """The open sockets of this process: the kernel's number of each, and its file."""
    found = {}
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile
            number = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            if number:
                found[int(number[1])] = int(entry.name)
    return found


def _ask_on(file: int, seconds: int) -> None:
    """Set the options on a connected TCP socket; others are left as they are."""
    try:
        connection = socket.socket(fileno=os.dup(file))
    except OSError:  # closed meanwhile
        return
    with connection, contextlib.suppress(OSError):
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        connection.getpeername()  # OSError: it listens
        each = seconds // PROBES
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES - 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
