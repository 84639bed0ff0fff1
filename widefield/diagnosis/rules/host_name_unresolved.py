"""A host's name has no address."""

from __future__ import annotations

TITLE = "a host's name cannot be resolved"
KIND = "cause"
PATTERNS = (
    r"addresses of \(?\S+, \d+\)? cannot be retrieved",
    r"gai error: -?\d+ - (?:Name or service not known|Temporary failure in name resolution)",
    r"\[Errno -[23]\] (?:Name or service not known|Temporary failure in name resolution)",
    r"cannot resolve the meeting place",
    r"Temporary failure in name resolution",
    r"Name or service not known",
)
CAUSE = (
    "The name in MASTER_ADDR, or in --rdzv-endpoint, has no address on this host: a short name that is known on one "
    "machine alone, a pod whose headless service is missing, or a container without the host's /etc/hosts."
)
REMEDY = (
    "Take a name that getent hosts NAME answers on every host, or rank 0's IP address. In Kubernetes the pods need a "
    "headless service, and some seconds until it answers."
)
WRONG = {
    "MASTER_ADDR=localhost": "every machine then meets itself alone, and each trains a model of its own",
    "a longer timeout": "the name gets no address by waiting",
}
SOURCE = "pytorch/pytorch#73656; pith-train#91"

CASES: list[tuple[str, str | None]] = [
    (
        "[W1125 10:02:11.1 socket.cpp:767] [c10d] The IPv4 network addresses of (node-a, 29500) cannot be "
        "retrieved (gai error: -2 - Name or service not known).",
        "cannot be retrieved",
    ),
    (
        "widefield: rank 1 of 2 cannot resolve the meeting place node-a:29500 ([Errno -2] Name or service not "
        "known); the environment of torchrun names it",
        "rank 1 of 2",
    ),
    ("[W socket.cpp:204] [c10d] The hostname of the client socket cannot be retrieved. err=-3", None),
]
