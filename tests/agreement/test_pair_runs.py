"""Workers that average in pairs, in real processes: beside the simulator's replay of their logs, and killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from agreement.failures import wait_for_failure
from agreement.replicas_by_hand import ByHand
from command import DIGITS, record, wait_for_step
from command import ranks_of as processes_of
from command import run as run_command
from command import start as start_command
from marks import SWEEP
from ranks import on_ranks

from widefield.agreement import EventLog, of_module, replay
from widefield.agreement.sample_account import times_learned
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.pair_keeper import PairKeeper, algorithm_of
from widefield.asynchrony.pair_messages import (
    OFFER,
    Done,
    ask,
    asked_for,
    bytes_of_pair,
    of_weights_message,
    share_message,
    share_of_message,
    weights_message,
)  # fmt: skip
from widefield.asynchrony.pair_worker import PairWorker, SharedWeights
from widefield.asynchrony.worker import Worker
from widefield.comm.failure import PeerFailedError
from widefield.comm.mesh import AgreedError
from widefield.config import read_config
from widefield.data.order import Key
from widefield.plans import plan_of
from widefield.run import train

SMALL = [
    "precision=float64", "data.augment=[]", "data.batch_size=13", "batch_norm=averaged", "schedule.warmup=0step",
    "schedule.name=constant", "schedule.length=8step", "log.tensorboard=false", "evaluate.every=100ep",
    "checkpoint.every=3step", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}", "model.name=agreement.nets:Plain",
    "model.options={}", "agreement=ad_psgd",
]  # fmt: skip
RUNS = {
    "sgd": [],
    "adamw": ["optimizer={name: adamw, lr: 0.01}"],
    "frozen": ["model.freeze=[first]"],
    "epoch": ["data.batch_size=300", "schedule.length=2ep", "evaluate.every=1ep"],
    "normalized": ["model.name=resnet", "model.options={widths: [4, 6], blocks: 1}"],
}  # fmt: skip
WORKERS = 3


def config_of(settings):
    return read_config(DIGITS, [*SMALL, *settings])


def ran_all(mesh, folder, runs):
    """By run: its steps, and of a worker that answers the bytes that it got and sent for that, and how much was told there."""
    found, real_end, counted = {}, PairWorker.end, []

    def end(self):
        real_end(self)
        if self._requests is not None:
            counted[:] = [self._requests.received + self._requests.sent]

    def answering(self, active, offer):
        answer = real_mean(self, active, offer)
        told[0] += sum(len(of_weights_message(one, WORKERS)[2]) for one in (offer, answer))
        return answer

    real_mean, told = SharedWeights.mean_with, [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairWorker, "end", end)
        patch.setattr(SharedWeights, "mean_with", answering)
        for name, settings in runs.items():
            told[0], counted[:] = 0, [0]
            found[name] = train(config_of(settings), folder / name, mesh.world).step, counted[0], told[0]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    found = on_ranks(WORKERS + 1, ran_all, folder, RUNS, plan=plan_of(config_of([]), WORKERS + 1))
    assert all({name: steps for name, (steps, *_) in one.items()} == dict.fromkeys(RUNS, 8) | {"epoch": 10} for one in found)
    (folder / "counted.json").write_text(json.dumps(found[1]))  # of the one worker that answers
    return folder


def log_of(folder):
    return EventLog.from_text((folder / "events.jsonl").read_text())


def weights_of(folder):
    return safetensors.torch.load_file(folder / "weights.safetensors")


def replayed(folder, settings):
    """The weights that the simulator computes from a run's log, by name."""
    config = config_of(settings)
    hand = ByHand(config, 1)
    keys = [Key(0, 0, index) for index in range(hand.learner.steps.samples)]
    image, target = hand.learner.prepare(hand.parts.reader(train=True).__getitems__(keys))
    model, loss_of = hand.learner.model, hand.learner.loss_of
    objective = of_module(model, image, target, lambda out, wanted: loss_of(out, wanted) / len(wanted))
    found = replay(log_of(folder), algorithm_of(config, lr=hand.learner.lr), objective).weights
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    parts = found.split([one.numel() for _, one in named])
    return {name: part.view(one.shape) for (name, one), part in zip(named, parts, strict=True)}


def assert_close(found, expected, tolerance=1e-12):
    for name, one in found.items():
        assert (one - expected[name]).abs().max() <= tolerance * max(1.0, float(expected[name].abs().max())), name


@pytest.mark.long
@pytest.mark.parametrize("name", ["sgd", "adamw", "epoch"])
def test_the_simulator_computes_the_same_weights_from_a_runs_log(runs, name):
    log = log_of(runs / name)
    assert_close(replayed(runs / name, RUNS[name]), weights_of(runs / name))
    assert sum(event.kind == "pair" for event in log.events) >= sum(
        event.kind == "gradient" and event.workers[0] in (0, 2) for event in log.events
    ), "each gradient of an active worker is averaged before its step"


