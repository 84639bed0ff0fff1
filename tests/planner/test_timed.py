"""Do the figures that judge the order of plans judge it?  By hand, and the emulation's seconds of one small step."""

from __future__ import annotations

import statistics

import pytest
from planner.timed import CHOICES, judged, kendall_tau, planned_seconds, regret, tau_of_pairs_told_apart
from planner.truth_cases import PLANS, TruthCase

from widefield.planner.machines.cluster_text import cluster_of


def test_kendalls_tau_is_1_of_one_order_and_less_by_2_of_its_pairs_for_each_pair_that_is_turned():
    assert kendall_tau([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1
    assert kendall_tau([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]) == -1
    assert kendall_tau([(1.0, 20.0), (2.0, 10.0), (3.0, 30.0)]) == 1 / 3


def test_regret_is_what_the_choice_takes_beyond_the_best():
    assert regret([(1.0, 10.0), (1.5, 5.0), (2.0, 20.0)]) == 0.5
    assert regret([(1.0, 1.0), (1.5, 5.0)]) == 0


def row(case, turns, planned):
    return {
        "case": case, "measured seconds": statistics.median(turns), "quietest turn": min(turns), "turn by turn": turns,
        "planned seconds": planned,
    }  # fmt: skip


def test_plans_are_judged_beside_all_steps_and_beside_the_quietest_turn():
    """A model's plans are ranked among each other, and refused ones are left out."""
    rows = [
        row("a, copies, sgd", [2.0, 1.0, 4.0], 1.1),
        row("a, rows, sgd", [1.5, 1.25, 1.75], 1.2),
        row("b, copies, sgd", [4.0, 4.0, 4.0], 4.0),
        {"case": "b, rows, sgd", "measured seconds": "it does not fit", "planned seconds": 1.0},
        row("b, columns, sgd", [1.0], "no such plan"),
    ]
    found = judged(rows)
    of_all, of_quiet = found["measured seconds"], found["quietest turn"]
    assert of_all["orders"] == {"a": {"Kendall's tau": -1.0, "regret": pytest.approx(1 / 3)}}
    assert of_quiet["orders"] == {"a": {"Kendall's tau": 1.0, "regret": 0.0}}
    assert of_all["median error"] == pytest.approx(0.2) and of_all["90th percentile"] == pytest.approx(0.45)
    assert of_quiet["median error"] == pytest.approx(0.04) and of_quiet["regret, worst"] == 0
    halves = found["the same, one half of the turns beside the other"]
    assert halves == {"Kendall's tau, mean": -1.0, "regret, mean": pytest.approx(3 / 1.625 - 1)}
    assert judged(rows[3:]) == {}
    assert judged([row("c, copies, sgd", [1.0], 1.0)]).keys() == {"measured seconds", "quietest turn"}


def test_pairs_that_no_turn_tells_from_another_say_nothing_of_the_planner():
    fast, as_fast, slow = [1.0, 1.1, 0.9, 1.0], [1.1, 1.0, 1.0, 0.9], [2.0, 2.1, 1.9, 2.0]
    assert tau_of_pairs_told_apart([row("a, one", fast, 3.0), row("a, two", as_fast, 2.0)]) == 0
    rows = [row("a, one", fast, 3.0), row("a, two", as_fast, 2.0), row("a, three", slow, 4.0)]
    assert tau_of_pairs_told_apart(rows) == 1 and kendall_tau([(1.0, 3.0), (1.1, 2.0), (2.0, 4.0)]) == pytest.approx(1 / 3)
    assert tau_of_pairs_told_apart([*rows, row("a, four", [3.0, 3.1, 2.9, 3.0], 1.0)]) == pytest.approx(-1 / 5)


def test_at_least_eight_plans_of_two_ranks_are_to_choose_from():
    assert len(CHOICES) >= 8 and all(PLANS[plan][0] == 2 for plan in CHOICES)


def test_a_step_gets_seconds():
    seconds = planned_seconds(TruthCase("monai unet 3-D", "one", "sgd"), cluster_of("cpu:1"))
    assert not isinstance(seconds, str) and 1e-4 < seconds < 60
