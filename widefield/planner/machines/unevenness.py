"""How unevenly fast are ranks that compute side by side?

Each of two ranks computes for a while and then waits for the other.  A wait is as long as a message, and longer the longer they
have computed: caches, memory and whatever else runs on the machine slow now the one and now the other.  Such delays add up as
the steps of a random walk do, with the square root of the time, on a virtual machine with two cores from 0.5 to 15 ms
(docs/log.md, 2026-11-27).
"""

from __future__ import annotations

import math
import statistics

import torch

from widefield.comm.link_times import seconds_of_meetings
from widefield.comm.mesh import Mesh
from widefield.plans import Plan
from widefield.verification.own_ranks import on_own_ranks

SHAPE = (1, 32, 48, 48)
"""Of the image that is convolved in between: half a millisecond of a core."""
TIMES = (2, 4, 8, 16)
"""How often it is convolved before the ranks meet."""


def unevenness(*, timeout_seconds: float = 60.0) -> float:
    """As Calibration has it, from two ranks of this machine's CPU.  RuntimeError: the ranks failed."""
    return on_own_ranks(Plan(replicate=2), _on_rank, timeout_seconds)


def _on_rank(mesh: Mesh) -> float:
    assert mesh.group is not None, "two ranks have a group"
    image, weight = torch.rand(SHAPE), torch.rand(SHAPE[1], SHAPE[1], 3, 3)

    def compute() -> None:
        torch.nn.functional.conv2d(image, weight, padding=1)

    with torch.no_grad():
        _, (_, alone), *others = seconds_of_meetings(compute, (0, 0, *TIMES), group=mesh.group)  # the first ones connect
    return max(0.0, statistics.mean((waited - alone) / math.sqrt(computed) for computed, waited in others))
