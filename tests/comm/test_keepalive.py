"""Connections between ranks end with an error where the other machine is gone."""

from __future__ import annotations

import socket

import pytest

from widefield.comm.keepalive import LOST_AFTER, asking_whether_alive, lost_after_seconds


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listener of this machine, and both ends of a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    return listener, near, listener.accept()[0]


def asks(one: socket.socket) -> tuple[bool, int, int]:
    """Whether it asks, after how many idle seconds, and after how many milliseconds what is sent must be received."""
    idle = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)), idle, one.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    )  # fmt: skip


def test_connections_made_inside_ask_and_those_of_before_do_not(monkeypatch):
    monkeypatch.setenv(LOST_AFTER, "20")
    before = connected()
    unbound = asks(before[1])
    with asking_whether_alive():
        inside = connected()
        pair = socket.socketpair()  # no TCP: left as it is
    try:
        assert [asks(one) for one in inside[1:]] == [(True, 5, 20_000)] * 2
        assert [asks(one) for one in (*before, inside[0])] == [unbound] * 4 and not unbound[0]
    finally:
        for one in (*before, *inside, *pair):
            one.close()


@pytest.mark.parametrize("text", ["", "soon", "3", "-5", "2.5"])
def test_what_is_no_number_of_seconds_is_refused(text, monkeypatch):
    monkeypatch.setenv(LOST_AFTER, text)
    with pytest.raises(ValueError, match=f"{LOST_AFTER}='{text}' is no number of seconds; set it to a whole number, 4 or more"):
        lost_after_seconds()
