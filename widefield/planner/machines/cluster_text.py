"""`4x8xH100-80G@ib-ndr` as a Cluster.  Imports no torch.

8xH100            one node of 8 devices
4x8xA100-80G      4 nodes of 8
2xrtx4090         capitals and spaces do not count
...@100gbe        with this network between the nodes
cpu, cpu:2        1 or 2 ranks on this machine, as measured if it was
measured          this machine as it was measured; measured:2 with 2 ranks
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from widefield.cores import usable_cores
from widefield.naming import did_you_mean
from widefield.planner.machines.calibration import Calibration, calibration_path, read_calibration
from widefield.planner.machines.catalogue import (
    ALIASES,
    CPU_LINK,
    DEVICES,
    INSIDE,
    LINKS_ELSE,
    LINKS_OF,
    NETWORK_ALIASES,
    NETWORKS,
    cpu_core,
)
from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.device import Device

RANKS_MOST = 2**20
_SHAPE = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([a-z][a-z0-9-]*|\d{4})(?::(\d+))?(?:@([a-z0-9-]+))?")


def cluster_of(
    text: str,
    *,
    network: str | None = None,
    oversubscription: float = 1.0,
    dollars_per_hour: float | None = None,
    calibration: Calibration | None = None,
) -> Cluster:
    """The Cluster that `text` names.

    network: between the nodes, as in the catalogue, where `text` has no @; None: what such devices usually have.
    oversubscription: see Cluster.  dollars_per_hour: of one device.
    calibration: in place of the one in the user's cache.
    ValueError: no such text, device or network; `measured` without a measurement.
    """
    match = _SHAPE.fullmatch(re.sub(r"\s+", "", text).lower())
    if match is None:
        raise ValueError(f"no cluster: {text!r}; write devices, or nodes x devices, as 8xH100, 4x8xA100-80G or cpu:2")
    if oversubscription < 1:
        raise ValueError(f"oversubscription={oversubscription:g}, and a network is not faster than its cards; write 1 or more")
    first, second, name, count, at = match.groups()
    nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
    if name in ("cpu", "measured"):
        cluster = _here(text, name, nodes, devices, count, at or network, calibration)
    else:
        cluster = _of_gpus(text, name, nodes, devices, count, at or network)
        found = calibration or measured_gpu(cluster.device.name)
        if found is not None:
            cluster = replace(cluster, device=found.device, calibration=found)
    if not 1 <= cluster.ranks <= RANKS_MOST:
        raise ValueError(f"{text!r} has {cluster.ranks} devices; write 1 to {RANKS_MOST:,}")
    priced = replace(cluster.device, dollars_per_hour=dollars_per_hour)
    return replace(cluster, device=priced, oversubscription=oversubscription)


def _of_gpus(text: str, name: str, nodes: int, devices: int, count: str | None, network: str | None) -> Cluster:
    key = ALIASES.get(name, name)
    if key not in DEVICES:
        known = [*DEVICES, *ALIASES, "cpu", "measured"]
        names = ", ".join(device.name for device in DEVICES.values())
        raise ValueError(
            f"{text!r}: no device {name!r} in the catalogue{did_you_mean(name, known)} It has: {names}, cpu, measured."
        )
    if count is not None:
        raise ValueError(f"{text!r}: the number of GPUs comes first; write {count}x{name}")
    inside, usual = LINKS_OF.get(key, LINKS_ELSE)
    between = NETWORKS[_network(network or usual)].link(devices)
    return Cluster(text, nodes, devices, DEVICES[key], INSIDE[inside], between)


def _network(name: str) -> str:
    key = NETWORK_ALIASES.get(name.lower(), name.lower())
    if key not in NETWORKS:
        hint = did_you_mean(key, [*NETWORKS, *NETWORK_ALIASES])
        raise ValueError(f"no network {name!r} in the catalogue{hint} It has: {', '.join(NETWORKS)}.")
    return key


def _here(
    text: str, name: str, nodes: int, devices: int, count: str | None, network: str | None, calibration: Calibration | None
) -> Cluster:
    """This machine, or several like it."""
    if count is not None and devices > 1:
        raise ValueError(f"{text!r} gives the ranks of a machine twice; write {name}:{count}")
    devices = int(count) if count is not None else devices
    if devices < 1:
        raise ValueError(f"{text!r} has {devices} ranks; write {name}:1 or more")
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, usable_cores() // devices))
    calibration = calibration or (_of_file("cuda", 0) if name == "measured" else None) or _measured_cpu(threads)
    if name == "measured" and calibration is None:
        raise ValueError("measured: this machine was not measured yet; run widefield plan --calibrate, or name a device")
    device: Device = cpu_core(_machine_bytes() // devices) if calibration is None else calibration.device
    if device.is_cpu:
        device = replace(device, memory_bytes=_machine_bytes() // devices)
    inside = CPU_LINK if calibration is None else calibration.link
    if not device.is_cpu:
        inside = INSIDE[LINKS_OF.get(device.name.lower(), LINKS_ELSE)[0]]
    between = inside if nodes == 1 else NETWORKS[_network(network or "10gbe")].link(devices)
    notes = () if calibration is None or not device.is_cpu else _other_threads(calibration, threads)
    return Cluster(text, nodes, devices, device, inside, between, calibration=calibration, notes=notes)


def _of_file(kind: str, threads: int) -> Calibration | None:
    path = calibration_path(kind, threads)
    return read_calibration(path) if path.exists() else None


def _measured_cpu(threads: int) -> Calibration | None:
    """What was measured with the threads that a rank has, as the launcher sets them; else with others, the newest."""
    return _of_file("cpu", threads) or read_calibration(kind="cpu")


def _other_threads(calibration: Calibration, threads: int) -> tuple[str, ...]:
    """A sentence where the measurement was of ranks with another number of threads."""
    measured = calibration.conditions.get("threads", str(threads))
    if measured == str(threads):
        return ()
    return (
        f"a rank has {threads} threads here and was measured with {measured}, so times are off; measure again with "
        f"OMP_NUM_THREADS={threads} widefield plan --calibrate",
    )


def measured_gpu(name: str) -> Calibration | None:
    """What was measured on this machine's GPU, if it is a device of that name."""
    found = _of_file("cuda", 0)
    return found if found is not None and found.device.name == name else None


def _machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
