"""A more important job took the nodes."""

from __future__ import annotations

TITLE = "the job was preempted, or cancelled"
KIND = "cause"
PATTERNS = (
    r"CANCELLED AT \S+ DUE TO PREEMPTION",
    r"CANCELLED AT \S+ \*\*\*",
    r"CANCELLED AT \S+ DUE TO JOB REQUEUE",
)
CAUSE = "Slurm took the nodes back; the partition's GraceTime is what is left for saving."
REMEDY = (
    "--requeue, and --signal=USR1@SECONDS of less than the grace; checkpoint.every so short that what is lost can be "
    "borne. The run goes on from its last complete checkpoint."
)
WRONG = {
    "ignoring SIGTERM": "SIGKILL follows, and nothing is saved",
}
SOURCE = "Slurm, preemption; EgoVerse#621"

CASES: list[tuple[str, str | None]] = [
    ("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2026-11-25T10:00:00 DUE TO PREEMPTION ***", "PREEMPTION"),
    ("slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-11-25T10:00:00 DUE TO TIME LIMIT ***", None),
]
