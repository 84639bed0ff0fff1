"""A run on two hosts of their own ends with the weights of one on one machine, also where their cable is slow, or was cut."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from cluster.cable import Cable
from cluster.hosts import Network, environment, network
from cluster.runs import PYTHON, Run, assert_as_undisturbed, run_in

from widefield.comm.keepalive import LOST_AFTER

pytestmark = pytest.mark.timeout(1800)
NAMES = ["n0", "n1"]
PORT = "29500"
LOST_AFTER_SECONDS = 20
SLOW = Cable(delay_ms=20, loss=0.01, mbit=20)


@pytest.fixture(scope="module")
def two_hosts(machine) -> Iterator[Network]:
    with network(NAMES) as made:
        yield made


def torchrun(run: Run, number: int) -> list[str]:
    """The command of host `number`, as the guide gives it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
    return [*launcher, "--master-addr=n0", f"--master-port={PORT}", "-m", "--", "widefield", *run.words]


def by_hand(run: Run, number: int) -> list[str]:
    return [*PYTHON, *run.words, f"--rank={number}", "--world-size=2", f"--rendezvous=n0:{PORT}"]


WAYS = pytest.mark.parametrize("words_of", [torchrun, by_hand])


def started(net: Network, run: Run, words_of) -> list[subprocess.Popen]:
    """The run's command on both hosts."""
    surroundings = {**environment(), LOST_AFTER: str(LOST_AFTER_SECONDS)}
    return [net.hosts[name].start(*words_of(run, number), env=surroundings) for number, name in enumerate(NAMES)]


def ended(processes: list[subprocess.Popen], *, seconds: float = 300) -> list[tuple[int, str]]:
    """Status and output of each; AssertionError where one does not end."""
    deadline, found = time.monotonic() + seconds, []
    for number, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {number} had not ended after {seconds:.0f} s; {found}") from None
        found.append((process.returncode, output))
    return found


def train(net: Network, run: Run, words_of, *, seconds: float = 300) -> None:
    """Train to the end on both hosts."""
    results = ended(started(net, run, words_of), seconds=seconds)
    assert [status for status, _ in results] == [0, 0], results


@WAYS
def test_two_hosts_train_as_two_ranks_of_one_machine(words_of, two_hosts, undisturbed, tmp_path):
    run = run_in(tmp_path)
    train(two_hosts, run, words_of)
    assert_as_undisturbed(run, undisturbed)


@WAYS
def test_hosts_that_have_their_own_name_at_a_loopback_address_find_each_other(words_of, undisturbed, tmp_path):
    run = run_in(tmp_path)
    with network(NAMES, own_loopback_name=True) as net:
        train(net, run, words_of)
    assert_as_undisturbed(run, undisturbed)


def test_two_of_rank_0_on_two_hosts_are_named(two_hosts, tmp_path):
    words = by_hand(run_in(tmp_path), 0)
    results = ended([two_hosts.hosts[name].start(*words, env=environment()) for name in NAMES], seconds=180)
    assert [status for status, _ in results] == [2, 2], results
    for _, output in results:
        assert "two processes say that they are rank 0 of 2: " in output and "on n0" in output and "on n1" in output, results


def test_a_rank_0_that_is_not_where_the_ranks_are_to_meet_is_told_so(two_hosts, tmp_path):
    words = by_hand(run_in(tmp_path), 0)
    ((status, output),) = ended([two_hosts.hosts["n1"].start(*words, env=environment())], seconds=180)
    assert status == 2 and "rank 0 is on n1, and n0, where the 2 ranks are to meet, is no address of it: " in output, output


@WAYS
def test_a_slow_cable_that_loses_frames_gives_the_same_weights(words_of, undisturbed, tmp_path):
    run = run_in(tmp_path)
    with network(NAMES, cable=SLOW) as net:
        train(net, run, words_of, seconds=600)
        assert all(link.lost for link in net.links)
    assert_as_undisturbed(run, undisturbed)


@WAYS
def test_a_cut_cable_ends_both_ranks_in_words_and_the_same_command_goes_on(words_of, two_hosts, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    processes = started(two_hosts, run, words_of)
    run.wait_for_step(7)
    two_hosts.hosts["n1"].cut_cable()
    try:
        results = ended(processes, seconds=LOST_AFTER_SECONDS + 60)
    finally:
        two_hosts.hosts["n1"].mend_cable()
    assert all(status != 0 for status, _ in results), results
    assert all("widefield: rank" in output for _, output in results), results
    run.pace()
    train(two_hosts, run, words_of)
    assert_as_undisturbed(run, undisturbed)
    assert run.starts() == [0, run.starts()[1]] and run.starts()[1] >= 5
