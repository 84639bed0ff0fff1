"""Messages that were timed here, beside what the named machines, or such machines as these, should give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from widefield.comm.link_times import message_seconds
from widefield.diagnosis.finding import Facts, Finding
from widefield.diagnosis.place import Surroundings
from widefield.planner.cost.message_time import among
from widefield.planner.machines import Cluster, cluster_of
from widefield.planner.machines.catalogue import gpu_named
from widefield.quantity import bytes_text

SIZES = {"cpu": (2**10, 2**22), "cuda": (2**12, 2**26)}
"""Bytes of a message of which the latency counts, and of one of which the bandwidth counts."""
WARN, BAD = 0.5, 0.15
"""Shares of the expected speed below which it is told."""


def timed(surroundings: Surroundings, kind: str) -> dict[str, Any]:
    """Seconds of a kind of message at two sizes, and what is expected.  Every rank calls it."""
    mesh = surroundings.mesh
    if mesh is None or mesh.group is None:
        return {"seconds": []}
    sizes = SIZES[mesh.device.type]
    found = message_seconds(sizes, group=mesh.group, device=mesh.device, kinds=(kind,))
    cluster = _cluster_of(surroundings)
    each = min(cluster.devices_per_node, mesh.world.local_size)
    nodes = -(-mesh.size // each)
    asked = "send" if kind == "halo" else kind
    if kind == "halo":  # its slowest neighbours are on two hosts, where there are several
        expected = [among(asked, 2 * size, min(2, nodes), 2 if nodes == 1 else 1, cluster) for _, size, _ in found]
    else:
        expected = [among(asked, size, nodes, each, cluster) for _, size, _ in found]
    link = cluster.inside if nodes == 1 else cluster.between
    return {
        "bytes": [size for _, size, _ in found], "seconds": [seconds for *_, seconds in found], "expected": expected,
        "link": link.name, "on_cpu": mesh.device.type == "cpu",
    }  # fmt: skip


def _cluster_of(surroundings: Surroundings) -> Cluster:
    """The named machines, or such as these."""
    mesh = surroundings.mesh
    assert mesh is not None, "messages are timed between ranks that have met"
    if surroundings.cluster is not None:
        return surroundings.cluster
    each = mesh.world.local_size
    nodes = -(-mesh.size // each)
    if mesh.device.type == "cpu":
        return cluster_of(f"cpu:{each}" if nodes == 1 else f"{nodes}x1xcpu:{each}")
    import torch

    known = gpu_named(torch.cuda.get_device_name(mesh.device), torch.cuda.get_device_properties(mesh.device).total_memory)
    return cluster_of(f"{nodes}x{each}x{known.name if known else 'A100-80G'}")


def judged(facts: Sequence[Facts], what: str) -> Finding:
    """The slowest rank's time beside what is expected."""
    with_times = [one for one in facts if one.get("seconds")]
    if not with_times:
        return Finding("not here", "one rank sends no messages")
    slowest = max(with_times, key=lambda one: one["seconds"][-1])
    size, seconds, expected = (slowest[key][-1] for key in ("bytes", "seconds", "expected"))
    share, rate = expected / max(seconds, 1e-12), size / max(seconds, 1e-12)
    figure = (
        f"{bytes_text(size)} in {1e3 * seconds:.2f} ms ({rate / 1e9:.2f} GB/s), {100 * share:.0f} % of what {slowest['link']} "
        f"should give; a small one in {1e6 * slowest['seconds'][0]:.0f} us"
    )
    state = "ok" if share >= WARN else "warn" if share >= BAD or slowest["on_cpu"] else "bad"
    return Finding(state, figure, f"{what}: {REMEDY_CPU if slowest['on_cpu'] else REMEDY}")  # type: ignore[arg-type]


REMEDY = (
    "NCCL_DEBUG=INFO says which way NCCL goes: SHM or NET/Socket where P2P or NET/IB was meant is the reason. See the checks "
    "of links and of interfaces; unset NCCL_P2P_DISABLE and NCCL_IB_DISABLE; nvidia-smi topo -m shows how GPUs are connected"
)
REMEDY_CPU = (
    "other programs take the cores, or the ranks have more threads than there are cores; measure the machine when it is idle "
    "with widefield plan --calibrate, and doctor compares with that"
)
