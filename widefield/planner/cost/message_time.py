"""How long is a message under way?  As measured on this machine, or by latency and bandwidth of the links that it crosses.

Of p ranks and m bytes, with latency a and b seconds a byte (Thakur, Rabenseifner, Gropp 2005; NCCL's ring and tree):

    all_reduce       ring 2(p-1)a + 2(p-1)/p m b; tree 2 log2(p) a + 2 m b; the faster of them
                     on several nodes: reduce-scatter inside a node, all-reduce of its share between nodes, all-gather inside
    all_gather, reduce_scatter, all_to_all   ring (p-1)a + (p-1)/p m b; by doubling log2(p) a + 5/4 (p-1)/p m b   (m: the whole)
    broadcast        log2(p) a + m b
    send, receive    a + m b
    barrier          2 log2(p) a

The number of ranks is a number here: a group of 16,384 costs as much to price as one of 2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from widefield.planner.cost.op_time import Timed
from widefield.planner.machines.calibration import SentMessage
from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.link import Link
from widefield.planner.step_record import MessageEvent


class MessageTimes:
    """Seconds of messages on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        calibration = cluster.calibration if cluster.nodes == 1 else None
        self.measured = _curves([] if calibration is None else calibration.messages)
        self.known: dict[tuple, Timed] = {}

    def of(self, event: MessageEvent, rank: int) -> Timed:
        """rank: whose record has the event."""
        ends = (min(rank, event.peer), max(rank, event.peer)) if event.peer is not None else event.ranks
        kind = "send" if event.kind == "receive" else event.kind
        key = (kind, event.bytes, ends)
        if key not in self.known:
            self.known[key] = self._time(kind, event.bytes, ends)
        return self.known[key]

    def _time(self, kind: str, size: int, ranks: tuple[int, ...]) -> Timed:
        if len(set(ranks)) < 2:
            return Timed(0.0, "measured")
        count, by_ranks = len(ranks), self.measured.get(kind, {})
        if not by_ranks:
            return Timed(among(kind, size, *self.cluster.spread(ranks), self.cluster), "interpolated")
        nearest = min(by_ranks, key=lambda one: abs(math.log(one / count)))
        seconds = _on_curve(by_ranks[nearest], size)
        if nearest == count:
            return Timed(seconds, "measured")
        link = self.cluster.inside
        return Timed(seconds * within(kind, size, count, link) / within(kind, size, nearest, link), "interpolated")


def within(kind: str, size: int, ranks: int, link: Link) -> float:
    """Seconds of a message of `size` bytes, as MessageEvent has them, among ranks that one class of link connects."""
    a, b, steps = link.latency_seconds, 1 / link.bytes_per_second, math.ceil(math.log2(max(2, ranks)))
    share = (ranks - 1) / ranks
    if kind == "all_reduce":
        return min(2 * (ranks - 1) * a + 2 * share * size * b, 2 * steps * a + 2 * size * b)
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        whole = size * ranks if kind == "all_gather" else size
        return min((ranks - 1) * a + share * whole * b, steps * a + 1.25 * share * whole * b)
    if kind == "broadcast":
        return steps * a + size * b
    return 2 * steps * a if kind == "barrier" else a + size * b


def among(kind: str, size: int, nodes: int, each: int, cluster: Cluster) -> float:
    """Seconds among `each` ranks on each of `nodes` nodes: inside a node, between nodes by shares, inside again."""
    inside = cluster.inside
    if nodes == 1:
        return within(kind, size, each, inside)
    link = cluster.between
    network = Link(link.name, link.kind, link.latency_seconds, cluster.network_bytes_per_second(), link.source)
    if each == 1:
        return within(kind, size, nodes, network)
    if kind == "all_reduce":
        part = -(-size // each)
        scattered = within("reduce_scatter", size, each, inside) + within("all_gather", part, each, inside)
        return min(scattered + within("all_reduce", part, nodes, network), within(kind, size, nodes * each, network))
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        whole = size * nodes * each if kind == "all_gather" else size
        crossing = within("reduce_scatter", -(-whole // each), nodes, network)
        return max(within("reduce_scatter", whole, each, inside), crossing) + min(inside.latency_seconds, link.latency_seconds)
    return within(kind, size, nodes, network) + within(kind, size, each, inside)


def _curves(messages: Sequence[SentMessage]) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """(bytes, seconds) in order of bytes, by kind and number of ranks."""
    found: dict[str, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for one in sorted(messages, key=lambda one: one.bytes):
        found[one.kind][one.ranks].append((one.bytes, one.seconds))
    return {kind: dict(by_ranks) for kind, by_ranks in found.items()}


def _on_curve(points: list[tuple[int, float]], size: int) -> float:
    """Seconds at `size` bytes: linear between measured sizes, in proportion beyond the largest, the smallest's below."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in zip(points, points[1:], strict=False):
        if size <= high:
            return before + (after - before) * (size - low) / (high - low)
    return points[-1][1] * size / points[-1][0]
