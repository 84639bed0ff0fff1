"""A save in the background copies what updates change while training goes on, and never what has changed already."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from command import DIGITS
from faults import about_of, checkpoints_in, no_warning
from torch import Tensor, nn

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.training import checkpoint, resume
from widefield.training.checkpoint import newest_sound_in, read
from widefield.training.staging import Changes, Staging, Trust, address_of


def held(monkeypatch, until: threading.Event) -> None:
    """The thread that saves waits before it copies."""
    real = Staging.copy

    def copy(self, names):
        until.wait(20)
        real(self, names)

    monkeypatch.setattr(Staging, "copy", copy)


def saved(weight: Tensor, count: Tensor, checkpoints, step: int, **how) -> None:
    changes = Changes(steady={address_of(weight)}, live={address_of(weight), address_of(count)})
    checkpoints.save({"weight": weight, "count": count}, about_of(step), changes=changes, **how)


def found_in(folder: Path) -> dict:
    return read(newest_sound_in(folder, warn=no_warning))[0]


def test_from_the_second_save_on_weights_are_copied_while_training_goes_on(tmp_path, monkeypatch):
    weight, count, go = torch.ones(1000), torch.zeros(3), threading.Event()
    checkpoints = checkpoints_in(tmp_path)
    saved(weight, count, checkpoints, 1)
    checkpoints.wait_until_copied()
    weight += 1
    held(monkeypatch, go)
    saved(weight, count, checkpoints, 2)
    count += 5  # as a forward counts; this was copied before `save` returned
    threading.Timer(0.2, go.set).start()
    checkpoints.wait_until_copied()  # it waits
    assert go.is_set()
    weight += 1
    checkpoints.wait()
    state = found_in(tmp_path)
    assert state["weight"].unique().tolist() == [2.0] and state["count"].tolist() == [0, 0, 0]


def test_the_first_save_copies_everything_at_once(tmp_path, monkeypatch):
    weight, go = torch.ones(1000), threading.Event()
    held(monkeypatch, go)
    checkpoints = checkpoints_in(tmp_path)
    saved(weight, torch.zeros(3), checkpoints, 1)
    weight += 1
    go.set()
    checkpoints.wait()
    assert found_in(tmp_path)["weight"].unique().tolist() == [1.0]


def test_weights_that_change_between_updates_are_always_copied_at_once_and_that_is_said(tmp_path, monkeypatch):
    weight, count, said = torch.ones(1000), torch.zeros(3), []
    checkpoints = checkpoints_in(tmp_path, warn=said.append)
    saved(weight, count, checkpoints, 1)
    weight.data.mul_(3)  # a forward that normalizes its weights in place, past autograd's counters
    checkpoints.wait_until_copied()
    assert said == [
        "weight changed between two updates, so every save copies all tensors before training goes on; that is as safe, and "
        "takes longer"
    ]
    go = threading.Event()
    held(monkeypatch, go)
    saved(weight, count, checkpoints, 2)
    weight.data.mul_(3)
    go.set()
    checkpoints.wait()
    assert found_in(tmp_path)["weight"].unique().tolist() == [3.0]


def test_a_change_that_autograd_counts_makes_the_save_fail_and_older_ones_stand(tmp_path, monkeypatch):
    weight, count, said, go = torch.ones(1000), torch.zeros(3), [], threading.Event()
    checkpoints = checkpoints_in(tmp_path, warn=said.append)
    saved(weight, count, checkpoints, 1)
    checkpoints.wait_until_copied()
    held(monkeypatch, go)
    saved(weight, count, checkpoints, 2)
    weight.mul_(3)  # before `wait_until_copied`
    go.set()
    checkpoints.wait_until_copied()
    checkpoints.wait()
    assert "weight changed while it was copied, in a forward or backward; set checkpoint.background=false" in said[0]
    assert checkpoints.failure is not None and found_in(tmp_path)["weight"].unique().tolist() == [1.0]


def test_a_save_that_is_waited_for_copies_nothing(tmp_path, monkeypatch):
    asked: list[set[str]] = []
    real = checkpoint.copied
    monkeypatch.setattr(checkpoint, "copied", lambda tensors: (asked.append(set(tensors)), real(tensors))[1])
    saved(torch.ones(1000), torch.zeros(3), checkpoints_in(tmp_path), 1, wait=True, own={"own": torch.ones(2)})
    assert asked == [{"own_0.own"}] and found_in(tmp_path)["weight"].unique().tolist() == [1.0]


def test_a_save_that_fails_lets_the_update_go_on(tmp_path, monkeypatch):
    said: list[str] = []
    checkpoints = checkpoints_in(tmp_path, warn=said.append)
    weight, count = torch.ones(1000), torch.zeros(3)
    saved(weight, count, checkpoints, 1)
    checkpoints.wait_until_copied()
    monkeypatch.setattr(checkpoint.files, "assign_writers", lambda sizes: 1 / 0)
    saved(weight, count, checkpoints, 2)
    checkpoints.wait_until_copied()
    checkpoints.wait()
    assert "ZeroDivisionError" in said[0] or "division by zero" in said[0]


def test_trust_is_earned_by_looking():
    trust, tensor = Trust(), torch.ones(3)
    assert trust.compare() is None and trust.is_earned is None
    trust.look_at({"a": tensor}, {"a": tensor.clone()})
    assert trust.compare() is None and trust.is_earned


@pytest.mark.long
def test_buffers_are_never_thought_steady(tmp_path):
    """Running statistics change in every forward, and a run says of its tensors when they change."""
    seen = []
    real = resume.changes_of

    def looked_at(learner):
        found = real(learner)
        names = {address_of(value): name for name, value in learner.model.state_dict().items()}
        seen.append(({names[a] for a in found.steady if a in names}, {names[a] for a in found.live if a in names}, learner))
        return found

    settings = ["schedule.length=3step", "schedule.warmup=0step", "checkpoint.every=1step", "evaluate.every=9step"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("widefield.training.trainer.changes_of", looked_at)
        train(read_config(DIGITS, [*settings, "mesh.replicate=1", "ema.decay=0.9"]), tmp_path / "run", World())
    steady, live, learner = seen[-1]
    assert steady == {name for name, _ in learner.model.named_parameters()}
    assert live == set(learner.model.state_dict())
    assert any(isinstance(module, nn.BatchNorm2d) for module in learner.model.modules())
