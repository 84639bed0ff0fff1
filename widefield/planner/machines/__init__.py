"""Machines as data: what a device computes, holds and sends.

device.py        Device: memory, bandwidth, operations per second
link.py          Link: latency and bandwidth
cluster.py       Cluster: nodes of equal devices, the links inside a node and between nodes; advice
signature.py     a recorded operation as a call that can be timed
gpu_calls.py     what a GPU runs in place of some of them
timing.py        seconds of kernels on this machine
cnn_kernels.py   the kernels that CNNs are made of, which a calibration times
calibrate.py     measures this machine: kernels, the host, messages
lateness.py      how much ranks that compute side by side wait for each other
own_kernels.py   times the kernels of the plans that are asked about
calibration.py   what was measured on this machine, in the user's cache
catalogue.py     common GPUs and networks, each figure with its source
cluster_text.py  `4x8xH100-80G@ib-ndr` as a Cluster
"""

from widefield.planner.machines.cluster import Cluster
from widefield.planner.machines.cluster_text import cluster_of
from widefield.planner.machines.device import Device
from widefield.planner.machines.link import Link

__all__ = ["Cluster", "Device", "Link", "cluster_of"]
