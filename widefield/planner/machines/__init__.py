"""Machines as data: what a device computes, holds and sends.

device.py        Device: memory, bandwidth, operations per second
cluster.py       Link and Cluster: nodes of equal devices, the links inside a node and between nodes; advice
catalogue.py     common GPUs and networks, each figure with its source
cluster_text.py  `4x8xH100-80G@ib-ndr` as a Cluster
"""

from widefield.planner.machines.cluster import Cluster, Link
from widefield.planner.machines.cluster_text import cluster_of
from widefield.planner.machines.device import Device

__all__ = ["Cluster", "Device", "Link", "cluster_of"]
