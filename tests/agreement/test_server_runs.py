"""Runs with a parameter server in real processes, beside the simulator's replay of their logs, and beside other training."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
from agreement.replicas_by_hand import ByHand
from command import DIGITS, record, wait_for_step
from command import ranks_of as processes_of
from command import run as run_command
from command import start as start_command
from ranks import on_ranks

from widefield.agreement import DelayCompensation, EventLog, ParameterServer, of_module, replay
from widefield.agreement.sample_account import times_learned
from widefield.agreement.simulator import in_words
from widefield.asynchrony.messages import bytes_of_run
from widefield.asynchrony.weights import algorithm_of
from widefield.config import read_config
from widefield.data.order import Key
from widefield.plans import plan_of
from widefield.run import train

SMALL = [
    "precision=float64", "data.augment=[]", "data.batch_size=12", "batch_norm=averaged", "schedule.warmup=0step",
    "schedule.name=constant", "schedule.length=6step", "log.tensorboard=false", "evaluate.every=100ep",
    "checkpoint.every=100ep", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}", "model.name=agreement.nets:Plain",
    "model.options={}",
]  # fmt: skip
NORMALIZED = ["model.name=resnet", "model.options={widths: [4, 6], blocks: 1}"]
RUNS = {
    "asynchronous": ["agreement={name: server}"],
    "AdamW": ["agreement={name: server}", "optimizer={name: adamw, lr: 0.01}"],
    "bound": ["agreement={name: server, kind: bounded_staleness, bound: 1}"],
    "bound 0": ["agreement={name: server, kind: bounded_staleness, bound: 0}", "optimizer={name: sgd, lr: 0.1, momentum: 0.0}"],
    "max_staleness 0": ["agreement={name: server, kind: bounded_staleness, max_staleness: 0}"],
    "max_staleness 1": ["agreement={name: server, kind: bounded_staleness, max_staleness: 1}"],
    "compensated": ["agreement={name: server, kind: delay_compensated, compensation: 2.0}"],
    "compensated by 0": ["agreement={name: server, kind: delay_compensated, compensation: 0.0}"],
    "synchronous": ["agreement={name: server, kind: synchronous}", "data.batch_size=200", "schedule.length=8step"],
    "synchronous, plain": ["agreement={name: server, kind: synchronous}", "optimizer={name: sgd, lr: 0.1, momentum: 0.0}"],
    "epoch": ["agreement={name: server}", "data.batch_size=200", "schedule.length=2ep", "evaluate.every=1ep"],
    "normalized": ["agreement={name: server, kind: synchronous}", *NORMALIZED],
}  # fmt: skip


def config_of(settings):
    return read_config(DIGITS, [*SMALL, *settings])


def ran_all(mesh, folder, runs):
    """Each run, of whose outcomes the steps are returned."""
    return {name: train(config_of(settings), folder / name, mesh.world).step for name, settings in runs.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of RUNS, on two workers and a server; "data parallel" and "one device" are the training that some of them equal."""
    folder = tmp_path_factory.mktemp("runs")
    found = on_ranks(3, ran_all, folder, RUNS, plan=plan_of(config_of(["agreement={name: server}"]), 3))
    assert found[0] == found[1] == found[2]
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
    named = list(model.named_parameters())
    parts = found.split([one.numel() for _, one in named])
    return {name: part.view(one.shape) for (name, one), part in zip(named, parts, strict=True)}


