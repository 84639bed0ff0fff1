"""The port of the meeting place is taken."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

TITLE = "the port of the meeting place is in use"
KIND = "cause"
IS_WEAK = True
CAUSE = (
    "Another process has it: a run that has not ended, another user's job on a shared machine, or a second process that "
    "thinks it is rank 0."
)
REMEDY = (
    "See who has it: ss -ltnp | grep PORT. End what is left of the earlier run, or take another port: MASTER_PORT, "
    "torchrun --standalone or --rdzv-endpoint host:0 choose a free one."
)
WRONG = {
    "killall python": "it ends other people's runs, and your own",
    "a random port in each process": "all ranks must have the same",
}
SOURCE = "pytorch/pytorch, TCPStore"


def find(evidence: Evidence) -> Sighting | None:
    """A taken port, where no other process waits for ranks that never come: that would be two rank 0s."""
    if evidence.has(r"\d+/\d+ clients joined"):
        return None
    told = (r"another program has port \d+ of", r"came to \S+, where job .* meets")
    return evidence.first(
        *told, r"EADDRINUSE", r"Address already in use", r"[Ff]ailed to (?:bind|listen).*[Aa]ddress already in use"
    )


CASES: list[tuple[str, str | None]] = [
    (
        "[E1125 10:00:01.2 socket.cpp:1000] [c10d] The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "EADDRINUSE",
    ),
    ("widefield: rank 0 cannot listen at n1:29500: another program has port 29500 of n1; end it", "another program"),
    ("OSError: [Errno 98] Address already in use", "Errno 98"),
    (
        "EADDRINUSE, message: address already in use\n"
        "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 clients joined.",
        None,
    ),
]
