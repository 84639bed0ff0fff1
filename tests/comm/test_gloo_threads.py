"""Gloo's threads take no core from a thread that computes or sends."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import on_ranks

from widefield.comm.coming_back import _group_of_two
from widefield.comm.gloo_threads import LOOP, keep_gloo_from_preempting
from widefield.comm.process_groups import group_among

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked for in /proc")


def _policies() -> dict[str, set[int]]:
    """The policies of this process's threads by their names."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found.setdefault((task / "comm").read_text().strip(), set()).add(os.sched_getscheduler(int(task.name)))
    return found


def _policies_on_rank(mesh):
    of_join = _policies()
    group_among([list(range(mesh.size))], backend="gloo")
    return of_join, _policies()


def test_threads_of_connections_do_not_preempt_and_all_others_do_as_before():
    for of_join, of_group in on_ranks(2, _policies_on_rank):
        for found in (of_join, of_group):
            assert found.pop(LOOP) == {os.SCHED_BATCH}
            assert set().union(*found.values()) == {os.SCHED_OTHER}


def test_nor_do_those_of_a_group_with_a_rank_that_came_back(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ThreadPoolExecutor(2) as both:
        store = dist.HashStore()
        groups = list(both.map(lambda rank: _group_of_two(store, 1, rank=rank), range(2)))
        assert len(groups) == 2 and _policies()[LOOP] == {os.SCHED_BATCH}


def _named_like_gloos(policy: int) -> int:
    """The policy that a thread of that name has in the end, which began with `policy`."""
    ready, over = threading.Event(), threading.Event()
    ids = []

    def waits() -> None:
        os.sched_setscheduler(0, policy, os.sched_param(0))
        Path("/proc/thread-self/comm").write_text(LOOP)
        ids.append(threading.get_native_id())
        ready.set()
        over.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    try:
        assert ready.wait(10)
        keep_gloo_from_preempting()
        return os.sched_getscheduler(ids[0])
    finally:
        over.set()
        thread.join()


def test_a_policy_that_the_user_has_chosen_stays():
    assert _named_like_gloos(os.SCHED_OTHER) == os.SCHED_BATCH
    assert _named_like_gloos(os.SCHED_IDLE) == os.SCHED_IDLE


def test_where_it_is_not_allowed_nothing_changes(monkeypatch):
    def refuses(*_):
        raise PermissionError("not in this container")

    monkeypatch.setattr(os, "sched_setscheduler", _only_own(os.sched_setscheduler, refuses))
    assert _named_like_gloos(os.SCHED_OTHER) == os.SCHED_OTHER


def _only_own(own, other):
    return lambda thread, *args: own(thread, *args) if thread == 0 else other(thread, *args)
