"""Which network interface do messages between machines take, and where do we listen?

gloo and NCCL each look for an interface of their own, and on machines with several they find one that the others cannot reach.
Unless the user has set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, it is the interface of the route to the rendezvous host; for
ranks of one machine it is the loopback, so that nobody else can connect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address (netdevice(7))."""
ELSEWHERE = "192.0.2.1"
"""An address of nobody (RFC 5737), for which the route is the default one."""


def choose_interface(address: str, *, has_one_host: bool) -> str | None:
    """Set the interface of gloo's and NCCL's messages, where the user has not; returns its name, None where none was found.

    address: of the rendezvous host.  has_one_host: all ranks are on this machine.
    """
    name = interface_of("127.0.0.1" if has_one_host else route_to(address))
    for variable in VARIABLES if name is not None else ():
        os.environ.setdefault(variable, str(name))
    return name


def interfaces_in_words() -> str:
    """As `messages go by eth0`; who named it is the user, or `choose_interface`."""
    gloo, nccl = (os.environ.get(variable) for variable in VARIABLES)
    names = f"{gloo}" if gloo == nccl else f"{gloo} (gloo), {nccl} (NCCL)"
    return f"messages go by the interface {names}" if gloo or nccl else "messages go by the interface that gloo and NCCL find"


def route_to(address: str) -> str:
    """This machine's own address on the route to `address`; that of the default route where `address` is a loopback.

    Nothing is sent.  A machine's own name often is a loopback to itself, as Debian's 127.0.1.1, and others cannot reach that.
    """
    found = _own_address(address)
    return _own_address(ELSEWHERE) or found if is_loopback(found) else found


def _own_address(address: str) -> str:
    """The address from which datagrams to `address` would go; "" where there is no route."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`, as eth0; None where none has it, or the system does not tell."""
    return next((name for name, own in addresses() if own == address), None)


def addresses() -> Iterator[tuple[str, str]]:
    """(interface, its address), of IPv4 and then of IPv6, on Linux; nothing elsewhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            yield name, socket.inet_ntoa(answer[20:24])
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            lines = [line.split() for line in table]
    except OSError:
        return
    for line in lines:
        yield line[-1], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))


def listening_socket(address: str, port: int, *, has_one_host: bool) -> socket.socket:
    """A socket that listens at `address`; on the loopback alone where all ranks are on this machine.

    Where `address` is not one of this machine's, as behind a translation of addresses, or is a loopback that others know by
    another address, it listens on all interfaces.  port: 0 for any free one.  OSError: EADDRINUSE, the port is taken.
    """
    if has_one_host:
        return _bound(socket.AF_INET, ("127.0.0.1", port))
    for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM) if address else ():
        if not is_loopback(str(place[0])) and _is_ours(family, str(place[0])):
            return _bound(family, place)
    return _bound(socket.AF_INET6, ("::", port)) if socket.has_dualstack_ipv6() else _bound(socket.AF_INET, ("", port))


def is_of_this_machine(address: str) -> bool:
    """Whether `address` means this machine, or a loopback, by which others may know it at another address."""
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    return any(is_loopback(str(place[0])) or _is_ours(family, str(place[0])) for family, _, _, _, place in found)


def _is_ours(family: int, address: str) -> bool:
    try:
        _bound(family, (address, 0)).close()
    except OSError:
        return False
    return True


def _bound(family: int, place: tuple) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if place[0] == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(place)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
