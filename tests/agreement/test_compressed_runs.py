"""A parameter server in real processes whose workers push their gradients in fewer bytes."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agreement.test_server_runs import SLOW, assert_close, config_of, log_of, ran_all, replayed, weights_of
from command import DIGITS, record, wait_for_step
from command import ranks_of as processes_of
from command import run as run_command
from command import start as start_command
from marks import few
from ranks import on_ranks

from widefield.agreement.sample_account import times_learned
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import bytes_of_run
from widefield.asynchrony.weights import compression_of
from widefield.asynchrony.worker import Worker
from widefield.plans import plan_of
from widefield.run import train

BRANCHES = ["model.name=agreement.nets:Branches", "model.options={}", "optimizer={name: sgd, lr: 0.1, momentum: 0.0}"]
RUNS = {
    "fp16": ["agreement={name: server, compression: fp16}"],
    "int8": ["agreement={name: server, compression: int8, compression_block: 50}"],
    "topk": ["agreement={name: server, compression: topk, compression_share: 0.1}"],
    "AdamW": ["agreement={name: server, compression: int8}", "optimizer={name: adamw, lr: 0.01}"],
    "bound": ["agreement={name: server, kind: bounded_staleness, bound: 1, compression: topk}"],
    "max_staleness": ["agreement={name: server, kind: bounded_staleness, max_staleness: 1, compression: fp16}"],
    "synchronous": ["agreement={name: server, kind: synchronous, compression: int8}", "data.batch_size=200"],
    "epoch": [
        "agreement={name: server, compression: topk}", "data.batch_size=200", "schedule.length=2ep", "evaluate.every=1ep",
    ],
    "all": ["agreement={name: server, kind: synchronous, compression: topk, compression_share: 1.0}"],
    "exact": ["agreement={name: server, kind: synchronous}"],
    "branches": ["agreement={name: server, compression: topk, compression_share: 0.3}", *BRANCHES],
    "branches, all": ["agreement={name: server, kind: synchronous, compression: topk, compression_share: 1.0}", *BRANCHES],
    "branches, exact": ["agreement={name: server, kind: synchronous}", *BRANCHES],
}  # fmt: skip
REPLAYED = [name for name in RUNS if not name.startswith("branches")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of RUNS, on two workers and a server."""
    folder = tmp_path_factory.mktemp("runs")
    on_ranks(3, ran_all, folder, RUNS, plan=plan_of(config_of(["agreement={name: server}"]), 3))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", REPLAYED)
def test_the_simulator_computes_the_same_weights_from_a_runs_log(runs, name):
    assert_close(replayed(runs / name, RUNS[name]), weights_of(runs / name))


