"""Two processes think they are rank 0."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "two processes have the same rank, mostly 0"
KIND = "cause"
IS_WEAK = True
CAUSE = (
    "Each rank 0 wants to serve the meeting place: on one machine the second finds the port taken, on two each waits for "
    "ranks that joined the other. The rank on the machine was taken for the rank among all, or every node was told "
    "--node-rank 0."
)
REMEDY = (
    "rank=int(os.environ['RANK']), never LOCAL_RANK, for init_process_group and samplers; torchrun sets both. Under "
    "Slurm start with srun, once per node for torchrun, and let each node expand its own number (see slurm_node_number)."
)
WRONG = {
    "another port": "both still think they are rank 0",
    "dist.barrier() first": "it needs the meeting that does not come about",
}
SOURCE = "dougsouza/pytorch-sync-batchnorm-example (rank=local_rank); pytorch/pytorch#73656"


def find(evidence: Evidence) -> Sighting | None:
    """What widefield says of it; or a taken port beside a store that waits for ranks that never come."""
    told = evidence.first(
        r"\b(?:two|\d+) (?:processes|ranks) (?:say|claim|are)\b.*\brank \d+\b", r"rank 0 (?:twice|is there twice|came twice)"
    )
    if told is not None:
        return told
    if evidence.has(r"\b\d+/\d+ clients joined"):
        return evidence.first(r"EADDRINUSE", r"Address already in use")
    return None


CASES: list[tuple[str, str | None]] = [
    (
        "rank0a.log EADDRINUSE, message: address already in use\n"
        "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
        "EADDRINUSE",
    ),
    (
        "widefield: two processes say that they are rank 0 of 2: process 71 on n1, and process 80 on n2; give each its own",
        "two processes",
    ),
    ("name: EADDRINUSE, message: address already in use", None),
]
