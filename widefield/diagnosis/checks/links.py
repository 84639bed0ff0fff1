"""How are GPUs and hosts connected?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from widefield.diagnosis.finding import Facts, Finding, State, differing, who
from widefield.diagnosis.place import Surroundings

ORDER, TITLE, MESSAGES = 30, "links", False
INFINIBAND, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


def look(surroundings: Surroundings) -> dict[str, Any]:
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    return {
        "pairs": len(pairs), "reached": sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        "infiniband": _infiniband(), "ethernet_mbit": _ethernet(), "several": surroundings.several,
    }  # fmt: skip


def _infiniband() -> list[str]:
    """`mlx5_0 ACTIVE 400 Gb/sec` of each port."""
    found = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        state, rate = (_text(port / name) for name in ("state", "rate"))
        found.append(f"{port.parts[-3]} {state.partition(': ')[2] or state} {rate.partition(' (')[0]}")
    return found


def _ethernet() -> int:
    """The fastest card's rate; 0 where none tells it."""
    rates = [_text(path) for path in NETWORK.glob("*/speed")]
    return max((int(rate) for rate in rates if rate.isdecimal()), default=0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def judge(facts: Sequence[Facts]) -> Finding:
    apart = [one for one in facts if one["reached"] < one["pairs"]]
    if apart:
        figure = f"{who(apart)}: {apart[0]['reached']} of {apart[0]['pairs']} pairs of GPUs reach each other's memory"
        return Finding("warn", figure, "messages go through the host; see nvidia-smi topo -m, and ACS in the BIOS or the VM")
    down = [one for one in facts if any(" ACTIVE " not in f"{port} " for port in one["infiniband"])]
    if down:
        ports = ", ".join(port for port in down[0]["infiniband"] if " ACTIVE " not in f"{port} ")
        return Finding("warn", f"{who(down)}: a port is down: {ports}", "ibstat; NCCL uses the others, and is slower")
    if told := differing(facts, "infiniband"):
        return Finding("warn", f"InfiniBand differs: {told}", "the slowest host sets the pace")
    first = facts[0]
    parts = [f"{first['pairs']} pairs of GPUs reach each other"] if first["pairs"] else []
    parts += [", ".join(first["infiniband"])] if first["infiniband"] else []
    parts += [f"Ethernet {first['ethernet_mbit'] / 1000:g} Gbit/s"] if first["ethernet_mbit"] else []
    if first["several"] and 0 < first["ethernet_mbit"] < 10_000 and not first["infiniband"]:
        return Finding(
            "warn", ", ".join(parts), "slow between hosts: keep tiles and shards inside a host (mesh.replicate between)"
        )
    return (
        Finding("ok", ", ".join(parts))
        if parts
        else Finding("not here", "one GPU or none on one host, or none that tells its links")
    )


_ONE = {"rank": 0, "host": "n1", "pairs": 1, "reached": 1, "infiniband": ["mlx5_0 ACTIVE 400 Gb/sec"], "ethernet_mbit": 25000,
        "several": True}  # fmt: skip

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE], "ok", "1 pairs of GPUs reach each other, mlx5_0 ACTIVE 400 Gb/sec, Ethernet 25 Gbit/s"),
    ([{**_ONE, "pairs": 0, "reached": 0, "infiniband": [], "ethernet_mbit": 0}], "not here", "none that tells"),
    ([{**_ONE, "reached": 0}], "warn", "0 of 1 pairs of GPUs"),
    ([{**_ONE, "infiniband": ["mlx5_0 DOWN 400 Gb/sec"]}], "warn", "a port is down: mlx5_0 DOWN"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "infiniband": []}], "warn", "InfiniBand differs"),
    ([{**_ONE, "infiniband": [], "ethernet_mbit": 1000}], "warn", "Ethernet 1 Gbit/s"),
]
