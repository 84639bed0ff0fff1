"""A rank that is asked to stop while it waits for the others ends at once, since there is nothing to save yet."""

from __future__ import annotations

import os
import signal
import socket
import time

import command
import pytest

pytestmark = pytest.mark.alone


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_a_rank_that_waits_for_the_others_ends_at_once(tmp_path):
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = command.start(
        "train", command.DIGITS, "mesh.replicate=2", "--run", tmp_path, env={**os.environ, **place, "MASTER_PORT": str(port)}
    )
    try:
        deadline = time.monotonic() + 120
        while not listens(port):
            assert time.monotonic() < deadline and process.poll() is None, "rank 0 does not serve the rendezvous"
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
