import os
import time

import pytest
import torch
from ranks import RankFailed, on_ranks

pytestmark = pytest.mark.alone


def sums(mesh, addend):
    return mesh.sum_(torch.tensor([float(mesh.rank + addend)])), os.getpid(), mesh.plan.replicate


def fails_on_rank_one(mesh):
    if mesh.rank == 1:
        raise KeyError("no such pixel")
    mesh.sum_(torch.ones(1))


def hangs(mesh):
    if mesh.rank == 1:
        time.sleep(60)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bodies_get_a_mesh_and_ranks_are_kept(size):
    first, again = on_ranks(size, sums, 1), on_ranks(size, sums, 1)
    assert [r[0].item() for r in first] == [size * (size + 1) / 2] * size
    assert [r[1] for r in first] == [r[1] for r in again]


def test_the_failing_rank_is_shown_and_the_next_call_runs():
    with pytest.raises(RankFailed, match="rank 1 of 2(?s:.*)no such pixel"):
        on_ranks(2, fails_on_rank_one)
    assert len(on_ranks(2, sums, 0)) == 2


def test_a_hang_shows_where():
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 gave no answer within 2 s(?s:.*)in hangs"):
        on_ranks(2, hangs, timeout_seconds=2)
