"""Ranks called different collectives, or with different sizes."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "ranks called different collectives, or the same with different sizes"
KIND = "cause"
CAUSE = (
    "Collectives pair up by order, not by name. A condition that holds on one rank alone (a logged value, a NaN that is "
    "skipped, an if rank == 0) added or left out one, and from there on everything is paired wrongly."
)
REMEDY = (
    "Every rank must call the same collectives in the same order: agree on the condition first (all_reduce of a flag). "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL names both sides at the first one that differs."
)
WRONG = {
    "a longer NCCL timeout": "what is paired wrongly never fits",
    "find_unused_parameters=True": "it adds a message per step, and changes nothing of the order",
}
SOURCE = "pytorch/pytorch, ProcessGroupWrapper; trl#7010"


def find(evidence: Evidence) -> Sighting | None:
    """What torch, NCCL or widefield say of it, or watchdogs that waited in different collectives of one number."""
    told = evidence.first(
        r"Detected mismatch between collectives on ranks",
        r"NCCL WARN .*Message truncated : received",
        r"Mismatched collective detected",
        r"ranks (?:disagree|differ) in (?:the )?(?:collective|operation|shape)",
        r"op\.preamble\.length <= op\.nbytes",
    )
    if told is not None:
        return told
    first: dict[str, str] = {}
    for seen in evidence.all(r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+)(?:, NumelIn=(?P<size>\d+))?"):
        what = f"{seen.groups['kind']} of {seen.groups.get('size', '?')}"
        if first.setdefault(seen.groups["number"], what) != what:
            number = seen.groups["number"]
            return Sighting(seen.line, seen.groups, f"Collective {number} is {first[number]} numbers on one rank, {what} here.")
    return None


CASES: list[tuple[str, str | None]] = [
    (
        "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE, TensorShape=[4], but Rank 1 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=1, OpType=BROADCAST",
        "Detected mismatch",
    ),
    (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4\n"
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLGATHER, NumelIn=4",
        "[Rank 1]",
    ),
    (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4\n"
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4",
        None,
    ),
]
