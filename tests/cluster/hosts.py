"""Hosts that are separate for all that a run sees: own network, name, processes and /etc/hosts, joined by a bridge.

Each is a set of Linux namespaces that live as long as one process.  Killing it is a power cut: the kernel kills all
processes of the host, and its connections end without a word.  The disk is shared, as on a cluster.  Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cluster.cable import Cable, Link, join_by_tap, netem_refusal

T = TypeVar("T")
WAIT_SECONDS = 60.0
_networks = itertools.count()


@dataclass
class Host:
    """A running host.  keeper: the process outside that keeps it; init: its first process, seen from outside.

    cable: the name of the near end of its cable, at the bridge.
    """

    name: str
    address: str
    keeper: subprocess.Popen
    init: int
    cable: str
    started: list[subprocess.Popen] = field(default_factory=list)

    def words(self, *command: str | Path) -> list[str]:
        """A command that runs `command` on this host."""
        into = ["nsenter", f"--target={self.init}", "--net", "--uts", "--mount", "--pid", "--"]
        return [*into, *map(str, command)]

    def start(self, *command: str | Path, **options) -> subprocess.Popen:
        """Run `command` on this host in the background, its output in a pipe."""
        taken = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        self.started.append(subprocess.Popen(self.words(*command), **taken))
        return self.started[-1]

    def run(self, *command: str | Path, **options) -> str:
        """Run `command` on this host to its end; its standard output.  CalledProcessError where its status is not 0."""
        return subprocess.run(self.words(*command), check=True, stdout=subprocess.PIPE, text=True, **options).stdout

    def cut_cable(self) -> None:
        ip("link", "set", self.cable, "down")

    def mend_cable(self) -> None:
        ip("link", "set", self.cable, "up")

    def power_off(self) -> None:
        """End the host and all that runs on it, at once."""
        self.keeper.kill()  # --kill-child: its first process dies with it, and with that all others
        for process in (self.keeper, *self.started):
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        # The kernel takes the cable away too, in its own time.
        subprocess.run(["ip", "link", "delete", self.cable], stderr=subprocess.DEVNULL)


@dataclass
class Network:
    """A bridge and the hosts on it, by name.

    addresses: of all hosts that it may have, by name.  cable: what each is connected by; None for a plain fast one.
    own_loopback_name: each finds its own name at 127.0.1.1, as Debian's installer writes it into /etc/hosts.
    """

    bridge: str
    addresses: dict[str, str]
    cable: Cable | None = None
    own_loopback_name: bool = False
    hosts: dict[str, Host] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    """Cables that are programs of this process."""

    def add(self, name: str) -> Host:
        """Switch a host on."""
        keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        )
        init = wait_for(lambda: first_child(keeper.pid), f"the first process of host {name}")
        host = Host(name, self.addresses[name], keeper, init, f"{self.bridge}{list(self.addresses).index(name)}")
        self.hosts[name] = host
        with tempfile.NamedTemporaryFile("w") as file:  # mounted, it lives as long as the host
            file.write(self._etc_hosts(name))
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            host.run("mount", "--bind", file.name, "/etc/hosts")
        host.run("hostname", name)
        host.run("ip", "link", "set", "lo", "up")
        self._connect(host)
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def _etc_hosts(self, name: str) -> str:
        known = self.addresses | ({name: "127.0.1.1"} if self.own_loopback_name else {})
        return "127.0.0.1 localhost\n" + "".join(f"{where} {who}\n" for who, where in known.items())

    def _connect(self, host: Host) -> None:
        """Lay a cable from the bridge to the host's eth0."""
        if self.cable is not None and netem_refusal() is not None:
            self.links.append(join_by_tap(host.cable, "eth0", init=host.init, cable=self.cable))
        else:
            ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", str(host.init))
        ip("link", "set", host.cable, "master", self.bridge, "up")
        if self.cable is not None and netem_refusal() is None:
            shape = ["qdisc", "add", "root", "netem", *self.cable.netem()]
            subprocess.run(["tc", *shape, "dev", host.cable], check=True)
            host.run("tc", *shape, "dev", "eth0")

    def switch_off(self) -> None:
        for link in self.links:
            link.close()
        for host in self.hosts.values():
            host.power_off()
        ip("link", "delete", self.bridge)


@contextlib.contextmanager
def network(names: Sequence[str], *, cable: Cable | None = None, own_loopback_name: bool = False) -> Iterator[Network]:
    """Hosts with these names on one network, which know each other by name, while the context lasts; see Network."""
    number = next(_networks)
    bridge, subnet = f"wf{os.getpid()}{'abcdefgh'[number % 8]}", f"10.213.{(8 * os.getpid() + number) % 250}"
    addresses = {name: f"{subnet}.{index}" for index, name in enumerate(names, start=2)}
    ip("link", "add", bridge, "type", "bridge")
    made = Network(bridge, addresses, cable, own_loopback_name)
    try:
        ip("link", "set", bridge, "up")
        for name in names:
            made.add(name)
        yield made
    finally:
        made.switch_off()


def environment() -> dict[str, str]:
    """This process's, with one thread per rank, so that sums are in the same order everywhere."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def refusal() -> str | None:
    """Why there can be no hosts on this machine, with what to do; None where there can be."""
    if os.geteuid() != 0:
        return "separate hosts need namespaces and so root; run `sudo make test-cluster`, or in a container with --privileged"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"],
        capture_output=True, text=True,
    )  # fmt: skip
    if tried.returncode == 0:
        return None
    return (
        f"this machine gives no namespaces: unshare ended with {tried.returncode}: {tried.stderr.strip()}; run in a virtual "
        "machine, or in a container with --privileged"
    )


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def first_child(pid: int) -> int | None:
    """The first child of a process, once it runs something else than its parent."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children or Path(f"/proc/{children[0]}/comm").read_text().strip() == "unshare":
        return None
    return int(children[0])


def wait_for(look: Callable[[], T | None], what: str, *, seconds: float = WAIT_SECONDS) -> T:
    """The first result of `look` that is not None (nor False).  AssertionError: it does not come within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found is not None and found is not False:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come within {seconds:.0f} s")
