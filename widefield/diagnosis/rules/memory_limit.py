"""The kernel or Slurm ended a process for its memory."""

from __future__ import annotations

TITLE = "the job's memory limit was reached, and the kernel killed a process"
KIND = "cause"
PATTERNS = (
    r"[Dd]etected \d+ oom[-_]kill event",
    r"oom_kill event in StepId",
    r"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process",
    r"srun: error: \S+ task \S+ Out Of Memory",
    r"^.*: task \d+: Out Of Memory",
    r"OOMKilled",
)
CAUSE = "All processes of a step share the memory that the job asked for: ranks, loader workers, and files in /dev/shm."
REMEDY = (
    "Ask for more (#SBATCH --mem=0 for all of the node, or --mem-per-gpu), start fewer workers, or have them read by "
    "window in place of whole images."
)
WRONG = {
    "a GPU with more memory": "the limit is on the host's memory",
}
SOURCE = "Slurm, cgroup.conf(5); Kubernetes, OOMKilled"

CASES: list[tuple[str, str | None]] = [
    (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: n1: task 1: Out Of Memory",
        "Detected 1 oom_kill",
    ),
    (
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may "
        "have been killed by the cgroup out-of-memory handler.",
        "oom-kill",
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", None),
]
