"""Python state that a forward reads or changes, in a model whose channels are cut or whose layers are dealt out.

Every call gives one device's numbers, or is refused in words on every rank.
"""

from __future__ import annotations

import re
import warnings
from unittest import mock

import pytest
import torch
from capture.hidden import CASES, DRAWS, Case, given_by, image, made
from marks import few
from ranks import on_ranks
from torch import nn

from widefield.parallel.parallelize import parallelize
from widefield.parallel.passes import backward_of
from widefield.plans import Plan
from widefield.streaming.api import stream
from widefield.tensor_parallel import search

NO_PART = {"one weight twice"}
"""Which take another weight after the model was laid out, of which no rank has a part."""
MASKS = {"dropout", "noise"}
"""Stages draw for themselves, as they say."""


@pytest.mark.long
@pytest.mark.parametrize("axis", few(["channel", "stage"], "channel"))
def test_every_call_gives_one_devices_numbers_or_is_refused(axis):
    for problems in on_ranks(2, _problems, axis, plan=Plan(**{axis: 2}, independent=axis == "stage"), timeout_seconds=300):
        assert problems == [], "\n".join(problems)


def _problems(mesh, axis: str) -> list[str]:
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch's, of a tensor's array
    with mock.patch.multiple(search, WEIGHT_COST=1e5, WEIGHT_LEAST=0):  # small nets are cut as large ones are
        return [f"{case.name}: {text}" for case in CASES if case.name not in NO_PART for text in _of_case(mesh, case, axis)]


def _of_case(mesh, case: Case, axis: str):
    refuses = case.refuses or (case.refuses_stages if axis == "stage" else "")
    try:
        got = given_by(parallelize(made(case), mesh, sample=image().to("meta")), case)
    except NotImplementedError as error:
        if not refuses or not re.search(refuses, str(error)):
            yield f"raised {error}"
        return
    if refuses:
        yield f"is not refused in the words {refuses!r}"
        return
    expected = given_by(made(case), case)
    if axis == "stage" and case in DRAWS and case.name in MASKS:
        return
    for call, pair in enumerate(zip(got, expected, strict=True)):
        if not torch.allclose(*pair, rtol=1e-12, atol=1e-12):
            yield f"call {call} is off by {(pair[0] - pair[1]).abs().max():.1e}"


@pytest.mark.parametrize("axis", ["channel", "stage"])
def test_what_is_laid_out_is_not_streamed_and_what_is_streamed_not_laid_out(axis):
    for words in on_ranks(2, _both_ways, axis, plan=Plan(**{axis: 2})):
        assert f"mesh.{axis}=2 runs the operations of a whole model and its part 0 is streamed" in words[0]
        assert "its part 1 is cut by channels or into stages, whose ranks have shards of its weights" in words[1]


def _both_ways(mesh, axis: str) -> list[str]:
    streamed, laid = (
        nn.Sequential(stream(nn.Conv2d(3, 4, 3), tiles=(2, 2))),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)),
    )
    parallelize(laid, mesh, sample=torch.empty(2, 3, 9, 9, device="meta"))
    said = []
    for call in (
        lambda: parallelize(streamed, mesh, sample=torch.empty(2, 3, 9, 9, device="meta")),
        lambda: stream(nn.Sequential(nn.Identity(), laid), tiles=(2, 2)),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def test_training_passes_in_stages_see_what_changed_between_them():
    for errors in on_ranks(2, _trained_in_stages, plan=Plan(stage=2, pipeline={"micro_batches": 2})):
        assert max(errors) < 1e-12, errors


def _trained_in_stages(mesh) -> list[float]:
    """How far losses and gradients are from one device's, with a schedule that moves between passes."""
    case = next(case for case in CASES if case.name == "a schedule")
    alone, model = made(case), parallelize(made(case), mesh, sample=image().to("meta"))
    errors = []
    for call in range(1, 4):
        case.change(alone, call), case.change(model, call)
        alone.zero_grad(), model.zero_grad()
        expected = alone(image()).square().sum()
        expected.backward()
        got = backward_of(model, image(), image(), loss_of=lambda output, target: output.square().sum())
        errors.append(float((got - expected.detach()).abs() / expected.detach()))
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        errors += [float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs if not a.is_meta]
    return errors
