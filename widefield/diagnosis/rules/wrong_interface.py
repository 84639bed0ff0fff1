"""Messages go through a network card that the other machines do not reach."""

from __future__ import annotations

TITLE = "messages go through the wrong network interface"
KIND = "cause"
PATTERNS = (
    r"Bootstrap : no socket interface found",
    r"(?:Connect to|connect to) (?:172\.1[6-9]|172\.2\d|172\.3[01]|127\.0)\.\S+ failed",
    r"No interface found in the same subnet",
    r"No usable listening interface found",
    r"socketStartConnect: Connect to \S+ failed",
    r"Connect to \S+<\d+> failed : (?:Connection (?:refused|timed out)|No route to host|Software caused connection abort)",
    r"Unable to find address for:? ?\S+",
    r"Unable to resolve hostname to a \(local\) address",
)
CAUSE = (
    "NCCL and gloo took an address that only this host has: docker0 (172.17.x), a bridge, or 127.0.1.1, to which Debian "
    "and Ubuntu resolve the host's own name."
)
REMEDY = (
    "Name the card that the hosts share: NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0 (ip -br address shows the "
    "names), on every host its own; containers with --network host. Take 127.0.1.1 out of /etc/hosts."
)
WRONG = {
    "NCCL_IB_DISABLE=1": "the first contact is over TCP anyway; it only makes what works slow",
    "NCCL_SOCKET_IFNAME=lo": "it reaches no other host",
    "a longer timeout": "no answer will come from that address",
}
SOURCE = "nccl#286, #913, #929; gloo's host name"

CASES: list[tuple[str, str | None]] = [
    (
        "n2:1203:1227 [0] misc/socket.cc:480 NCCL WARN socketStartConnect: Connect to 172.17.0.2<38847> failed : "
        "Software caused connection abort",
        "172.17.0.2",
    ),
    ("n1:12:12 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found", "no socket interface"),
    ("n1:12:12 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>", None),
]