@pytest.mark.parametrize("name", list(RUNS))
def test_every_sample_is_learned_from_exactly_once(runs, name):
    log, learned = log_of(runs / name), 13 * 8 if name != "epoch" else 2 * 1437
    times = times_learned(log)
    assert max(times.values()) == 1 and sum(times.values()) == learned
    assert [line["step"] for line in record(runs / name, "step")] == list(range(1, 11 if name == "epoch" else 9))


def test_what_does_not_learn_stays_and_statistics_are_averaged(runs):
    start = ByHand(config_of(RUNS["frozen"]), 1).learner.model.state_dict()
    found = weights_of(runs / "frozen")
    assert (found["first.weight"] == start["first.weight"]).all() and (found["head.weight"] != start["head.weight"]).any()
    means = [one for name, one in weights_of(runs / "normalized").items() if name.endswith("running_mean")]
    assert means and all(one.abs().max() > 0 and one.isfinite().all() for one in means)


@pytest.mark.parametrize("name", ["sgd", "normalized"])
def test_the_bytes_of_all_pairs_are_those_of_the_formula(runs, name):
    """As counted by the worker that answers."""
    flat = FlatModel(ByHand(config_of(RUNS[name]), 1).learner.model)
    _, sent, told = json.loads((runs / "counted.json").read_text())[name]
    offers = [event for event in log_of(runs / name).events if event.kind == "offer"]
    assert sum(event.bytes for event in offers) == sent
    assert sent == len(offers) * bytes_of_pair(WORKERS, of_state=flat.of_state, itemsize=8) + 5 * 8 * told
    assert bytes_of_pair(WORKERS, of_state=7, itemsize=8, done=3) == 2 * (5 * 8 + (1 + WORKERS) * 8 + 7 * 8) + 3 * 5 * 8


def test_a_mean_is_recorded_where_all_stand(runs):
    lines = record(runs / "sgd", "average")
    assert [line["step"] for line in lines] == [3, 6, 8]
    assert all(line["replicas"] == WORKERS and line["distance"] > 0 for line in lines)


def test_messages_are_read_as_they_were_written():
    done = [Done(3, 1, 2, 400, 1_700_000_000_000_000), Done.step(5, 1, 17, 9)]
    assert asked_for(ask([1, 2, 3], done), 3) == ((1, 2, 3), done)
    assert share_of_message(share_message((4, 0), 7, [5, 0, 6], [2]), 3) == ((4, 0), 7, (5, 0, 6), (2,))
    assert share_of_message(share_message(None, 7, [5, 0], []), 2) == (None, 7, (5, 0), ())
    state = torch.arange(3.0)
    clock, has, read, values = of_weights_message(weights_message(OFFER, 9, [1, 2], done, state), 2)
    assert (clock, has, read) == (9, [1, 2], done) and values is state


def failing(mesh, folder):
    """What each rank says where a worker raises, and where its gradient is NaN; an active one and a passive one."""
    texts, real = [], Worker.gradient

    def raises(self, share, state):
        if mesh.rank == 1:
            raise ValueError("the third page is torn")
        wait_for_failure(folder / name)
        return real(self, share, state)

    def nan(self, share, state):
        found = real(self, share, state)
        if mesh.rank == 0:
            found.values[0] = float("nan")
        else:
            wait_for_failure(folder / name)
        return found

    for name, gradient in (("raises", raises), ("nan", nan)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "gradient", gradient)
            try:
                train(config_of([]), folder / name, mesh.world)
            except (RuntimeError, ValueError) as error:
                texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_an_error_of_a_worker_or_a_gradient_that_is_no_number_ends_the_run(tmp_path):
    found = on_ranks(WORKERS + 1, failing, tmp_path, plan=plan_of(config_of([]), WORKERS + 1))
    assert found[3][0] == "AgreedError: worker 1: the third page is torn" and found[1][0].endswith("the third page is torn")
    assert "no finite number" in found[3][1] and "no finite number" in found[0][1]
    others = [found[0][0], found[2][0], found[1][1], found[2][1]]
    assert all("PeerFailedError: the rank that keeps the account failed" in one for one in others)


ALONE = {
    "plain": [],
    "branches": [
        "model.name=agreement.nets:Branches", "optimizer={name: adamw, lr: 0.01, weight_decay: 0.1, clip_norm: 0.5}",
    ],
}  # fmt: skip


def alone(mesh, folder):
    for name, settings in ALONE.items():
        train(config_of(["checkpoint.every=100ep", *settings]), folder / name, mesh.world)


