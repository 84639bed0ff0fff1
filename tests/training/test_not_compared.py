"""Does a run say that its first steps are not compared, where torch has no hooks for it?"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from command import DIGITS, record
from ranks import on_ranks

from widefield.comm import fingerprints
from widefield.comm.mesh import Mesh
from widefield.config import read_config
from widefield.run import train


@pytest.mark.long
def test_a_run_whose_first_steps_are_not_compared_says_so_once_at_its_beginning(tmp_path):
    """torch below 2.14 has no hooks."""
    assert on_ranks(2, trained, tmp_path / "run") == ["complete"] * 2
    (start,) = record(tmp_path / "run", "start")
    (said,) = [reason for reason in start["reasons"] if reason.startswith("watch: ")]
    assert said.startswith(
        f"watch: the messages of the first steps are not compared, for which torch {torch.__version__} has no"
    )


def trained(mesh: Mesh, folder: Path) -> str:
    settings = ["mesh.replicate=2", "schedule.length=1step", "schedule.warmup=0step", "log.tensorboard=false", "data.workers=0"]
    with mock.patch.object(fingerprints, "is_possible", lambda group: False):
        return train(read_config(DIGITS, settings), folder, mesh.world).reason


def test_nothing_is_said_where_they_are_compared_or_there_is_one_rank():
    has_hooks = mock.Mock(spec=["register_pre_hook"])
    assert fingerprints.why_not_compared(None) == fingerprints.why_not_compared(has_hooks) == []
    assert len(fingerprints.why_not_compared(mock.Mock(spec=[]))) == 1
