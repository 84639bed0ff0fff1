"""Nodes of equal devices, and the links between them.  Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from widefield.planner.machines.calibration import Calibration
from widefield.planner.machines.device import Device
from widefield.planner.machines.link import Link


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `devices_per_node` devices each, one rank on each device; ranks are numbered node by node.

    inside: between two ranks of a node.  between: between nodes; it may be `inside` where there is one node.
    oversubscription: by how much slower than `between` the network is when all nodes send at once, 1 or more.
    calibration: what was measured on this machine; None: figures of data sheets alone.
    notes: sentences about the figures, which are part of the advice.
    """

    text: str
    nodes: int
    devices_per_node: int
    device: Device
    inside: Link
    between: Link
    oversubscription: float = 1.0
    calibration: Calibration | None = None
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def spread(self, ranks: Sequence[int]) -> tuple[int, int]:
        """(nodes, ranks per node) of a group: how many nodes it has ranks on, and how many on the fullest."""
        on_nodes = Counter(self.node_of(rank) for rank in ranks)
        return len(on_nodes), max(on_nodes.values())

    def link_of(self, ranks: Sequence[int]) -> Link:
        """The slowest link that a group's messages cross."""
        return self.inside if self.spread(ranks)[0] == 1 else self.between

    def network_bytes_per_second(self) -> float:
        """Of one rank between nodes, while all nodes send."""
        return self.between.bytes_per_second / self.oversubscription

    def dollars_per_hour(self) -> float | None:
        price = self.device.dollars_per_hour
        return None if price is None else price * self.ranks

    def advice(self) -> list[str]:
        """Sentences about what will hold the cluster up, by rules of thumb; none where nothing will.

        A network should carry at least a tenth of what a device's memory does, in one unit: 900 GB/s of memory want 90 GB/s
        of network, which is 720 Gbit/s.
        """
        found = list(self.notes)
        wanted, has = self.device.memory_bytes_per_second / 10, self.network_bytes_per_second()
        if self.nodes > 1 and has < wanted:
            memory = f"{self.device.memory_bytes_per_second / 1e9:,.0f} GB/s"
            found.append(
                f"the network ({self.between.name}) gives each {self.device.name} {_rate(has)}, less than a tenth of its "
                f"memory's {memory}, which would be {_rate(wanted)}: keep tiles, channels and shards of weights inside a node, "
                "and let replicas alone send between nodes"
            )
        if self.ranks > 1 and not self.device.is_cpu and self.inside.kind == "pcie":
            found.append(
                f"devices of a node are connected by {self.inside.name} ({_rate(self.inside.bytes_per_second)} each), not by "
                "NVLink: cutting channels or weights costs more than copies do"
            )
        if self.ranks > 1:
            found.append("all ranks count as equal: the slowest device sets the pace of every step, so do not mix kinds")
        return found


def _rate(bytes_per_second: float) -> str:
    """`90 GB/s (720 Gbit/s)`."""
    bytes_each, bits_each = bytes_per_second / 1e9, bytes_per_second * 8 / 1e9
    return f"{bytes_each:,.{0 if bytes_each >= 10 else 2}f} GB/s ({bits_each:,.{0 if bits_each >= 10 else 1}f} Gbit/s)"