@pytest.mark.long
def test_one_worker_is_one_device(tmp_path):
    """Also where a branch never runs, one runs in some passes, and a weight is frozen."""
    on_ranks(2, alone, tmp_path, plan=plan_of(config_of([]), 2))
    for name, settings in ALONE.items():
        hand = ByHand(config_of(["agreement={name: local_sgd, period: 1000}", *settings]), 1).train(8)
        assert_close(hand.weights(0), weights_of(tmp_path / name))
        statistics = {key: one for key, one in hand.models[0].named_buffers() if one.is_floating_point()}
        assert_close(statistics, weights_of(tmp_path / name))


def again(mesh, folder):
    """What a run says that ends in its sixth step, and how many steps it has after the same command."""
    real = PairKeeper.learn

    def ends(self, step):
        if step == 5:
            raise AgreedError("enough")
        return real(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairKeeper, "learn", ends)
        with pytest.raises((AgreedError, PeerFailedError)) as error:
            train(config_of([]), folder, mesh.world)
    return str(error.value), train(config_of([]), folder, mesh.world).step


def in_step(mesh, folder):
    return train(config_of(["agreement=mean", "schedule.length=9step", "batch_norm=synchronized"]), folder, mesh.world).step


@pytest.mark.long
def test_a_run_goes_on_from_the_mean_of_its_checkpoint_also_in_step(tmp_path):
    found = on_ranks(WORKERS + 1, again, tmp_path / "run", plan=plan_of(config_of([]), WORKERS + 1))
    assert found[3] == ("enough", 8) and {steps for _, steps in found} == {8}
    log = log_of(tmp_path / "run")
    assert [event.part for event in log.events if event.kind in ("stand", "average")] == [3, 1, 6, 8]
    assert max(times_learned(log).values()) == 1 and sum(times_learned(log).values()) == 13 * 8
    assert_close(replayed(tmp_path / "run", []), weights_of(tmp_path / "run"))
    assert on_ranks(2, in_step, tmp_path / "run", plan=plan_of(config_of(["agreement=mean"]), 2)) == [9, 9]


def hanging(mesh, folder):
    """What each rank says where the gradient of worker 0 takes longer than log.hang_seconds."""
    real = Worker.gradient

    def hangs(self, share, state):
        if mesh.rank == 0:
            time.sleep(2.5)
        return real(self, share, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "gradient", hangs)
        try:
            train(config_of(["log.hang_seconds=1"]), folder / "run", mesh.world)
        except (AgreedError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.long
def test_a_worker_that_hangs_ends_the_run_and_is_named(tmp_path):
    found = on_ranks(WORKERS + 1, hanging, tmp_path, plan=plan_of(config_of([]), WORKERS + 1))
    assert "AgreedError: no worker has sent anything for 1 s, and worker 0 should: it hangs" in found[3]
    assert all(text.startswith("PeerFailedError") for text in found[:3])


# ---------------------------------------------------------------------------------------------- kill -9


SLOW = ["model.name=agreement.nets:Slow", "schedule.length=1ep", "data.batch_size=36", "checkpoint.every=7step"]


@pytest.fixture
def _own_code(monkeypatch):
    """The command's processes find `agreement.nets` in this folder's parent, as this process does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


def command_of(folder, *further):
    return ["train", DIGITS, "--run", folder, *SMALL, *SLOW, "mesh.replicate=5", *further]


def run_with(folder, *, killed, at, status):
    """A run of four workers of which some are killed at a step; (output, when)."""
    process = start_command(*command_of(folder))
    wait_for_step(process, folder, at)
    ranks = processes_of(process)
    for number in killed:
        os.kill(ranks[number].pid, signal.SIGKILL)
    when = time.time()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status, output
    return output, when


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
@pytest.mark.parametrize("killed", [[0], pytest.param([1], marks=SWEEP), pytest.param([1, 2], marks=SWEEP)])
def test_training_goes_on_when_workers_are_killed(tmp_path, killed):
    """An active one, a passive one, one of each."""
    output, when = run_with(tmp_path / "run", killed=killed, at=5, status=0)
    assert all(f"worker {number} is gone" in output for number in killed)
    steps = [line["time"] for line in record(tmp_path / "run", "step")]
    assert len(steps) == 40 and min(one for one in steps if one > when) - when < 5
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", SLOW), weights_of(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.usefixtures("_own_code")
def test_a_killed_keeper_ends_the_run_which_goes_on_by_the_same_command(tmp_path):
    output, _ = run_with(tmp_path / "run", killed=[4], at=16, status=128 + signal.SIGKILL)
    assert "rank 4 was killed by SIGKILL" in output
    assert "resumed from" in run_command(*command_of(tmp_path / "run"))
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", SLOW), weights_of(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_workers_that_could_never_agree_end_the_run_which_goes_on_with_fewer(tmp_path):
    output, _ = run_with(tmp_path / "run", killed=[1, 3], at=16, status=2)
    assert "workers 0, 2 are left, which all ask for means and none that answers" in output
    assert "resumed from" in run_command(*command_of(tmp_path / "run", "mesh.replicate=4"))
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", SLOW), weights_of(tmp_path / "run"))
