"""Ranks that a launcher starts again meet each other, and nothing of those before them, though one store serves all starts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from widefield.comm.starts import name_of_start
from widefield.comm.world import World

SIZE = 3


def names(store: dist.Store, ranks: list[int], job: str = "") -> list[str]:
    """What ranks that come in this order are told.  Rank 0 stays until the others know."""
    others_know = threading.Barrier(len(ranks), timeout=30)

    def life(rank: int) -> str:
        with name_of_start(store, World(rank, SIZE, address="a", port=1, job=job), seconds=20) as name:
            others_know.wait()
            return name

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(life, ranks))


def test_the_ranks_of_a_start_agree_whoever_comes_first_and_starts_differ():
    store = dist.HashStore()
    found = [names(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert [len(set(one)) for one in found] == [1, 1, 1]
    assert len({name for one in found for name in one}) == 3


def test_a_rank_that_came_and_was_killed_is_not_waited_for():
    store = dist.HashStore()
    with pytest.raises(ValueError, match=r"rank 0 of 3 did not come to a:1 within 0 s; rank 1 came\. See that all"):
        name_of_start(store, World(1, SIZE, address="a", port=1), seconds=0.2).__enter__()
    assert len(set(names(store, [1, 2, 0]))) == 1


def test_jobs_that_share_a_store_do_not_meet():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda job: names(store, [0, 1, 2], job), ["A", "B"])
    assert len(set(one)) == len(set(other)) == 1 and one[0] != other[0]


DRIVER = """
import json, os, time
import torch
from widefield.comm import failure, meeting
from widefield.comm.failure import FailureWatch, PeerFailedError
from widefield.comm.mesh import World, join, leave
from widefield.naming import load_all
from widefield.plans import Plan
load_all("widefield.parallel.strategies")
import torch.distributed.tensor, torch._dynamo

failure.LEAVE_SECONDS = 0.5
launchers = meeting.host_of_meeting()

def life(rank, count, fails):
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(count))
    world = World(rank, 2, rank, 2, "127.0.0.1", launchers.port, "torchrun", "job")
    mesh = join(world, Plan(replicate=2), timeout_seconds=20, device=torch.device("cpu"))
    try:
        with FailureWatch(mesh):
            if fails and rank:
                raise KeyError("lost")
            time.sleep(0 if fails else 3 * failure.POLL_SECONDS + failure.LEAVE_SECONDS)  # as a run that goes on
            return mesh.sum_(torch.tensor([rank + 1.0])).item()
    except (KeyError, PeerFailedError) as error:
        return type(error).__name__

def fork(*life_of):
    pipe, theirs = os.pipe()
    if os.fork() == 0:
        try:
            os.write(theirs, json.dumps(life(*life_of)).encode())
        except BaseException as error:
            os.write(theirs, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(theirs)
    return pipe

def start(counts, fails):
    pipes = [fork(rank, count, fails) for rank, count in enumerate(counts)]
    return [json.loads(os.fdopen(pipe).read() or '"ended"') for pipe in pipes]

print(json.dumps([start([0, 0], True), start([1, 1], True), start([1, 2], False)]))
"""


@pytest.mark.alone
def test_a_run_that_is_started_again_does_not_hear_of_the_failure_before():
    """Nor do its ranks wait for each other where agents have counted differently, as torchrun's do when nodes change."""
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    first, second, third = json.loads(done.stdout)
    assert first == second == ["PeerFailedError", "KeyError"], done.stderr
    assert third == [3.0, 3.0], done.stderr
