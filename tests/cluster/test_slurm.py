"""A run on two nodes of a real Slurm ends with the weights of an undisturbed one, whatever Slurm does to it meanwhile."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import command
import pytest
from cluster.runs import PYTHON, STEPS, Run, assert_as_undisturbed, run_in
from cluster.slurm_cluster import Slurm

from widefield.refusal import TO_BE_CONTINUED

pytestmark = pytest.mark.timeout(1800)

SCRIPT = """#!/bin/bash
#SBATCH --job-name=widefield
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=low
#SBATCH --requeue
#SBATCH --open-mode=append
{options}
srun --kill-on-bad-exit=1 {command}
status=$?
case $status in {TO_BE_CONTINUED} | 138 | 143) scontrol requeue $SLURM_JOB_ID ;; esac
exit $status
"""


@dataclass(frozen=True)
class Job:
    """A submitted job: its number, and the file with what it prints."""

    number: str
    printed: Path


def by_script(cluster: Slurm, run: Run, *, limit: str = "20", signal: str = "USR1@120") -> Job:
    """Submit the run with a script like the guide's, on two nodes."""
    printed = run.place / "job.out"
    options = "".join(f"#SBATCH --{line}\n" for line in (f"output={printed}", f"time={limit}", f"signal={signal}"))
    script = run.place / "job.sh"
    script.write_text(SCRIPT.format(TO_BE_CONTINUED=TO_BE_CONTINUED, options=options, command=" ".join((*PYTHON, *run.words))))
    return Job(cluster.submit(script), printed)


def by_launch(cluster: Slurm, run: Run, *, limit: str = "20", signal: str = "USR1@120") -> Job:
    """Submit the run with `widefield launch slurm`, on two nodes."""
    asked = ["--nodes=2", "--ranks-per-node=1", "--partition=low", f"--time={limit}", f"--signal={signal}"]
    told = cluster.run(*PYTHON, "launch", "slurm", *run.words[1:], *asked)
    number = re.findall(r"^submitted: (\d+)", told, re.MULTILINE)[0]
    return Job(number, run.folder / f"launch/slurm-{number}.out")


def assert_complete(cluster: Slurm, job: Job, run: Run, undisturbed: Run, *, restarts: int) -> None:
    """The job ends as complete after some restarts, and the run as the undisturbed one, each step recorded once."""
    ends = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
    facts = cluster.wait_for_state(job.number, *ends, seconds=600)
    output = job.printed.read_text()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), f"{facts}\n{output}"
    assert int(facts["Restarts"]) == restarts, output
    assert [line["step"] for line in command.record(run.folder, "step")] == list(range(1, STEPS + 1))
    assert_as_undisturbed(run, undisturbed)


@pytest.mark.parametrize("submit", [by_script, by_launch])
def test_two_nodes_train_as_two_ranks_of_one_machine(submit, cluster, undisturbed, tmp_path):
    run = run_in(tmp_path)
    job = submit(cluster, run)
    assert_complete(cluster, job, run, undisturbed, restarts=0)
    assert cluster.nodes_of(job.number) == {"n0", "n1"}


def test_a_requeued_job_goes_on_where_it_was(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_launch(cluster, run)
    run.wait_for_step(7)
    cluster.run("scontrol", "requeue", job.number)
    run.pace()
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert run.starts()[1] >= 5


def test_a_preempted_job_saves_within_its_grace_and_goes_on_from_that_very_step(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_launch(cluster, run)
    run.wait_for_step(7)
    other = preempt(cluster)
    cluster.wait_for_state(job.number, "PENDING")
    run.pace()
    cluster.wait_for_state(other, "COMPLETED")
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    (stopped,) = re.findall(rf"stopped at step (\d+) of {STEPS}", job.printed.read_text())
    assert run.starts() == [0, int(stopped)]


def test_a_job_whose_grace_is_shorter_than_its_save_goes_on_from_the_checkpoint_before(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_launch(cluster, run)
    run.wait_for_step(7)
    saved = run.saved_step
    run.pace(step=0.5, save=60)
    other = preempt(cluster)
    cluster.wait_for_state(job.number, "PENDING")
    assert any((run.folder / "checkpoints").glob(".step_*")), "the save was not cut short"
    run.pace()
    cluster.wait_for_state(other, "COMPLETED")
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert run.starts() == [0, saved] and saved >= 5


LATE = """
import os, time
if os.environ.get("SLURM_PROCID") == "1" and "SLURM_STEP_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(60)
"""
"""A sitecustomize.py: rank 1 of a job that starts for the first time takes a minute more to load."""


def test_a_job_that_is_preempted_while_a_rank_loads_and_the_other_waits_for_it_is_not_lost(
    cluster, undisturbed, tmp_path, monkeypatch
):
    run = run_in(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = by_launch(cluster, run)
    cluster.wait_for_state(job.number, "RUNNING")
    time.sleep(15)  # rank 0 has loaded by now, or not: both must do
    other = preempt(cluster)
    cluster.wait_for_state(other, "COMPLETED")
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert run.starts() == [0]


def preempt(cluster: Slurm) -> str:
    """Submit a job that takes the nodes of all others for some seconds; its number."""
    return cluster.submit("--partition=high", f"--nodes={len(cluster.nodes)}", "--output=/dev/null", "--wrap=sleep 2")


def test_a_job_is_warned_before_its_time_limit_and_goes_on_in_another_one(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=2)
    job = by_launch(cluster, run, limit="1", signal="USR1@10")  # Slurm looks at the clock every 30 s: sent after 20 to 50 s
    cluster.wait_for_state(job.number, "RUNNING")
    cluster.wait_for_state(job.number, "PENDING")
    run.pace()
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert "SIGUSR1" in job.printed.read_text()


def test_a_job_whose_time_is_over_in_the_midst_of_its_save_goes_on_from_the_checkpoint_before(cluster, undisturbed, tmp_path):
    """Slurm kills the batch script with the ranks, so it has to queue the job again before that."""
    run = run_in(tmp_path, step=0.5)
    job = by_launch(cluster, run, limit="1", signal="USR1@10")
    run.wait_for_step(7)
    saved = run.saved_step
    run.pace(step=0.5, save=300)
    cluster.wait_for_state(job.number, "PENDING")
    assert any((run.folder / "checkpoints").glob(".step_*")), "the save was not cut short"
    run.pace()
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert run.starts() == [0, saved] and saved >= 5


@pytest.mark.parametrize("node", ["n0", "n1"], ids=["with_the_batch_script", "without_the_batch_script"])
def test_a_job_whose_node_loses_power_goes_on_on_another_node(node, cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_launch(cluster, run)
    run.wait_for_step(7)
    cluster.unplug(node)
    try:
        cluster.wait_for_state(job.number, "PENDING")
        run.pace()
        assert_complete(cluster, job, run, undisturbed, restarts=1)
        assert run.starts()[1] >= 5
        assert cluster.nodes_of(job.number) == {"n0", "n1", "n2"} - {node}
    finally:
        cluster.replace(node)


def test_a_job_whose_node_is_taken_down_by_its_administrator_goes_on_on_another_node(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_launch(cluster, run)
    run.wait_for_step(7)
    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        cluster.wait_for_state(job.number, "PENDING")
        run.pace()
        assert_complete(cluster, job, run, undisturbed, restarts=1)
    finally:
        cluster.run("scontrol", "update", "nodename=n1", "state=resume")
        cluster.wait_for_nodes("idle", "n1")
