"""Does the emulation of a step hold, send and compute what real ranks do?  A part of it; benchmarks/planner.py runs all."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from marks import few
from planner.allocations import allocations, mark
from planner.comparison import Gates, PeakRow, difference_of_messages, emulated, peak_rows, summary
from planner.measured_step import MeasuredStep, flops_of, measured
from planner.truth_cases import TruthCase
from ranks import on_ranks

from widefield.comm.mesh import Mesh, World
from widefield.planner.step_record import StepRecord
from widefield.plans import Plan, plan_of

CASES = [
    TruthCase("unet", "one", "adamw"),
    TruthCase("mobilenet", "one", "sgd"),
    TruthCase("monai unet 3-D", "one", "sgd"),
    TruthCase("resnet", "recompute", "sgd"),
    TruthCase("resnet", "copies", "sgd"),
    TruthCase("resnet", "zero3", "adamw"),
    TruthCase("resnet", "rows", "sgd"),
    TruthCase("resnet", "channel", "sgd"),
]


@cache
def both(case: TruthCase) -> tuple[list[MeasuredStep], list[StepRecord]]:
    steps = on_ranks(case.ranks, measured, case, plan=plan_of(case.config, case.ranks))
    records = emulated(case)
    assert not steps[0].refused, f"{case} is refused: {steps[0].refused}"
    assert not isinstance(records, str), f"{case} runs, and its emulation does not: {records}"
    return steps, records


@pytest.mark.parametrize("case", few(CASES, *CASES[:2], is_sweep=True), ids=str)
def test_ranks_send_the_messages_that_the_emulation_says(case):
    for step, record in zip(*both(case), strict=True):
        assert difference_of_messages(step, record) == ""
        kinds = [kind for kind, _, _ in step.messages]
        scattered = kinds.count("reduce_scatter")  # gloo's is an all-reduce
        assert step.gloo.get("all_reduce", 0) + step.gloo.get("reduce_scatter", 0) == kinds.count("all_reduce") + scattered
        assert step.gloo.get("send", 0) == kinds.count("send") and step.gloo.get("recv", 0) == kinds.count("receive")
    assert bool(kinds) == (case.ranks > 1)


@pytest.mark.long
def test_ranks_hold_what_the_emulation_says():
    rows = [row for case in CASES for row in peak_rows(case, *both(case))]
    assert Gates().failures(rows) == [], summary(rows)


def test_gates_find_what_is_too_low_and_what_is_off():
    case = CASES[0]
    assert Gates().failures([PeakRow(case, 0, 1000, 1000), PeakRow(case, 1, 1000, 1009)]) == []
    low, high = PeakRow(case, 0, 1000, 940), PeakRow(case, 0, 1000, 1080)
    assert ["under the truth" in text for text in Gates().failures([low])] == [False, True, False]
    assert ["off by more" in text for text in Gates().failures([high])] == [True, False]


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=str)
def test_flops_are_those_of_torchs_counter(case):
    records = emulated(case)
    assert not isinstance(records, str)
    assert records[0].flops == flops_of(Mesh(Plan(), World(), torch.device("cpu")), case) > 0


def test_a_plan_is_refused_in_the_words_of_the_ranks():
    case = TruthCase("resnet", "space of one dim", "sgd")
    step = on_ranks(case.ranks, measured, case, plan=plan_of(case.config, case.ranks))[0]
    assert step.refused and emulated(case) == step.refused


def test_allocations_are_counted_to_the_byte():
    with allocations() as found:
        kept = torch.zeros(100)
        with mark("up"):
            torch.zeros(1000).sum()
        with mark("down"):
            del kept
    assert found.before("up") == 400 and found.peak("up") == 400 + 4000 + 4 and found.after("up") == 400
    assert found.before("down") == found.peak("down") == 400 and found.after("down") == 0


def test_the_scratch_of_convolutions_is_counted():
    image, weight = torch.zeros(1, 16, 32, 32), torch.zeros(16, 16, 3, 3)
    with allocations() as found, mark("convolution"):
        out = torch.conv2d(image, weight, padding=1)
    of_blocks = out.nbytes + weight.nbytes  # of the image, the weight: oneDNN's copies in blocks of channels
    assert found.peak("convolution") >= out.nbytes + of_blocks
