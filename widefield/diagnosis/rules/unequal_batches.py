"""Ranks had different numbers of batches."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting
from widefield.diagnosis.waiting import LOST_PEER, other_errors

TITLE = "ranks had different numbers of batches: one was done while the others waited for it"
KIND = "inferred"
ORDER = 20
CAUSE = (
    "No rank failed; one left the loop earlier and ended, or is in its next collective. An unsharded dataset whose size "
    "does not divide, an IterableDataset, drop_last on some ranks, or samples that one rank skips."
)
REMEDY = (
    "Give all ranks equally many: a DistributedSampler, drop_last=True everywhere, or the same count agreed before the "
    "epoch. wf.sampler gives every sample once on any number of ranks, and an empty batch where one is missing. DDP's "
    "join() does it for DDP alone."
)
WRONG = {
    "a longer timeout": "the missing batch never comes",
    "find_unused_parameters=True": "all parameters are used; a whole step is missing",
    "repeating the last batch": "its samples then count twice, in training and in validation",
}
SOURCE = "pytorch/pytorch#33148, #38174; lightning#20404"


def find(evidence: Evidence) -> Sighting | None:
    """A rank lost another, which had ended, in the backward of a step, and no rank has an error of its own."""
    if other_errors(evidence) is not None or not evidence.has(r"\bbackward\(", r"in backward\b"):
        return None
    return evidence.first(*LOST_PEER)


CASES: list[tuple[str, str | None]] = [
    (
        '[rank0]:   File "train.py", line 31, in main\n'
        "[rank0]:     loss.backward()\n"
        "[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
        "[127.0.0.1]:4711",
        "Connection closed by peer",
    ),
    (
        "[rank1]:     loss.backward()\n"
        "[rank1]: RuntimeError: Connection closed by peer\n"
        "[rank0]: ZeroDivisionError: division by zero",
        None,
    ),
    (
        "[rank1]: RuntimeError: Connection closed by peer\n  exitcode  : -9 (pid: 36071)",
        None,
    ),
]
