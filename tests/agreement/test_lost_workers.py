"""Workers that are killed in the middle of a push, or that hang: what a real run makes of it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from agreement.test_server_runs import SLOW, _own_code, assert_close, command_of, log_of, replayed, weights_of  # noqa: F401
from command import ranks_of as processes_of
from command import record, wait_for_step
from command import run as run_command
from command import start as start_command

from widefield.agreement.sample_account import times_learned
from widefield.asynchrony.attendance import PATIENCE, Attendance
from widefield.refusal import TO_BE_CONTINUED


def assert_learned_once_as_the_log_says(folder, *settings):
    assert set(times_learned(log_of(folder)).values()) == {1}
    assert_close(replayed(folder, [*SLOW, *settings]), weights_of(folder))


def warnings_of(folder):
    return [line["text"] for line in record(folder, "warning")]


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_a_worker_that_is_killed_in_the_middle_of_a_push_leaves_no_half_of_its_gradient(tmp_path):
    folder = tmp_path / "run"
    settings = ["model.name=agreement.nets:KilledInPush", "mesh.replicate=5", "agreement={name: server, servers: 3}"]
    output = run_command(*command_of(folder, *settings))
    (text,) = [text for text in warnings_of(folder) if "worker 0 is gone" in text]
    assert re.search(r"1 go on; its share \d of step \d is handed out again", text) and text in output
    assert [event.kind for event in log_of(folder).events if event.workers[:1] == (0,)].count("push") == 2
    assert_learned_once_as_the_log_says(folder)


def stopped_at(folder, step, *settings):
    """A run whose worker 0 is stopped after a step; (its process, the worker), once it was struck out."""
    process = start_command(*command_of(folder, "log.hang_seconds=1", *settings))
    wait_for_step(process, folder, step)
    worker = processes_of(process)[0].pid
    os.kill(worker, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not any("worker 0 hangs: no message for" in text for text in warnings_of(folder)):
        assert time.monotonic() < deadline and process.poll() is None, warnings_of(folder)
        time.sleep(0.01)
    return process, worker


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_a_worker_that_hangs_is_struck_out_and_ends_with_words_when_it_wakes(tmp_path):
    process, worker = stopped_at(tmp_path / "run", 5, "mesh.replicate=5", "agreement={name: server, servers: 2}")
    os.kill(worker, signal.SIGCONT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert re.search(r"worker 0 hangs: no message for [\d.]+ s; 2 go on; its share \d of step \d is handed out", output), output
    assert "widefield: worker 0 was struck out after" in output and "others go on. log.hang_seconds says" in output, output
    assert_learned_once_as_the_log_says(tmp_path / "run")


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.usefixtures("_own_code")
def test_a_run_ends_with_a_worker_that_hangs_for_ever(tmp_path):
    process, worker = stopped_at(tmp_path / "run", 5)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "trained to the end" in output, output
    assert not os.path.exists(f"/proc/{worker}")
    assert_learned_once_as_the_log_says(tmp_path / "run")


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.usefixtures("_own_code")
def test_a_further_server_that_is_killed_ends_the_run_which_goes_on_on_one_server(tmp_path):
    folder, two = tmp_path / "run", ["mesh.replicate=5", "agreement={name: server, servers: 2}"]
    process = start_command(*command_of(folder, *two))
    wait_for_step(process, folder, 16)
    os.kill(processes_of(process)[4].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and "rank 4 was killed by SIGKILL" in output, output
    assert "the server on rank 4 is gone" in output and "its part of the weights" in output, output
    assert "resumed from" in run_command(*command_of(folder))
    assert_learned_once_as_the_log_says(folder)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.usefixtures("_own_code")
def test_a_run_of_several_servers_that_is_asked_to_stop_goes_on(tmp_path):
    folder, two = tmp_path / "run", ["mesh.replicate=5", "agreement={name: server, servers: 2, overlap: true}"]
    process = start_command(*command_of(folder, *two))
    wait_for_step(process, folder, 5)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == TO_BE_CONTINUED and "stopped at step" in output, output
    assert "resumed from" in run_command(*command_of(folder, *two))
    assert_learned_once_as_the_log_says(folder)


def test_a_worker_hangs_once_it_has_had_a_share_for_longer_than_slow_ones_take():
    now = [0.0]
    attendance = Attendance(range(3), seconds=10.0, now=lambda: now[0])
    now[0] = 11.0
    assert attendance.hanging([1]) == {1: "hangs: no message for 11.0 s"}  # it never came
    attendance.hears(0)
    attendance.gives(0, (0, 0))
    now[0] = 15.0
    attendance.pushes(0, (0, 0))
    attendance.hears(0)
    attendance.gives(0, (0, 1))
    assert attendance.longest == 4.0
    now[0] = 15.0 + PATIENCE * 4.0 - 0.1  # 10 s are over, and slow ones have taken 4
    assert attendance.hanging([0]) == {}
    now[0] += 0.2
    assert attendance.hanging([]) == {}  # it waits for an answer
    assert list(attendance.hanging([0])) == [0] and "after 20.1 s without a message" in attendance.reason(0)
    assert "taken for dead" in attendance.reason(2)
    assert Attendance(range(3), seconds=None).hanging([0]) == {}
