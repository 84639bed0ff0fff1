"""Nobody listens at the meeting place, because no node takes its name for its own."""

from __future__ import annotations

TITLE = "nobody serves at the meeting place: no host takes that name for its own, or rank 0 is elsewhere (host name mismatch)"
KIND = "cause"
IS_WEAK = True
PATTERNS = (
    r"The client socket has timed out after \d+ ?m?s while trying to connect to \(?\S+",
    r"The client socket has failed to connect to any network address of \(?\S+",
    r"RendezvousConnectionError",
    r"did not meet the others at \S+ (?:within|in) \d+ s",
    r"the connection to the C10d store has failed",
    r"did not hear from rank 0 at",
)
CAUSE = (
    "torchrun serves the store on the node that recognizes the endpoint's name as its own. A name that differs from "
    "hostname's (n1 and n1.cluster, an InfiniBand name, an alias) is recognized by none, so every node only calls. Or "
    "rank 0 runs on another host than the one in MASTER_ADDR, or a firewall drops the port."
)
REMEDY = (
    "Name rank 0's host as hostname -f says it there, or its IP address; or say who serves: torchrun --rdzv-conf "
    "is_host=1 on the first node, 0 on the others. widefield doctor says on which host rank 0 is, and which ports are "
    "open."
)
WRONG = {
    "SLURM_LAUNCH_NODE_IPADDR": "it is where srun was typed, often a login node, where no rank runs",
    "scontrol ... || echo localhost": "where scontrol is missing, every node forms a world of its own without a word",
    "a longer timeout": "nobody begins to serve by waiting",
}
SOURCE = "pytorch/pytorch#73656 (open since 2022), #137402 (rank 0 is not on MASTER_ADDR), #107021"

CASES: list[tuple[str, str | None]] = [
    (
        "[E1125 10:12:11.8 socket.cpp:1023] [c10d] The client socket has timed out after 60000ms while trying to "
        "connect to (n1-ib, 29500).\n"
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store "
        "has failed. See inner exception for details.",
        "timed out after 60000ms",
    ),
    ("widefield: rank 1 of 2 did not meet the others at n1:29500 within 600 s (wait timeout)", "did not meet"),
    ("[W socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. err=-3", None),
]
