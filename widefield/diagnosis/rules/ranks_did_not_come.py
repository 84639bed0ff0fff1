"""Some ranks never joined."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "some ranks never came to the meeting place"
KIND = "cause"
CAUSE = (
    "They were not started, ended before they could join, wait at another address or port, or have another's number, so "
    "that two joined as one."
)
REMEDY = (
    "See that as many processes were started as WORLD_SIZE says, and the logs of those that are missing: an import that "
    "fails on one node ends its ranks at once. srun widefield doctor lists all ranks and their hosts."
)
WRONG = {
    "a longer timeout": "it helps where nodes start minutes apart, and nowhere else",
}
SOURCE = "pytorch/pytorch, TCPStore; submitit#1613"


def find(evidence: Evidence) -> Sighting | None:
    """A store that waited in vain; where a port was taken too, it is two_rank_zeros."""
    if evidence.has(r"EADDRINUSE"):
        return None
    for seen in evidence.all(r"(?P<there>\d+)/(?P<all>\d+) clients joined"):
        there, wanted = int(seen.groups["there"]), int(seen.groups["all"])
        if there < wanted:
            return Sighting(seen.line, seen.groups, f"{wanted - there} of {wanted} ranks did not come.")
    return evidence.first(
        r"ranks? [\d, and]+ (?:and \d+ more )?of \d+ did not come to \S+ within",
        r"RendezvousTimeoutError",
        r"Waiting for \d+ more nodes.*timed out",
    )


CASES: list[tuple[str, str | None]] = [
    (
        "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 4/8 clients joined.",
        "4/8 clients",
    ),
    ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "RendezvousTimeoutError"),
    (
        "EADDRINUSE\ntorch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
        None,
    ),
    ("widefield: rank 1 of 2 did not come to n1:29500 within 600 s; 1 came, as rank 0, process 7 on n1.", "rank 1 of 2"),
    ("8/8 clients joined.", None),
]
