"""A step that does not end: rank 0 names the ranks that are missing, and where they are."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.distributed_c10d import _get_default_store

from widefield.comm import stall_watch
from widefield.comm.stall_watch import StallWatch
from widefield.comm.stand import Stand
from widefield.comm.verdict import missing, sentence

pytestmark = pytest.mark.alone


def stand(beat: int = 1, step: int = 4, begun: int = 9, *, waits: bool = True) -> Stand:
    return Stand(beat, step, begun, "net.py:3 in forward", waits)


@pytest.mark.parametrize(
    ("found", "frozen", "late"),
    [
        ({0: stand(), 1: stand(begun=8, waits=False)}, [], [1]),
        ({0: stand(step=3), 1: stand(begun=2)}, [], [0]),
        ({0: stand(), 1: stand(), 2: stand(waits=False)}, [], [2]),  # messages between two ranks are not counted
        ({0: stand(), 1: stand()}, [], []),
        ({0: stand(waits=False), 1: stand(waits=False)}, [], []),
        ({0: stand()}, [], [1]),  # it has never told
        ({0: stand(), 1: stand(), 2: stand(begun=8)}, [1], [1]),
    ],
)
def test_the_ranks_behind_are_the_missing_ones(found, frozen, late):
    assert missing(found, ranks=max(2, len(found)), frozen=frozen) == late


def test_the_sentence_names_them_and_says_where_they_are():
    text = sentence({0: stand(), 1: stand(begun=8)}, ranks=3, frozen=[], seconds=61.2, longest=0.4)
    assert text.startswith("step 5 has not ended after 61 s (the longest before it took 0.4 s). 1 of 3 ranks has not arrived: ")
    assert "rank 2 has not reported yet. The others wait: rank 0 is at net.py:3 in forward" in text
    frozen = sentence({0: stand(), 1: stand()}, ranks=2, frozen=[1], seconds=61, longest=0)
    assert "rank 1 does not answer; it was last seen at net.py:3 in forward" in frozen and "longest" not in frozen
    alike = sentence({0: stand(), 1: stand()}, ranks=2, frozen=[], seconds=61, longest=0)
    assert "No rank is behind the others: rank 0 is at net.py:3 in forward; rank 1" in alike


def test_a_rank_that_sleeps_is_named_and_one_that_is_slow_alike_is_not():
    said = on_ranks(3, _one_sleeps)
    assert said[0] and said[1:] == [[], []]
    assert all("step 3 has not ended after" in text for text in said[0])
    assert "1 of 3 ranks has not arrived: rank 1 is at " in said[0][0]
    assert (
        "test_stall_watch.py" in said[0][0]
        and "in _sleep" in said[0][0]
        and "The others wait: rank 0 waits in all_reduce (Float [3])" in said[0][0]
    )


def _one_sleeps(mesh) -> list[str]:
    """Three steps of an all-reduce each; before the third one's, rank 1 sleeps until rank 0 has said so."""
    said: list[str] = []
    at: list = [0, None]
    store = dist.PrefixStore("test", _get_default_store())
    if mesh.rank < 2:  # what two ranks said to each other before is nobody's lateness
        dist.send(torch.ones(1), dst=1) if mesh.rank == 0 else dist.recv(torch.ones(1), src=0)

    def warn(text: str) -> None:
        said.append(text)
        store.set("said", "")

    with StallWatch(mesh, seconds=0.3, at=lambda: (at[0], at[1]), warn=warn):
        mesh.barrier()  # a step of ranks that begin at different times would be the longest
        for step in range(3):
            at[:] = [step, time.perf_counter()]
            if step == 2 and mesh.rank == 1:
                _sleep(store)
            dist.all_reduce(torch.ones(3), group=mesh.group)
            at[:] = [step + 1, None]
        time.sleep(0.2)  # between two steps nobody is late
    assert not any(thread.name == "widefield stall watch" for thread in threading.enumerate())
    return said


def _sleep(store: dist.Store) -> None:
    deadline = time.monotonic() + 60
    while not store.check(["said"]) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.long
def test_a_rank_that_runs_on_in_a_step_without_an_end_is_named_and_one_whose_passes_go_on_is_not():
    """It loops in Python, so its line changes; the other waits for it.  It may do so for (1 + SPINS) x 2 s."""
    told = on_ranks(2, _one_spins)
    (text,) = told[0][0] + told[1][0]
    assert text.startswith("nothing has brought step 1 on for ") and "no message and no pass, though a rank runs on" in text
    assert "1 of 2 ranks has not arrived: rank 1 is at " in text and "in _spin" in text
    assert [seconds > 2 * 2.0 for _, seconds in told] == [True, True]


def _one_spins(mesh) -> tuple[list[str], float]:
    """What is said where the run would be ended, and for how long nobody had said it; before, passes go on as long."""
    stall_watch.SPINS = 1
    ended: list[str] = []
    at: list = [0, None]
    passes = [0]
    store = dist.PrefixStore("test", _get_default_store().clone())

    def end(text: str, culprits: list[int]) -> None:
        ended.append(text)
        store.set("ended", "")

    with StallWatch(
        mesh, seconds=60, at=lambda: (at[0], at[1]), within=lambda: passes[0], warn=print, hang_seconds=2.0, end=end
    ):
        mesh.barrier()
        at[1] = began = time.perf_counter()
        if mesh.rank == 1:
            while time.perf_counter() - began < 2.5 * 2.0:
                passes[0] += 1
                _spin(store, seconds=0.2)
            assert not store.check(["ended"])
        dist.all_reduce(torch.ones(3), group=mesh.group)
        began = time.perf_counter()
        if mesh.rank == 1:
            _spin(store, seconds=20)
        dist.all_reduce(torch.ones(3), group=mesh.group)
        at[1] = None
    return ended, time.perf_counter() - began


def _spin(store: dist.Store, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not store.check(["ended"]):
        for _ in range(1_000_000):  # another thread sees a loop where it jumps back, so there are two, longer than a look needs
            pass
        for _ in range(1_000_000):
            pass