@pytest.mark.long
def test_another_compression_computes_others(runs):
    """So that the replay would show what was not done."""
    for name in ("fp16", "int8", "topk"):
        off = [float((one - weights_of(runs / "exact")[key]).abs().max()) for key, one in weights_of(runs / name).items()]
        assert max(off) > 1e-9, name


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["", "branches, "])
def test_all_of_the_largest_numbers_are_the_run_without_compression(runs, prefix):
    """Also where a weight is frozen, one is never used and one now and then, and running statistics are pushed."""
    assert_close(weights_of(runs / f"{prefix}all"), weights_of(runs / f"{prefix}exact"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp16", "int8", "topk", "synchronous", "epoch"])
def test_the_bytes_of_all_messages_are_those_of_the_formula(runs, name):
    events, numel = log_of(runs / name).events, log_of(runs / name).numel
    pushes = [event.bytes for event in events if event.kind == "gradient"]
    options = compression_of(config_of(RUNS[name]).agreement)
    sent, received = bytes_of_run(
        len(pushes), 2, of_push=numel, of_state=numel, itemsize=8, numel=numel, compression=options
    )  # fmt: skip
    assert sum(event.bytes for event in events if event.kind == "read") == sent
    assert sum(pushes) == received - 2 * 8 * 5
    scales, written_out = -(-numel // 50) * 8, 10 * 8
    known = {"fp16": 2 * numel + 8, "int8": numel + scales, "topk": math.ceil(0.1 * numel) * 12}
    if name in known:
        assert set(pushes) == {known[name] + written_out}


@pytest.mark.long
def test_running_statistics_are_pushed_as_they_are(runs):
    """Branches: 8 numbers of statistics behind the gradient, and the places of what had no gradient and nothing left."""
    log = log_of(runs / "branches")
    topk = math.ceil(0.3 * log.numel) * 12
    assert {event.bytes - topk - 8 * 8 - 8 * 10 for event in log.events if event.kind == "gradient"} <= {16, 24, 32}


@pytest.mark.long
def test_every_sample_is_learned_from_exactly_once(runs):
    assert set(times_learned(log_of(runs / "epoch")).values()) == {1}
    assert [line["step"] for line in record(runs / "epoch", "evaluation")] == [8, 16]


def test_a_parameter_without_a_gradient_is_absent_only_if_nothing_is_left_for_it():
    flat = FlatModel(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
    sent = torch.zeros(flat.numel)
    assert flat.lasting((0, 3), sent) == (0, 3)
    sent[2] = 1.0  # of the first weight
    assert flat.lasting((0, 3), sent) == (3,) and flat.lasting((), sent) == ()


@pytest.mark.long
def test_the_first_line_says_that_it_is_compressed_and_not_one_devices(runs):
    reasons = record(runs / "synchronous", "start")[-1]["reasons"]
    assert any("synchronous, compression int8" in text and "these are not one device's numbers" in text for text in reasons)
    assert any("these are data-parallel training" in text for text in record(runs / "exact", "start")[-1]["reasons"])


# ---------------------------------------------------------------------------------------------- what ends a run


def not_finite(mesh, folder, settings):
    """What each rank says where worker 1's gradient has an infinite number in its second share."""
    pushes, real = [], FlatModel.gradient

    def infinite(self):
        gradient, absent = real(self)
        pushes.append(1)
        if mesh.rank == 1 and len(pushes) == 2:
            gradient[5] = math.inf
        return gradient, absent

    FlatModel.gradient = infinite
    try:
        train(config_of(settings), folder / settings[0][-8:-1], mesh.world)
        return "it ran"
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        FlatModel.gradient = real


@pytest.mark.parametrize("name", ["fp16", "int8", "topk"])
def test_a_gradient_that_is_no_finite_number_ends_the_run_before_it_is_compressed(tmp_path, name):
    found = on_ranks(3, not_finite, tmp_path, RUNS[name], plan=plan_of(config_of(["agreement={name: server}"]), 3))
    assert found[2].startswith("AgreedError: worker 1: the loss of worker 1 in step"), found
    assert "no finite number" in found[2] and "no weight was changed by it" in found[2]
    assert "no finite number" in found[1] and "the server failed" in found[0]


def no_loss(mesh, folder):
    """Feedback of a worker before and after a share in which no loss counts."""
    if mesh.rank == 2:
        train(config_of(RUNS["int8"]), folder, mesh.world)
        return True
    real, left = Worker._compressed, []

    def checked(self, feedback, gradient, absent):
        before = feedback.left
        found = real(self, feedback, replace(gradient, count=0.0) if len(left) == 1 else gradient, absent)
        left.append((before, feedback.left, found))
        return found

    Worker._compressed = checked
    try:
        train(config_of(RUNS["int8"]), folder, mesh.world)
    finally:
        Worker._compressed = real
    (_, first, _), (before, after, (values, _)) = left[:2]
    return torch.equal(first, before) and torch.equal(before, after) and not values[-10:].any()


def test_what_is_left_waits_where_no_loss_counts(tmp_path):
    assert all(on_ranks(3, no_loss, tmp_path, plan=plan_of(config_of(["agreement={name: server}"]), 3)))


# ---------------------------------------------------------------------------------------------- kill -9


@pytest.fixture
def _own_code(monkeypatch):
    """The command's processes find `agreement.nets` in this folder's parent, as this process does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
@pytest.mark.parametrize("killed", few([0, 3], 3, is_sweep=True))
def test_a_killed_worker_or_server_takes_what_was_left_with_it(tmp_path, killed):
    """The log says so: its replay, in which a worker that begins anew has nothing left, computes the same weights."""
    section = "agreement={name: server, compression: topk, compression_share: 0.2}"
    words = ["train", DIGITS, "--run", tmp_path / "run", *SLOW, "mesh.replicate=4", section]
    process = start_command(*words)
    wait_for_step(process, tmp_path / "run", 16)
    os.kill(processes_of(process)[killed].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    if killed == 3:
        assert "resumed from" in run_command(*words)
        joined = [event.workers for event in log_of(tmp_path / "run").events if event.kind == "join"]
        assert sorted(joined) == [(0,), (1,), (2,)]
    else:
        assert process.returncode == 0 and "worker 0 is gone" in output, output
    assert set(times_learned(log_of(tmp_path / "run")).values()) == {1}
    assert_close(replayed(tmp_path / "run", [*SLOW, section]), weights_of(tmp_path / "run"))
