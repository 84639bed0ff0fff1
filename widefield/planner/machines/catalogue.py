"""Common GPUs and networks.  Each row names its source; figures are peaks, without sparsity.  Imports no torch.

What large kernels reach of the peaks is `flops_reached` and `bandwidth_reached` of Device; see cost/op_time.py for what they
were compared with.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

from widefield.planner.machines.device import Device
from widefield.planner.machines.link import Link

GB, T = 1e9, 1e12
LAUNCH_SECONDS = 40e-6
"""Between two operations that eager PyTorch starts, with its modules, autograd and autocast: 36 to 65 microseconds in steps of
four models whose kernels are short, on the hosts of an H100 and an H200."""
CONTEXT_BYTES = 500 * 2**20
"""CUDA's context with cuDNN and cuBLAS loaded: 300 to 600 MiB by driver and device."""


@dataclass(frozen=True)
class Network:
    """Links between nodes.

    nic_bytes_per_second: of one card, in one direction.  per_device: whether every device has a card of its own, as in DGX
    nodes, or a node has one for all.
    """

    title: str
    latency_seconds: float
    nic_bytes_per_second: float
    per_device: bool
    source: str

    def link(self, devices_per_node: int) -> Link:
        """The share of one rank while all ranks of its node send."""
        share = self.nic_bytes_per_second / (1 if self.per_device else devices_per_node)
        return Link(self.title, "network", self.latency_seconds, share * 0.9, self.source)


def _gpu(name: str, memory_gib: float, bandwidth_gb: float, tflops: tuple[float, ...], source: str, **more: Any) -> Device:
    """memory_gib: what torch reports as the device's total, which is below the data sheet's.  tflops: of float64, float32,
    tf32, bfloat16 and float16; 0 where it has none of its own."""
    names = ("float64", "float32", "tf32", "bfloat16", "float16")
    return Device(
        name,
        int(memory_gib * 2**30),
        bandwidth_gb * GB,
        {key: value * T for key, value in zip(names, tflops, strict=True) if value},
        LAUNCH_SECONDS,
        CONTEXT_BYTES,
        512,
        source=source,
        **more,
    )


_V100 = (7.8, 15.7, 0, 0, 125)
_A100 = (19.5, 19.5, 156, 312, 312)
_AMPERE_3090 = (0.56, 35.6, 35.6, 71, 71)

