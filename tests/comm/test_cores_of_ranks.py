"""Ranks that compute on the same cores divide them."""

from __future__ import annotations

import contextlib
import json
import os
import threading

import pytest
import torch

from widefield import cores
from widefield.comm import cores_of_ranks
from widefield.data.loader import _start_worker
from widefield.plans import Plan
from widefield.verification.own_ranks import on_own_ranks

CPU = torch.device("cpu")
ALLOWED = cores.allowed_cores()
two_cores = pytest.mark.skipif(len(ALLOWED) < 2, reason="one core cannot be divided")


def affinities_of_threads() -> set[frozenset[int]]:
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(frozenset(os.sched_getaffinity(int(task))))
    return found


def affinity_of_a_worker() -> set[int]:
    """Of a child that starts as the loader's workers do."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _start_worker(0)
            os.write(writer, json.dumps(sorted(os.sched_getaffinity(0))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        return set(json.load(answer))


def _bound(mesh):
    """What rank 0 finds after it has joined, and then in other circumstances."""
    found = {"threads": affinities_of_threads(), "usable": cores.usable_cores()}
    found["worker"] = affinity_of_a_worker()
    cores_of_ranks.undo()
    found["undone"] = affinities_of_threads()
    torch.set_num_threads(len(ALLOWED) + 1 if mesh.rank else 1)
    cores_of_ranks.divide(CPU, mesh.group)
    found["many threads"] = affinities_of_threads()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(ALLOWED)[mesh.rank]})  # as a launcher does that binds its processes
    cores_of_ranks.divide(CPU, mesh.group)
    found["kept apart"] = (os.sched_getaffinity(0), cores.usable_cores())
    return found


@two_cores
def test_two_ranks_have_half_of_the_cores_each_and_their_workers_all():
    found = on_own_ranks(Plan(replicate=2), _bound, 60)
    everything = {frozenset(ALLOWED)}
    (own,) = found["threads"]
    assert own == frozenset(cores.share_of(ALLOWED, 0, 2)) and len(own) == len(ALLOWED) // 2
    assert found["usable"] == len(ALLOWED) and found["worker"] == ALLOWED
    assert found["undone"] == found["many threads"] == everything
    assert found["kept apart"] == ({min(ALLOWED)}, 1)


def _own_affinity(mesh):
    return os.sched_getaffinity(0)


@two_cores
def test_ranks_are_not_bound_where_they_are_told_not_to_be(monkeypatch):
    monkeypatch.setenv("WIDEFIELD_BIND_CORES", "0")
    assert on_own_ranks(Plan(replicate=2), _own_affinity, 60) == ALLOWED


def test_ranks_that_may_not_be_bound_run_as_before(monkeypatch):
    def refuse(process, wanted):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert on_own_ranks(Plan(replicate=2), _own_affinity, 60) == ALLOWED


@pytest.mark.skipif(len(ALLOWED) > 4, reason="as many ranks as cores and one more would be many")
def test_more_ranks_than_cores_are_not_bound():
    assert on_own_ranks(Plan(replicate=len(ALLOWED) + 1), _own_affinity, 60) == ALLOWED


@two_cores
def test_threads_that_are_there_and_that_come_are_bound_and_unbound():
    one = {min(ALLOWED)}
    stop, there = threading.Event(), threading.Event()
    waiting = threading.Thread(target=lambda: (there.set(), stop.wait()))
    waiting.start()
    there.wait()
    try:
        cores.bind(one)
        assert affinities_of_threads() == {frozenset(one)} and cores.usable_cores() == len(ALLOWED)
        cores.bind({max(ALLOWED)})
        assert affinities_of_threads() == {frozenset({max(ALLOWED)})} and cores.usable_cores() == len(ALLOWED)
    finally:
        cores.unbind()
        stop.set()
        waiting.join()
    assert affinities_of_threads() == {frozenset(ALLOWED)} and cores.usable_cores() == len(ALLOWED)
    with pytest.raises(OSError):
        cores.bind({10**6})
    assert cores.allowed_cores() == ALLOWED


def test_shares_are_whole_cores_and_processors_first(monkeypatch):
    """Two processors of two cores with two threads each, numbered as Linux does: first one thread of each core."""
    monkeypatch.setattr(cores, "_place", lambda number: (number % 4 // 2, number % 2))
    assert [cores.share_of(range(8), part, 2) for part in range(2)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert [cores.share_of(range(8), part, 4) for part in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [len(cores.share_of(range(8), part, 3)) for part in range(3)] == [2, 3, 3]


def test_where_a_core_is_that_the_system_does_not_know():
    assert cores.share_of([10**6, 10**6 + 1], 1, 2) == [10**6 + 1]
