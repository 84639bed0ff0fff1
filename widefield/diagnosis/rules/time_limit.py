"""The job's time was over."""

from __future__ import annotations

TITLE = "the job reached its time limit"
KIND = "cause"
PATTERNS = (
    r"CANCELLED AT \S+ DUE TO TIME LIMIT",
    r"DeadlineExceeded",
)
CAUSE = "Slurm ended the step, first with SIGTERM and, after KillWait, with SIGKILL."
REMEDY = "#SBATCH --signal=USR1@120 and --requeue: the run saves two minutes before, and the same script goes on from there."
WRONG = {
    "a longer NCCL timeout": "the job ends when its time is over",
}
SOURCE = "Slurm, sbatch(1)"

CASES: list[tuple[str, str | None]] = [
    ("slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-11-25T10:00:00 DUE TO TIME LIMIT ***", "TIME LIMIT"),
    ("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-25T10:00:00 DUE TO PREEMPTION ***", None),
]
