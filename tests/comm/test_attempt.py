"""May a rank give up work in the middle, and do all go on then?"""

from __future__ import annotations

import pytest
import torch
from ranks import RankFailed, on_ranks

from widefield.comm.attempt import attempt
from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.plans import Plan


def reason(error: Exception) -> str | None:
    return "full" if isinstance(error, MemoryError) else None


def add_up(mesh: Mesh, *, fails: int | None = None, error: type[Exception] = MemoryError) -> float:
    mesh.sum_(torch.ones(1))
    if mesh.rank == fails:
        raise error("on this rank")
    for _ in range(3):
        total = mesh.sum_(torch.ones(1)).item()
    return total + mesh.rank


def attempts(mesh: Mesh) -> list:
    """All succeed, rank 1 gives up, rank 0 does, all have a problem, all succeed; and the groups of the run afterwards."""
    told: list = [attempt(mesh, lambda own, fails=fails: add_up(own, fails=fails), gives_up=reason) for fails in (None, 1, 0)]
    try:
        attempt(mesh, lambda own: own.agree("of all"), gives_up=reason)
    except AgreedError as error:
        told.append(str(error))
    return [*told, attempt(mesh, add_up, gives_up=reason), mesh.sum_(torch.ones(1)).item()]


@pytest.mark.long
def test_ranks_that_wait_for_one_that_gave_up_hear_its_reason_and_all_go_on():
    fine = ([2.0, 3.0], None)
    for told in on_ranks(2, attempts):
        assert told == [fine, ([], "full"), ([], "full"), "rank 0: of all", fine, 2.0]


def another_error(mesh: Mesh) -> None:
    attempt(mesh, lambda own: add_up(own, fails=1, error=KeyError), gives_up=reason)


@pytest.mark.long
def test_another_error_is_raised_where_it_is():
    with pytest.raises(RankFailed, match="rank 1 of 2:(.|\n)*KeyError: 'on this rank'"):
        on_ranks(2, another_error, timeout_seconds=30)


def test_one_rank_alone_gives_up_too():
    alone = Mesh(Plan(), World(), torch.device("cpu"))
    assert attempt(alone, lambda own: 3, gives_up=reason) == ([3], None)
    assert attempt(alone, lambda own: add_up(own, fails=0), gives_up=reason) == ([], "full")
