"""Each machine formed a world of its own."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "each machine trains alone: the meeting place was localhost"
KIND = "cause"
IS_WEAK = True
CAUSE = (
    "A script fell back to localhost, where scontrol or a name was missing. Each node met itself, and as many models are "
    "trained as there are nodes, each on a part of the data, into the same folder."
)
REMEDY = (
    "Let a name that is missing fail: no || echo localhost. The first host of $SLURM_STEP_NODELIST can be had without "
    "scontrol; srun widefield train reads it itself."
)
WRONG = {
    "more epochs": "each model sees its part of the data alone",
}
SOURCE = "pith-train#91, #47"


def find(evidence: Evidence) -> Sighting | None:
    """A fallback in a script, or several nodes that were told to meet at localhost."""
    fallback = evidence.first(r"\|\|\s*echo\s+[\"']?(?:localhost|127\.0\.0\.1)")
    if fallback is not None or not evidence.has(r"(?:min_nodes|nnodes)\s*[:=] ?(?:[2-9]|\d\d)"):
        return fallback
    return evidence.first(r"(?:rdzv_endpoint|master_addr)\s*[:=] ?(?:localhost|127\.0\.0\.1)\b")


CASES: list[tuple[str, str | None]] = [
    ("RDZV_HOST=$(scontrol show hostnames $SLURM_STEP_NODELIST | head -n 1 || echo localhost)", "echo localhost"),
    (
        "  min_nodes        : 2\n  rdzv_endpoint    : localhost:29500",
        "localhost:29500",
    ),
    (
        "  min_nodes        : 1\n  rdzv_endpoint    : localhost:0",
        None,
    ),
]
