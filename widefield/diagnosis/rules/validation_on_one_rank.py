"""One rank validates while the others are in a collective."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting
from widefield.diagnosis.waiting import timed_out

TITLE = "rank 0 validates, saves or logs alone, and the others wait for it in a collective until the timeout"
KIND = "inferred"
ORDER = 10
CAUSE = (
    "The other ranks went on to the next collective and wait. Or rank 0's model is wrapped (DDP, SyncBatchNorm, FSDP), "
    "so that its validation itself asks the others for messages, which mix with theirs."
)
REMEDY = (
    "Validate on all ranks, each its part, and add up sums and counts (wf.evaluate_exactly counts every image once); or "
    "on rank 0 the plain module, model.module, with the others at a barrier in a group with a timeout of its own."
)
WRONG = {
    "a longer NCCL timeout": "it only moves the end; the other GPUs stand idle for the whole validation",
    "find_unused_parameters=True": "no parameter is unused; a rank is elsewhere",
}
SOURCE = "ultralytics#3057; accelerate#3861; SoftGroup#83"


def find(evidence: Evidence) -> Sighting | None:
    """Some rank but 0 waited in vain, rank 0 did not, and the log speaks of validation."""
    waited = timed_out(evidence)
    if (
        not waited
        or 0 in waited
        or not evidence.has(r"(?i)\b(?:validat\w*|evaluat\w*|val_loss|eval_loss|eval(?: |:)|val(?: |:))")
    ):
        return None
    return min(waited.items())[1]


CASES: list[tuple[str, str | None]] = [
    (
        "[rank0]: epoch 0 done, validating\n"
        "[rank1]:[E1128 21:12:49.4 ProcessGroupNCCL.cpp:688] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=22, OpType=ALLREDUCE, NumelIn=687, NumelOut=687, Timeout(ms)=600000) ran for "
        "600084 milliseconds before timing out.",
        "[Rank 1] Watchdog",
    ),
    (
        "[rank0]: epoch 0 done, validating\n"
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=22, OpType=ALLREDUCE)\n"
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=22, OpType=ALLREDUCE)",
        None,
    ),
    ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=22, OpType=ALLREDUCE)", None),
]