DEVICES: dict[str, Device] = {
    device.name.lower(): device
    for device in (
        _gpu("V100-16G", 15.77, 900, _V100, "NVIDIA V100 data sheet (SXM2), January 2020"),
        _gpu("V100-32G", 31.74, 900, _V100, "NVIDIA V100 data sheet (SXM2), January 2020"),
        _gpu("A100-40G", 39.39, 1555, _A100, "NVIDIA A100 data sheet (SXM 40 GB), June 2021"),
        _gpu("A100-80G", 79.15, 2039, _A100, "NVIDIA A100 data sheet (SXM 80 GB), June 2021"),
        _gpu("H100-80G", 79.1, 3350, (67, 67, 494.5, 989.5, 989.5), "NVIDIA H100 data sheet (SXM5), dense"),
        _gpu("H100-PCIe", 79.1, 2000, (51, 51, 378, 756, 756), "NVIDIA H100 data sheet (PCIe), dense"),
        _gpu("H200", 139.8, 4800, (67, 67, 494.5, 989.5, 989.5), "NVIDIA H200 data sheet (SXM), dense"),
        _gpu("B200", 178.3, 7700, (37, 75, 1100, 2250, 2250), "NVIDIA HGX B200 data sheet, per GPU, dense"),
        _gpu("L4", 22.17, 300, (0.47, 30.3, 60, 121, 121), "NVIDIA L4 data sheet, dense"),
        _gpu("L40S", 44.4, 864, (1.4, 91.6, 183, 362, 362), "NVIDIA L40S data sheet, dense"),
        _gpu("A10", 22.06, 600, (0.97, 31.2, 62.5, 125, 125), "NVIDIA A10 data sheet, dense"),
        _gpu("T4", 14.6, 320, (0.25, 8.1, 0, 0, 65), "NVIDIA T4 data sheet", flops_reached=0.45),
        _gpu("RTX3090", 23.69, 936, _AMPERE_3090, "NVIDIA Ampere GA102 whitepaper, table 3, dense"),
        _gpu(
            "RTX4090",
            23.64,
            1008,
            (1.29, 82.6, 82.6, 165.2, 165.2),
            "NVIDIA Ada whitepaper, appendix A, dense",
        ),
        _gpu(
            "RTX5090",
            31.36,
            1792,
            (1.64, 104.8, 104.8, 209.5, 209.5),
            "NVIDIA RTX Blackwell whitepaper, dense",
        ),
        _gpu("A6000", 47.5, 768, (0.6, 38.7, 77.4, 154.8, 154.8), "NVIDIA RTX A6000 data sheet and GA102 whitepaper, dense"),
        _gpu(
            "MI250X", 63.98, 1638, (47.9, 47.9, 0, 191.5, 191.5), "AMD Instinct MI250X data sheet, one of its two dies, matrix"
        ),
        _gpu("MI300X", 191.98, 5300, (163.4, 163.4, 653.7, 1307.4, 1307.4), "AMD Instinct MI300X data sheet, matrix"),
    )
}
ALIASES = {
    "v100": "v100-16g", "a100": "a100-80g", "h100": "h100-80g", "h100-sxm": "h100-80g", "h100-80g-sxm": "h100-80g",
    "h100-80g-pcie": "h100-pcie", "h200-141g": "h200", "b200-180g": "b200", "l4-24g": "l4", "l40s-48g": "l40s",
    "a10-24g": "a10", "a10g": "a10", "t4-16g": "t4", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090",
    "rtx-a6000": "a6000", "rtxa6000": "a6000", "mi300x-192g": "mi300x",
}  # fmt: skip

