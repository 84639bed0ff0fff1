"""Ranks whose launcher was killed remove their folders for temporary files themselves."""

from __future__ import annotations

import os
import socket

import command
import pytest


@pytest.mark.long
def test_ranks_remove_their_folders_without_a_launcher(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    (tmp_path / "temporary").mkdir()
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCHELASTIC_RUN_ID": "widefield-0123456789ab", "TMPDIR": str(tmp_path / "temporary")}  # fmt: skip
    words = (
        "train",
        command.DIGITS,
        "mesh.replicate=2",
        "schedule.length=1step",
        "schedule.warmup=0step",
        "--run",
        tmp_path / "run",
    )
    ranks = [command.start(*words, env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    told = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], told
    assert list((tmp_path / "temporary").glob("wf-*")) == []
