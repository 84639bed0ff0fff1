"""NCCL's watchdog ended a rank that waited."""

from __future__ import annotations

TITLE = "a collective waited until its timeout"
KIND = "consequence"
PATTERNS = (
    r"Watchdog caught collective operation timeout",
    r"Heartbeat monitor timed out",
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"failed to pass monitoredBarrier",
    r"Some NCCL operations have failed or timed out",
)
CAUSE = "Another rank did not come. The first rank that said anything else than this is the one to look at."
REMEDY = (
    "Read the logs of the ranks that are not named here. TORCH_FR_BUFFER_SIZE=2000 and torchfrtrace show which rank is "
    "behind and in what."
)
WRONG = {
    "a longer NCCL timeout": "it cures no mismatch, and no rank that has ended; only a rank that works longer",
}
SOURCE = "pytorch/pytorch#118369"

CASES: list[tuple[str, str | None]] = [
    (
        "[rank1]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) "
        "ran for 600020 milliseconds before timing out.",
        "SeqNum=808",
    ),
    ("NCCL INFO Launch mode Parallel", None),
]
