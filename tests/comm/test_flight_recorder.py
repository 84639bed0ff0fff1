"""Does a dump of torch's flight recorder say what a rank waits for, and where it took another way?

dumps/nccl.json was written by hand in the form of version 2.10 of NCCL's recorder (torch 2.14, FlightRecorderDetail.hpp): three
steps of two collectives; the last is under way, and a broadcast where the steps before had an all-reduce.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from widefield.comm.flight_recorder import odd, recorded, under_way

DUMP = (Path(__file__).parent / "dumps" / "nccl.json").read_text()
FIRST_NS, STEP_NS = 1_790_000_000_000_000_000, 100_000_000


def test_a_recorded_dump_is_read():
    found = recorded(lambda: ["{}", "", DUMP])
    assert len(found) == 6 and [one.number for one in found] == [1, 2, 3, 4, 5, 6]
    assert str(found[0]) == "all_reduce (Float [64, 3]), number 1 of group 0" and found[0].description == "default_pg"
    assert under_way(found) is found[-1] and str(found[-1]).startswith("broadcast (Float [10])")
    assert recorded(lambda: []) == [] and under_way([]) is None


def test_the_step_that_took_another_way_is_found():
    found = recorded(lambda: [DUMP])
    steps = [FIRST_NS + number * STEP_NS for number in range(3)]
    assert odd(found, before_ns=steps[1], step_ns=steps[2]) == (
        "collective 2 of this step in group 0 is broadcast (Float [10]), and was all_reduce (Float [10]) in the step before"
    )
    assert odd(found, before_ns=steps[0], step_ns=steps[1]) == ""
    assert odd(found[:5], before_ns=steps[1], step_ns=steps[2]) == ""  # as far as it goes it is the same


@pytest.mark.skipif(torch.__version__ < "2.14", reason="gloo's collectives are recorded from some version on")
def test_gloos_collectives_are_recorded():
    of_ranks = on_ranks(2, _some_collectives)
    for found in of_ranks:
        mine = [one for one in found if one[1:] == ("all_reduce", ((7, 3),))]
        assert len(mine) == 2 and mine[1][0] == mine[0][0] + 1, found[-5:]


def _some_collectives(mesh) -> list:
    for _ in range(2):
        dist.all_reduce(torch.ones(7, 3), group=mesh.group)
    return [(one.number, one.operation, one.shapes) for one in recorded()]
