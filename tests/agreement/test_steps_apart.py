"""Replicas tell each other of their steps some steps later: what waits for whom, and what all hear of one that goes wrong."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from agreement.replicas_by_hand import ByHand
from command import DIGITS, record
from ranks import on_ranks
from safetensors.torch import load_file

from widefield.comm.mesh import AgreedError
from widefield.config import read_config
from widefield.plans import plan_of
from widefield.run import train
from widefield.training import step_reports
from widefield.training.checkpoint_directory import steps_in
from widefield.training.guard import NonFiniteLossError
from widefield.training.loop import Learner
from widefield.training.refused_batch import joined, kept_steps

SMALL = [
    "precision=float64", "data.augment=[]", "data.batch_size=13", "model.name=agreement.nets:Plain", "model.options={}",
    "batch_norm=averaged", "optimizer.lr=0.05", "schedule.warmup=0step", "schedule.name=constant", "schedule.length=9step",
    "evaluate.every=1000ep", "checkpoint.every=4step", "log.tensorboard=false", "data.workers=0",
]  # fmt: skip
LOCAL = ["agreement={name: local_sgd, period: 3}"]
GOSSIP = ["agreement={name: gossip, graph: ring}"]
LATE = ["agreement={name: gossip, graph: ring, delay: 2}", "model.name=resnet", "model.options={widths: [4, 6], blocks: 1}"]
KINDS = {"local": LOCAL, "gossip": GOSSIP, "late": LATE}


def config_of(settings):
    return read_config(DIGITS, [*SMALL, *settings])


def ran(mesh, folder, settings):
    """How a run ends, as (kind of error, its text), or ("", how); told after few steps only where something stands."""
    step_reports.MOST_SECONDS = 1e9
    try:
        return "", train(config_of(settings), folder, mesh.world).reason
    except (AgreedError, ValueError) as error:
        return type(error).__name__, str(error)


def bad_from(step, number, *, where):
    """A method that does its own, and on the replica `number` makes NaN, or cannot read, in a step, counted from 1."""
    plain = getattr(Learner, where)

    def learned(self, passes, *, stop):
        if self.step + 1 == step and self.mesh.rank == number:
            passes = [replace(one, problem="image 7 is torn") for one in passes]
        return plain(self, passes, stop=stop)

    def loss_of(self, output, target, **options):
        factor = float("nan") if self.step + 1 == step and self.mesh.rank == number and self.model.training else 1.0
        return plain(self, output, target, **options) * factor

    return {"learn": learned, "loss_of": loss_of}[where]


def cases(mesh, folder):
    """All that is told of a run, by its name."""
    found = {name: ran(mesh, folder / name, settings) for name, settings in KINDS.items()}
    for name, where, settings in (
        ("nan", "loss_of", LOCAL), ("nan of late gossip", "loss_of", LATE), ("unreadable", "learn", LOCAL),
        ("skips", "loss_of", [*LOCAL, "guard.non_finite=skip"]),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, where, bad_from(6, 1, where=where))
            found[name] = ran(mesh, folder / name, settings)
    for name, settings in (("nan", LOCAL), ("nan of late gossip", LATE)):
        if mesh.is_main:
            shutil.copytree(folder / name, folder / f"{name}, gone on")
        mesh.barrier()
        found[f"{name}, gone on"] = ran(mesh, folder / f"{name}, gone on", settings)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("apart")
    found = on_ranks(2, cases, folder, plan=plan_of(config_of(LOCAL), 2))
    assert {name: one[0] for name, one in found[0].items()} == {name: one[0] for name, one in found[1].items()}
    return folder, found[0]


@pytest.mark.long
@pytest.mark.parametrize("name", list(KINDS))
def test_the_record_has_the_loss_of_all_for_every_step(runs, name):
    folder, found = runs
    assert found[name] == ("", "complete")
    hand = ByHand(config_of(KINDS[name]), 2).train(9)
    lines = record(folder / name, "step")
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["loss"] for line in lines] == pytest.approx(hand.losses, rel=1e-12)
    assert [line["epoch"] for line in lines] == sorted(line["epoch"] for line in lines)


@pytest.mark.parametrize("name", ["nan", "nan of late gossip"])
def test_a_loss_of_one_replica_that_is_not_finite_ends_the_run_of_all(runs, name):
    folder, found = runs
    kind, text = found[name]
    assert kind == NonFiniteLossError.__name__
    assert "the loss of step 6 is nan" in text and "replica 1 of 2 met it" in text
    assert [path.name for path in steps_in(folder / name / "checkpoints")] == ["step_00000004"]
    (refusal,) = record(folder / name, "guard")
    assert refusal["action"] == "stop" and refusal["step"] == 6 and len(refusal["index"]) == 6
    assert (folder / name / "nan.json").is_file() and not (folder / name / "weights.safetensors").exists()
    assert kept_steps(folder / name) == [6]
    (batch,) = joined(folder / name, 6)
    assert batch.index.tolist() == refusal["index"]


@pytest.mark.parametrize(("name", "whole"), [("nan", "local"), ("nan of late gossip", "late")])
def test_such_a_run_goes_on_bit_for_bit_from_its_checkpoint(runs, name, whole):
    """With messages on their way, where gossip is late."""
    folder, found = runs
    assert found[f"{name}, gone on"] == ("", "complete")
    weights, expected = (load_file(folder / one / "weights.safetensors") for one in (f"{name}, gone on", whole))
    assert weights.keys() == expected.keys() and all(torch.equal(one, expected[key]) for key, one in weights.items())


def test_an_image_that_one_replica_cannot_read_ends_the_run_of_all(runs):
    _, found = runs
    kind, text = found["unreadable"]
    assert kind == "AgreedError" and "image 7 is torn" in text and "replica 1 of 2 met it" in text


def test_a_guard_that_skips_counts_each_step_together(runs):
    folder, found = runs
    assert found["skips"] == ("", "complete")
    (refusal,) = record(folder / "skips", "guard")
    assert refusal["action"] == "skip" and len(refusal["index"]) == 13
    assert [line["step"] for line in record(folder / "skips", "step")] == list(range(1, 10))


SHARED = {"ZeRO-3": ["mesh.shard=2"], "tiles": ["mesh.space=[2,1]"]}
"""Replicas of two ranks."""


def shared_cases(mesh, folder):
    """Of replicas of two ranks: how a run ends, and one in which one of the four ranks sees NaN."""
    found = {name: ran(mesh, folder / name, [*LOCAL, *settings]) for name, settings in SHARED.items()}
    for name, settings in SHARED.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "loss_of", bad_from(6, 3, where="loss_of"))
            found[f"nan, {name}"] = ran(mesh, folder / f"nan, {name}", [*LOCAL, *settings])
    return found


@pytest.mark.long
def test_the_ranks_of_a_replica_are_held_back_together(tmp_path):
    first, *others = on_ranks(4, shared_cases, tmp_path)
    assert all({name: one[0] for name, one in of.items()} == {name: one[0] for name, one in first.items()} for of in others)
    for name, settings in SHARED.items():
        hand = ByHand(config_of([*LOCAL, *settings]), 2, 2 if name == "ZeRO-3" else 1).train(9)
        assert first[name] == ("", "complete")
        assert [line["loss"] for line in record(tmp_path / name, "step")] == pytest.approx(hand.losses, rel=1e-10)
        kind, text = first[f"nan, {name}"]
        assert kind == NonFiniteLossError.__name__ and "of step 6 is nan" in text and "replica 1 of 2 met it" in text
        (refusal,) = record(tmp_path / f"nan, {name}", "guard")
        assert len(refusal["index"]) == 6 and joined(tmp_path / f"nan, {name}", 6)[0].index.tolist() == refusal["index"]


# ---------------------------------------------------------------------------------------------- who waits for whom


def counted(mesh, folder, settings):
    """The collectives of all ranks in each step."""
    step_reports.MOST_SECONDS = 1e9
    steps, calls, plain, learn = [], [], dist.all_reduce, Learner.learn

    def all_reduce(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return plain(tensor, *arguments, **options)

    def learned(self, *arguments, **options):
        before = len(calls)
        found = learn(self, *arguments, **options)
        steps.append(len(calls) - before)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(Learner, "learn", learned)
        train(config_of(settings), folder, mesh.world)
    return steps


def held_up(mesh, folder, agreement, step):
    """Replica 0 waits in its second step until the other has come to `step`, counted from 1."""
    plain, done = Learner.loss_of, folder / "has_come"

    def loss_of(self, output, target, **options):
        if self.step == 1 and self.mesh.rank == 0:
            _wait_for(done)
        if self.step + 1 == step and self.mesh.rank == 1:
            done.touch()
        return plain(self, output, target, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "loss_of", loss_of)
        patch.setattr(step_reports, "MOST_SECONDS", 1e9)
        config = config_of([f"agreement={agreement}", "checkpoint.every=1000step"])
        return train(config, folder, mesh.world).reason


def _wait_for(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} was never written: one replica held up the other"
        time.sleep(0.01)


def both(mesh, folder):
    late = "{name: gossip, graph: ring, delay: 3}"
    return (
        counted(mesh, folder / "counted", LOCAL),
        held_up(mesh, folder / "local", "{name: local_sgd, period: 8}", 8),
        held_up(mesh, folder / "late", late, 5),
    )


@pytest.mark.long
def test_between_averages_a_step_sends_nothing_and_waits_for_nobody(tmp_path):
    found = on_ranks(2, both, tmp_path, plan=plan_of(config_of(LOCAL), 2))
    for steps, *reasons in found:
        assert reasons == ["complete"] * 2
        assert [bool(one) for one in steps] == [step % 3 == 0 for step in range(1, 10)]
