"""How much later than planned does a rank go on that computes beside others and waits for them?

Each of two ranks computes for a while and then waits for the other.  A wait is as long as a message, and longer the longer they
have computed: at once by what threads that slept need to run again, and then since caches, memory and whatever else runs on the
machine slow now the one and now the other.  Such delays add up as the steps of a random walk do, with the square root of the
time.  One pair of processes may wait longer than the next, as long as it runs, so several are measured (docs/log.md, 2026-11-27
and 2026-11-29).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from widefield.comm.link_times import seconds_of_meetings
from widefield.comm.mesh import Mesh
from widefield.plans import Plan
from widefield.verification.own_ranks import on_own_ranks

PAIRS = 3
"""Of processes, one after the other."""
SHAPE, IMAGES = (1, 64, 64, 64), 32
"""Of the images whose parts are convolved in between, and how many there are: more than a cache holds."""
TIMES = (1, 2, 4, 8, 16, 32)
"""How many of them before the ranks meet: from half a millisecond of a core to fifteen."""
ROUNDS = 60
"""Of each of TIMES."""


def lateness(*, timeout_seconds: float = 60.0) -> dict[str, float]:
    """`waking_seconds` and `unevenness` as Calibration has them, from pairs of ranks of this machine's CPU.

    RuntimeError: the ranks failed.
    """
    rows = [row for _ in range(PAIRS) for row in on_own_ranks(Plan(replicate=2), _on_rank, timeout_seconds)]
    waking, unevenness = fitted(rows)
    return {"waking_seconds": waking, "unevenness": unevenness}


def fitted(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """a and b, neither below 0, of late = a + b sqrt(computed), by least squares.

    rows: (seconds computed, seconds late).  Rows count by 1 / sqrt(computed): the longer, the more they differ.
    """
    computed, late = torch.tensor(rows, dtype=torch.float64).unbind(1)
    weights = computed**-0.25
    forms, wanted = torch.stack([weights, weights * computed.sqrt()], 1), (weights * late)[:, None]
    waking, unevenness = torch.linalg.lstsq(forms, wanted).solution[:, 0].tolist()
    if waking < 0:
        waking, unevenness = 0.0, float(torch.linalg.lstsq(forms[:, 1:], wanted).solution)
    elif unevenness < 0:
        waking, unevenness = float(torch.linalg.lstsq(forms[:, :1], wanted).solution), 0.0
    return max(0.0, waking), max(0.0, unevenness)


def _on_rank(mesh: Mesh) -> list[tuple[float, float]]:
    assert mesh.group is not None, "two ranks have a group"
    images, weight = itertools.cycle([torch.rand(SHAPE) for _ in range(IMAGES)]), torch.rand(32, 32, 3, 3)

    def compute() -> None:
        image = torch.relu(next(images))
        torch.nn.functional.conv2d(image[:, : len(weight)], weight, padding=1)

    with torch.no_grad():  # the first ones connect
        _, (_, alone), *others = seconds_of_meetings(compute, (0, 0, *TIMES), group=mesh.group, rounds=ROUNDS)
    return [(computed, waited - alone) for computed, waited in others]
