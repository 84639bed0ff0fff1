"""A rank did not come to a collective."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting
from widefield.diagnosis.waiting import timed_out

TITLE = "a rank did not come to a collective that the others waited in"
KIND = "inferred"
ORDER = 30
CAUSE = (
    "It works longer than the timeout (a file, a lock, a first compilation), hangs in its loader, has ended, has run out of "
    "batches, or took another way through the code."
)
REMEDY = (
    "Its own log and its stack say where it is: py-spy dump --pid PID on its host. TORCH_FR_BUFFER_SIZE=2000 keeps what "
    "each rank sent last, for torchfrtrace. widefield's own runs name the rank and the line, see log.stall_seconds."
)
WRONG = {
    "a longer timeout": "it helps where the rank only works longer, and no hang",
    "NCCL_P2P_DISABLE=1": "it cures a broken link, which would show on all runs",
}
SOURCE = "pytorch/pytorch#118369, #163546; nccl#1111"


def find(evidence: Evidence) -> Sighting | None:
    """Ranks waited in vain; those that did not say so are the ones to look at."""
    told = evidence.first(r"\d+ of \d+ ranks ha(?:s|ve) not arrived")
    waited = timed_out(evidence)
    if told is not None or not waited:
        return told
    seen = min(waited.items())[1]
    there = ", ".join(map(str, sorted(waited)))
    return Sighting(seen.line, seen.groups, f"Of these ranks the logs say that they waited: {there}; look at the others.")


CASES: list[tuple[str, str | None]] = [
    (
        "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=64088, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800251 milliseconds before timing out.",
        "[Rank 7]",
    ),
    (
        "warning:  step 12 has not ended after 60 s. 1 of 2 ranks has not arrived: rank 1 is at data.py:9 in read",
        "has not arrived",
    ),
    ("NCCL INFO AllReduce: opCount 5", None),
]