def assert_close(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert (found[name] - one).abs().max() <= tolerance * max(1.0, float(one.abs().max())), name


@pytest.mark.parametrize("name", [name for name in RUNS if name != "normalized"])
def test_the_simulator_computes_the_same_weights_from_a_runs_log(runs, name):
    assert_close(replayed(runs / name, RUNS[name]), weights_of(runs / name))
    gradients = [event for event in log_of(runs / name).events if event.kind == "gradient"]
    assert log_of(runs / name).seconds > gradients[-1].time
    assert len(gradients) == {"epoch": 16, "synchronous": 8}.get(name, 6) * 2


def one_device(settings):
    """The losses and weights of one device on the same samples."""
    hand = ByHand(config_of(["agreement={name: local_sgd, period: 1000}", *settings]), 1).train(8)
    return hand.losses, hand.weights(0)


def losses(folder):
    return [line["loss"] for line in record(folder, "step")]


def test_a_synchronous_server_is_data_parallel_training(runs):
    expected, weights = one_device(["data.batch_size=200"])  # the last step has 37 samples
    assert losses(runs / "synchronous") == pytest.approx(expected, rel=1e-12, abs=0)
    assert_close(weights_of(runs / "synchronous"), weights)


@pytest.mark.long
def test_running_statistics_are_those_of_data_parallel_training(runs, tmp_path):
    plain = {"parallel": NORMALIZED}
    on_ranks(2, ran_all, tmp_path, plain, plan=plan_of(config_of(NORMALIZED), 2))
    found, expected = weights_of(runs / "normalized"), weights_of(tmp_path / "parallel")
    assert any("running_var" in name for name in expected)
    assert_close(found, expected)


def test_a_staleness_bound_of_0_is_synchronous_and_a_limit_of_0_is_one_device(runs):
    assert_close(weights_of(runs / "bound 0"), weights_of(runs / "synchronous, plain"))
    half = ["data.batch_size=6", "optimizer={name: sgd, lr: 0.05, momentum: 0.9}"]
    hand = ByHand(config_of(["agreement={name: local_sgd, period: 1000}", *half]), 1).train(12)
    assert_close(weights_of(runs / "max_staleness 0"), hand.weights(0))


def staleness_of(folder):
    return [one for line in record(folder, "updates") for one in line["staleness"]]


def test_the_staleness_of_every_update_is_recorded_and_within_its_bound(runs):
    assert set(staleness_of(runs / "max_staleness 0")) == {0} == set(staleness_of(runs / "synchronous"))
    assert max(staleness_of(runs / "max_staleness 1")) <= 1
    for name in RUNS:
        events, version, read, counted = log_of(runs / name).events, 0, {}, []
        of = {event.numbers[0]: event.workers[0] for event in events if event.kind == "gradient"}
        then = {}
        for event in events:
            if event.kind == "read":
                read[event.workers[0]] = version
            elif event.kind == "gradient":
                then[event.numbers[0]] = read[of[event.numbers[0]]]
            else:
                counted += [version - then[number] for number in event.numbers]
                version += 1
        assert Counter(staleness_of(runs / name)) == Counter(counted), name


def test_a_compensation_of_0_is_asynchronous_training_on_the_same_log(runs):
    folder = runs / "compensated by 0"
    log, config = log_of(folder), config_of(RUNS["compensated by 0"])
    compensated = algorithm_of(config, lr=0.1)
    assert compensated.compensation == DelayCompensation(0.0)
    plain = replace(compensated, compensation=None)
    (runs / "as asynchronous").mkdir(exist_ok=True)
    (runs / "as asynchronous" / "events.jsonl").write_text(replace(log, algorithm=in_words(plain)).to_text())
    assert_close(replayed(runs / "as asynchronous", RUNS["asynchronous"]), weights_of(folder))


def test_every_sample_of_every_epoch_is_learned_from_exactly_once(runs):
    assert set(times_learned(log_of(runs / "epoch")).values()) == {1}
    assert [line["step"] for line in record(runs / "epoch", "evaluation")] == [8, 16]


def test_the_bytes_of_all_messages_are_those_of_the_formula(runs):
    events, numel = log_of(runs / "asynchronous").events, log_of(runs / "asynchronous").numel
    sent, received = bytes_of_run(12, 2, of_push=numel, of_state=numel, itemsize=8)
    assert sum(event.bytes for event in events if event.kind == "read") == sent
    assert sum(event.bytes for event in events if event.kind == "gradient") == received - 2 * 8 * 5
    assert isinstance(algorithm_of(config_of([]), lr=0.1), ParameterServer)


# ---------------------------------------------------------------------------------------------- kill -9


SLOW = [*SMALL, "model.name=agreement.nets:Slow", "schedule.length=1ep", "data.batch_size=36", "checkpoint.every=7step"]


@pytest.fixture
def _own_code(monkeypatch):
    """The command's processes find `agreement.nets` in this folder's parent, as this process does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


def command_of(folder, *further):
    return ["train", DIGITS, "--run", folder, *SLOW, "mesh.replicate=4", "agreement={name: server}", *further]


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_training_goes_on_when_a_worker_is_killed(tmp_path):
    process = start_command(*command_of(tmp_path / "run"))
    wait_for_step(process, tmp_path / "run", 5)
    os.kill(processes_of(process)[0].pid, signal.SIGKILL)
    killed = time.time()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "worker 0 is gone" in output and "2 go on" in output
    steps = [line["time"] for line in record(tmp_path / "run", "step")]
    assert len(steps) == 40 and min(one for one in steps if one > killed) - killed < 5
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", SLOW), weights_of(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_a_killed_server_ends_the_run_which_goes_on_by_the_same_command(tmp_path):
    process = start_command(*command_of(tmp_path / "run"))
    wait_for_step(process, tmp_path / "run", 16)
    os.kill(processes_of(process)[3].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and "rank 3 was killed by SIGKILL" in output, output
    assert "resumed from" in run_command(*command_of(tmp_path / "run"))
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", SLOW), weights_of(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.usefixtures("_own_code")
def test_a_run_all_of_whose_workers_were_killed_goes_on_with_fewer(tmp_path):
    process = start_command(*command_of(tmp_path / "run"))
    wait_for_step(process, tmp_path / "run", 16)
    for rank in processes_of(process)[:3]:
        os.kill(rank.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "all 3 workers are gone" in output, output
    assert "resumed from" in run_command(*command_of(tmp_path / "run", "mesh.replicate=3"))
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", SLOW), weights_of(tmp_path / "run"))
