"""A run on two nodes of a real Slurm ends with the weights of an undisturbed one, whatever Slurm does to it meanwhile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import command
import pytest
from cluster.runs import PYTHON, STEPS, Run, assert_as_undisturbed, run_in
from cluster.slurm_cluster import Slurm

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
case $status in
  75 | 129 | 130 | 138 | 143) scontrol requeue $SLURM_JOB_ID; sleep 60;;
esac
exit $status
"""


@dataclass(frozen=True)
class Job:
    """A submitted job: its number, and the file with what it prints."""

    number: str
    printed: Path


def by_script(cluster: Slurm, run: Run, *, time: str = "20", signal: str = "USR1@120") -> Job:
    """Submit the run with a script like the guide's, on two nodes."""
    printed = run.place / "job.out"
    options = "".join(f"#SBATCH --{line}\n" for line in (f"output={printed}", f"time={time}", f"signal={signal}"))
    script = run.place / "job.sh"
    script.write_text(SCRIPT.format(options=options, command=" ".join((*PYTHON, *run.words))))
    return Job(cluster.submit(script), printed)


def assert_complete(cluster: Slurm, job: Job, run: Run, undisturbed: Run, *, restarts: int) -> None:
    """The job ends as complete after some restarts, and the run as the undisturbed one, each step recorded once."""
    ends = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
    facts = cluster.wait_for_state(job.number, *ends, seconds=600)
    output = job.printed.read_text()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), f"{facts}\n{output}"
    assert int(facts["Restarts"]) == restarts, output
    assert [line["step"] for line in command.record(run.folder, "step")] == list(range(1, STEPS + 1))
    assert_as_undisturbed(run, undisturbed)


def test_two_nodes_train_as_two_ranks_of_one_machine(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path)
    job = by_script(cluster, run)
    assert_complete(cluster, job, run, undisturbed, restarts=0)
    assert cluster.nodes_of(job.number) == {"n0", "n1"}


def test_a_requeued_job_goes_on_where_it_was(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_script(cluster, run)
    run.wait_for_step(7)
    cluster.run("scontrol", "requeue", job.number)
    run.pace()
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert run.starts()[1] >= 5


def test_a_preempted_job_saves_within_its_grace_and_goes_on_from_that_very_step(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_script(cluster, run)
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
    job = by_script(cluster, run)
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


def preempt(cluster: Slurm) -> str:
    """Submit a job that takes the nodes of all others for some seconds; its number."""
    return cluster.submit("--partition=high", f"--nodes={len(cluster.nodes)}", "--output=/dev/null", "--wrap=sleep 2")


def test_a_job_is_warned_before_its_time_limit_and_goes_on_in_another_one(cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=2)
    job = by_script(cluster, run, time="1", signal="USR1@10")  # Slurm looks at the clock every 30 s: sent after 20 to 50 s
    cluster.wait_for_state(job.number, "RUNNING")
    cluster.wait_for_state(job.number, "PENDING")
    run.pace()
    assert_complete(cluster, job, run, undisturbed, restarts=1)
    assert "SIGUSR1" in job.printed.read_text()


@pytest.mark.parametrize("node", ["n0", "n1"], ids=["with_the_batch_script", "without_the_batch_script"])
def test_a_job_whose_node_loses_power_goes_on_on_another_node(node, cluster, undisturbed, tmp_path):
    run = run_in(tmp_path, step=0.5)
    job = by_script(cluster, run)
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
    job = by_script(cluster, run)
    run.wait_for_step(7)
    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        cluster.wait_for_state(job.number, "PENDING")
        run.pace()
        assert_complete(cluster, job, run, undisturbed, restarts=1)
    finally:
        cluster.run("scontrol", "update", "nodename=n1", "state=resume")
        cluster.wait_for_nodes("idle", "n1")