NCCL_LATENCY = 4e-6
"""Of one step of a ring inside a node; NCCL's own tuning table has 3 to 6 microseconds (src/graph/tuning.cc, LL and simple)."""
INSIDE: dict[str, Link] = {
    "nvlink3": Link("NVLink 3", "nvlink", NCCL_LATENCY, 240e9, "NVIDIA A100 data sheet: 600 GB/s both ways; NCCL reaches 80 %"),
    "nvlink2": Link("NVLink 2", "nvlink", NCCL_LATENCY, 120e9, "NVIDIA V100 data sheet: 300 GB/s both ways; NCCL reaches 80 %"),
    "nvlink4": Link("NVLink 4", "nvlink", NCCL_LATENCY, 360e9, "NVIDIA H100 data sheet: 900 GB/s both ways; NCCL reaches 80 %"),
    "nvlink5": Link("NVLink 5", "nvlink", NCCL_LATENCY, 720e9, "NVIDIA HGX B200 data sheet: 1.8 TB/s both ways; 80 % of it"),
    "infinity": Link("Infinity Fabric", "nvlink", 6e-6, 250e9, "AMD Instinct MI300X data sheet: 7 links of 64 GB/s"),
    "pcie3": Link("PCIe 3 x16", "pcie", 8e-6, 10e9, "PCI-SIG: 15.8 GB/s a direction; copies between cards reach some 10"),
    "pcie4": Link("PCIe 4 x16", "pcie", 8e-6, 20e9, "PCI-SIG: 31.5 GB/s a direction; copies between cards reach some 20"),
    "pcie5": Link("PCIe 5 x16", "pcie", 8e-6, 40e9, "PCI-SIG: 63 GB/s a direction; copies between cards reach some 40"),
}
NETWORKS: dict[str, Network] = {
    "ib-hdr": Network("InfiniBand HDR", 5e-6, 25e9, True, "NVIDIA ConnectX-6 data sheet: 200 Gbit/s; a card for each GPU"),
    "ib-ndr": Network("InfiniBand NDR", 5e-6, 50e9, True, "NVIDIA ConnectX-7 data sheet: 400 Gbit/s; a card for each GPU"),
    "100gbe": Network("100 Gbit Ethernet", 12e-6, 12.5e9, False, "IEEE 802.3: 100 Gbit/s, one card for a node"),
    "25gbe": Network("25 Gbit Ethernet", 25e-6, 3.125e9, False, "IEEE 802.3: 25 Gbit/s, one card for a node"),
    "10gbe": Network("10 Gbit Ethernet", 40e-6, 1.25e9, False, "IEEE 802.3: 10 Gbit/s, one card for a node"),
    "1gbe": Network("Gigabit Ethernet", 60e-6, 0.125e9, False, "IEEE 802.3: 1 Gbit/s, one card for a node"),
}
NETWORK_ALIASES = {"ib": "ib-ndr", "infiniband": "ib-ndr", "hdr": "ib-hdr", "ndr": "ib-ndr", "ethernet": "100gbe"}
LINKS_OF: dict[str, tuple[str, str]] = {
    "v100-16g": ("nvlink2", "100gbe"), "v100-32g": ("nvlink2", "100gbe"), "a100-40g": ("nvlink3", "ib-hdr"),
    "a100-80g": ("nvlink3", "ib-hdr"), "h100-80g": ("nvlink4", "ib-ndr"), "h200": ("nvlink4", "ib-ndr"),
    "b200": ("nvlink5", "ib-ndr"), "mi250x": ("infinity", "ib-hdr"), "mi300x": ("infinity", "ib-ndr"),
    "h100-pcie": ("pcie5", "100gbe"), "l40s": ("pcie4", "100gbe"), "rtx5090": ("pcie5", "10gbe"), "t4": ("pcie3", "25gbe"),
    "rtx3090": ("pcie4", "10gbe"), "rtx4090": ("pcie4", "10gbe"),
}  # fmt: skip
"""The links inside a node and between nodes that such devices usually have; the rest has `LINKS_ELSE`."""
LINKS_ELSE = ("pcie4", "25gbe")

CPU_LINK = Link("gloo over loopback", "gloo", 150e-6, 1.0e9, "measured on 2 cores of a Xeon (2.3 GHz), torch 2.14, gloo")
CPU_CORE = Device(
    "cpu",
    4 * 2**30,
    10e9,
    {"float64": 25e9, "float32": 50e9},
    5e-6,
    is_cpu=True,
    source="a core with AVX2 at 3 GHz and its share of two channels of DDR4; measure yours with widefield plan --calibrate",
)


def cpu_core(memory_bytes: int | None = None) -> Device:
    """A core where nothing was measured.  memory_bytes: of one rank."""
    return CPU_CORE if memory_bytes is None else replace(CPU_CORE, memory_bytes=memory_bytes)


def gpu_named(name: str, memory_bytes: int = 0) -> Device | None:
    """The row of a GPU by the name that its driver gives it, as `NVIDIA A100-SXM4-80GB`; None: the catalogue has no such GPU.

    memory_bytes: that the device has; of several rows the nearest counts.  0: as the name says.
    """
    words = re.findall("[a-z0-9]+", name.lower())
    known = {*words, *(first + second for first, second in itertools.pairwise(words))}
    known |= {ALIASES[word] for word in known & ALIASES.keys()}
    rows = [(device, *key.split("-")) for key, device in DEVICES.items() if key in known or key.split("-")[0] in known]
    exact = [device for device, _, *rest in rows if rest and rest[0] in known]
    others = [device for device, _, *rest in rows if not rest or rest[0][0].isdigit()]
    size = memory_bytes or next((int(word[:-2]) * 2**30 for word in words if re.fullmatch(r"\d+gb", word)), 0)
    return min(exact or others, key=lambda device: abs(device.memory_bytes - size) if size else 0, default=None)
