"""Do the figures that judge the order of plans judge it?  By hand, and the emulation's seconds of one small step."""

from __future__ import annotations

import pytest
from planner.timed import CHOICES, judged, kendall_tau, planned_seconds, regret
from planner.truth_cases import PLANS, TruthCase

from widefield.planner.machines.cluster_text import cluster_of


def test_kendalls_tau_is_1_of_one_order_and_less_by_2_of_its_pairs_for_each_pair_that_is_turned():
    assert kendall_tau([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1
    assert kendall_tau([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]) == -1
    assert kendall_tau([(1.0, 20.0), (2.0, 10.0), (3.0, 30.0)]) == 1 / 3


def test_regret_is_what_the_choice_takes_beyond_the_best():
    assert regret([(1.0, 10.0), (1.5, 5.0), (2.0, 20.0)]) == 0.5
    assert regret([(1.0, 1.0), (1.5, 5.0)]) == 0


def test_plans_are_judged_beside_all_steps_and_beside_the_quietest_turn():
    """A model's plans are ranked among each other, and refused ones are left out."""
    rows = [
        {"case": "a, copies, sgd", "measured seconds": 2.0, "quietest turn": 1.0, "planned seconds": 1.1},
        {"case": "a, rows, sgd", "measured seconds": 1.5, "quietest turn": 1.25, "planned seconds": 1.2},
        {"case": "b, copies, sgd", "measured seconds": 4.0, "quietest turn": 4.0, "planned seconds": 4.0},
        {"case": "b, rows, sgd", "measured seconds": "it does not fit", "planned seconds": 1.0},
        {"case": "b, columns, sgd", "measured seconds": 1.0, "quietest turn": 1.0, "planned seconds": "no such plan"},
    ]
    found = judged(rows)
    of_all, of_quiet = found["measured seconds"], found["quietest turn"]
    assert of_all["orders"] == {"a": {"Kendall's tau": -1.0, "regret": pytest.approx(1 / 3)}}
    assert of_quiet["orders"] == {"a": {"Kendall's tau": 1.0, "regret": 0.0}}
    assert of_all["median error"] == pytest.approx(0.2) and of_all["90th percentile"] == pytest.approx(0.45)
    assert of_quiet["median error"] == pytest.approx(0.04) and of_quiet["regret, worst"] == 0
    assert judged(rows[3:]) == {}


def test_at_least_eight_plans_of_two_ranks_are_to_choose_from():
    assert len(CHOICES) >= 8 and all(PLANS[plan][0] == 2 for plan in CHOICES)


def test_a_step_gets_seconds():
    seconds = planned_seconds(TruthCase("monai unet 3-D", "one", "sgd"), cluster_of("cpu:1"))
    assert not isinstance(seconds, str) and 1e-4 < seconds < 60
