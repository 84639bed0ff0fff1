"""Workers that are killed and started again by the launcher: they take shares again, and the numbers are those of the log."""

from __future__ import annotations

import os
import signal

import pytest
from agreement.test_lost_workers import assert_learned_once_as_the_log_says, warnings_of
from agreement.test_server_runs import _own_code, command_of, log_of  # noqa: F401
from command import ranks_of as processes_of
from command import start as start_command
from command import wait_for_step
from marks import few

AGREEMENTS = {
    "asynchronous": "{name: server}",
    "overlap": "{name: server, overlap: true}",
    "bound": "{name: server, kind: bounded_staleness, bound: 4}",
    "synchronous": "{name: server, kind: synchronous}",
    "compressed": "{name: server, compression: int8}",
}


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
@pytest.mark.parametrize("name", few(AGREEMENTS, "asynchronous", is_sweep=True))
def test_a_worker_that_was_killed_comes_back_and_learns_from_further_samples(tmp_path, monkeypatch, name):
    folder = tmp_path / "run"
    monkeypatch.setenv("TEST_RETURN", str(tmp_path / "returned"))
    waits = ["model.name=agreement.nets:WaitsForReturn", f"agreement={AGREEMENTS[name]}"]
    process = start_command(*command_of(folder, "--max-restarts", 2, *waits))
    wait_for_step(process, folder, 3)
    os.kill(processes_of(process)[1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "rank 1 was killed by SIGKILL" in output and "it is started again (1 of 2 restarts)" in output, output
    gone, back = (place for place, text in enumerate(warnings_of(folder)) if "worker 1 is" in text)
    assert "worker 1 is gone" in warnings_of(folder)[gone] and warnings_of(folder)[back] == "worker 1 is back; 3 go on"
    events = log_of(folder).events
    joined = next(place for place, event in enumerate(events) if event.kind == "join" and event.workers == (1,))
    assert any(event.kind == "gradient" and event.workers == (1,) for event in events[joined:])
    assert_learned_once_as_the_log_says(folder, f"agreement={AGREEMENTS[name]}")
