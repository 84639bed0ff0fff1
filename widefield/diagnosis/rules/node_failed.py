"""A node of the job went down."""

from __future__ import annotations

TITLE = "a node of the job failed"
KIND = "cause"
PATTERNS = (
    r"DUE TO NODE FAILURE",
    r"srun: error: Node failure on \S+",
    r"NODE_FAIL\b",
)
CAUSE = "Slurm lost the node: it crashed, was rebooted, or its network is down. Ranks on other nodes wait for it."
REMEDY = (
    "#SBATCH --requeue, and --no-kill where the launcher can go on with fewer nodes. The last complete checkpoint "
    "stands; #SBATCH --exclude=NODE where it is always the same."
)
WRONG = {
    "a longer NCCL timeout": "the node does not come back within it",
}
SOURCE = "Slurm, sbatch(1)"

CASES: list[tuple[str, str | None]] = [
    (
        "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-25T10:00:00 DUE TO NODE FAILURE, SEE "
        "SLURMCTLD LOG FOR DETAILS ***",
        "NODE FAILURE",
    ),
    ("srun: error: n1: task 1: Exited with exit code 1", None),
]
