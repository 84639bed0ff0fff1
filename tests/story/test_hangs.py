"""Is whatever holds up a run found in time, is the right rank named, and do all ranks end?"""

from __future__ import annotations

import pytest
from hang_cases import CASES, HANG_SECONDS, PLANS, see

pytestmark = pytest.mark.alone

MOST_SECONDS = HANG_SECONDS + 15.0
"""On a machine at a load of 10; benchmarks/results/watch.json has the seconds on a quiet one."""
IN_CI = [("missing rank", "data"), ("wrong operation", "space"), ("wrong operation", "fully_shard"), ("straggler", "data"),
         ("deadlocked point-to-point", "stage"), ("stalled loader", "channel"),
         ("out of memory on one rank", "data")]  # fmt: skip
REST = [(what, plan) for what in CASES for plan in PLANS if (what, plan) not in IN_CI]


@pytest.mark.parametrize(("what", "plan"), [*IN_CI, *(pytest.param(*one, marks=pytest.mark.sweep) for one in REST)])
def test_what_holds_up_a_run_is_found_and_named_and_all_ranks_end(tmp_path, what, plan):
    seen = see(what, plan, tmp_path)
    assert seen.named, seen
    if CASES[what].ends:
        assert seen.statuses == (3, CASES[what].status) and seen.seconds < MOST_SECONDS, seen
    else:
        assert seen.statuses == (0, 0), seen
