"""Runs whose weights several servers hold, with backup workers, and with weights that are fetched ahead."""

from __future__ import annotations

import shutil

import pytest
import torch
from agreement.failures import wait_for_failure
from agreement.nets import Plain
from agreement.test_server_runs import (
    NORMALIZED,
    assert_close,
    config_of,
    log_of,
    losses,
    one_device,
    ran_all,
    replayed,
    staleness_of,
    weights_of,
)  # fmt: skip
from command import record
from ranks import on_ranks
from torch import nn

from widefield.agreement.sample_account import times_learned
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import bytes_of_run
from widefield.asynchrony.part_server import PartServer
from widefield.asynchrony.server_links import ServerLinks
from widefield.asynchrony.weight_parts import WeightPart, check_optimizer, from_bytes, join_states, to_bytes
from widefield.asynchrony.worker import Worker
from widefield.plans import check as check_plan
from widefield.plans import plan_of
from widefield.run import train

CLIPPED = ["optimizer={name: sgd, lr: 0.1, momentum: 0.9, clip_norm: 0.05}"]
SYNCHRONOUS = "agreement={name: server, kind: synchronous"
SERVERS = {
    2: {
        "asynchronous": ["agreement={name: server, servers: 2}"],
        "AdamW": ["agreement={name: server, servers: 2}", "optimizer={name: adamw, lr: 0.01}"],
        "max_staleness 1": ["agreement={name: server, servers: 2, kind: bounded_staleness, max_staleness: 1}"],
        "compensated": ["agreement={name: server, servers: 2, kind: delay_compensated, compensation: 2.0}"],
        "synchronous": [f"{SYNCHRONOUS}, servers: 2}}", "data.batch_size=200", "schedule.length=8step"],
        "clipped": [f"{SYNCHRONOUS}, servers: 2}}", *CLIPPED],
        "normalized": [f"{SYNCHRONOUS}, servers: 2}}", *NORMALIZED],
        "branches": [f"{SYNCHRONOUS}, servers: 2}}", "model.name=agreement.nets:Branches", "evaluate.every=2step"],
        "overlap": ["agreement={name: server, servers: 2, overlap: true}"],
        "begun": ["agreement={name: server, servers: 2}", "optimizer={name: adamw, lr: 0.01}", "schedule.length=3step"],
    },
    3: {
        "asynchronous": ["agreement={name: server, servers: 3}"],
        "clipped": [f"{SYNCHRONOUS}, servers: 3}}", *CLIPPED],
    },
}  # fmt: skip
ONE = {
    "clipped": [f"{SYNCHRONOUS}}}", *CLIPPED],
    "normalized": [f"{SYNCHRONOUS}}}", *NORMALIZED],
    "branches": [f"{SYNCHRONOUS}}}", "model.name=agreement.nets:Branches", "evaluate.every=2step"],
    "overlap": ["agreement={name: server, overlap: true}"],
    "overlap, AdamW": ["agreement={name: server, overlap: true}", "optimizer={name: adamw, lr: 0.01}"],
    "overlap, bound": ["agreement={name: server, kind: bounded_staleness, bound: 1, overlap: true}"],
    "overlap, max_staleness": ["agreement={name: server, kind: bounded_staleness, max_staleness: 2, overlap: true}"],
    "overlap, compensated": ["agreement={name: server, kind: delay_compensated, compensation: 2.0, overlap: true}"],
}  # fmt: skip
WITHOUT_REPLAY = ("normalized", "branches", "clipped")
"""The simulator knows no such nets and no clipping; these are compared with one server's."""


def ran_on(folder, settings, *, servers, workers=2):
    """Run each of `settings` on ranks of its own."""
    plan = plan_of(config_of(next(iter(settings.values()))), workers + servers)
    found = on_ranks(workers + servers, ran_all, folder, settings, plan=plan)
    assert all(one == found[0] for one in found)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    ran_on(folder, ONE, servers=1)
    return folder


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    for servers, settings in SERVERS.items():
        ran_on(folder / str(servers), settings, servers=servers)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("servers", "name"), [(k, name) for k, found in SERVERS.items() for name in found if name not in WITHOUT_REPLAY]
)
def test_several_servers_compute_what_one_would_of_the_same_log(several, servers, name):
    folder = several / str(servers) / name
    assert_close(replayed(folder, SERVERS[servers][name]), weights_of(folder))
    assert "servers=1" in log_of(folder).algorithm


@pytest.mark.long
@pytest.mark.parametrize("name", ["clipped", "normalized", "branches"])
def test_several_synchronous_servers_compute_what_one_does(one, several, name):
    for servers in (servers for servers, found in SERVERS.items() if name in found):
        folder = several / str(servers) / name
        assert losses(folder) == pytest.approx(losses(one / name), rel=1e-12, abs=0)
        assert_close(weights_of(folder), weights_of(one / name))
        evaluations = [[line["metrics"] for line in record(of, "evaluation")] for of in (folder, one / name)]
        assert evaluations[0] == evaluations[1] and len(evaluations[0]) == (3 if name == "branches" else 1)


@pytest.mark.long
def test_several_synchronous_servers_are_data_parallel_training(several):
    expected, weights = one_device(["data.batch_size=200"])
    assert losses(several / "2" / "synchronous") == pytest.approx(expected, rel=1e-12, abs=0)
    assert_close(weights_of(several / "2" / "synchronous"), weights)


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_goes_on_with_another_number_of_servers(several, tmp_path, servers):
    """AdamW's state too: the log of both parts is one run's."""
    folder = tmp_path / "begun"
    shutil.copytree(several / "2" / "begun", folder)
    settings = [f"agreement={{name: server, servers: {servers}}}", "optimizer={name: adamw, lr: 0.01}"]
    ran_on(tmp_path, {"begun": settings}, servers=servers)
    assert [line["step"] for line in record(folder, "step")] == [1, 2, 3, 4, 5, 6]
    assert_close(replayed(folder, settings), weights_of(folder))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ONE if name.startswith("overlap")])
def test_weights_that_are_fetched_ahead_are_those_of_the_log(one, name):
    folder = one / name
    assert_close(replayed(folder, ONE[name]), weights_of(folder))
    gradients = [event for event in log_of(folder).events if event.kind == "gradient"]
    ahead = sum(event.part for event in gradients)
    assert ahead >= 1 and max(event.part for event in gradients) == 1  # a reading came before the gradient of the one before
    if name == "overlap, max_staleness":
        assert max(staleness_of(folder)) <= 2
    assert max(staleness_of(folder)) >= 1  # its own


@pytest.mark.long
@pytest.mark.parametrize(("servers", "name"), [(2, "asynchronous"), (2, "overlap"), (3, "asynchronous")])
def test_the_bytes_of_all_weights_and_gradients_are_those_of_the_formula(several, servers, name):
    log = log_of(several / str(servers) / name)
    sent, received = bytes_of_run(12, 2, of_push=log.numel, of_state=log.numel, itemsize=8, servers=servers)
    assert sum(event.bytes for event in log.events if event.kind == "read") == sent
    assert sum(event.bytes for event in log.events if event.kind == "gradient") == received - 2 * 8 * 5


def failing(mesh, folder, cases):
    """What each rank says where a worker or a further server fails, or where the run is refused."""
    texts, real, update = [], Worker.gradient, PartServer._update

    def gradient(self, share, state):
        found = real(self, share, state)
        if name == "raises":
            if mesh.rank == 0:
                raise ValueError("the third page is torn")
            wait_for_failure(folder / name)
        if name == "nan":  # in the last part
            found.values[-1] = torch.nan
        return found

    def fails(self, order):
        if name == "server":
            raise ValueError("the shelf is full")
        return update(self, order)

    Worker.gradient, PartServer._update = gradient, fails
    try:
        for name, settings in cases.items():
            try:
                train(config_of(settings), folder / name, mesh.world)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                texts.append(f"{type(error).__name__}: {error}")
    finally:
        Worker.gradient, PartServer._update = real, update
    return texts


@pytest.mark.long
def test_an_error_of_a_worker_or_of_a_further_server_ends_the_run(tmp_path):
    two, ahead = ["agreement={name: server, servers: 2}"], ["agreement={name: server, servers: 2, overlap: true}"]
    whole = [*two, "optimizer={name: 'torch.optim:Adafactor', lr: 0.1, base_lr: 0.1, lr_rule: linear}"]
    cases = {"raises": two, "nan": ahead, "server": ahead, "whole": whole, "again": two}
    found = on_ranks(4, failing, tmp_path, cases, plan=plan_of(config_of(two), 4))
    assert [len(texts) for texts in found] == [4] * 4  # the last run is none of these
    raises, nan, server, refused = zip(*found, strict=True)
    assert raises[2] == "AgreedError: worker 0: the third page is torn" and raises[0] == "ValueError: the third page is torn"
    assert "the first server failed" in raises[3] and "the server failed" in raises[1]
    assert all("no finite number" in nan[rank] for rank in (2, 0)) and "PeerFailedError" in nan[3]
    assert server[2] == "AgreedError: the server on rank 3: the shelf is full" and server[3] == "ValueError: the shelf is full"
    assert all("Adafactor looks at whole weights" in text for text in refused)
    assert_close(replayed(tmp_path / "again", two), weights_of(tmp_path / "again"))


def test_more_servers_than_weights_and_backup_workers_than_workers_are_refused():
    with pytest.raises(ValueError, match="285 parameters on 300 servers"):
        ServerLinks(FlatModel(Plain()), None, [None] * 299, worker=0)
    for settings, ranks, words in (
        (["agreement={name: server, servers: 3}"], 3, "3 ranks that hold weights and one or more for workers"),
        ([f"{SYNCHRONOUS}, backup: 2}}"], 3, "agreement.backup=2 of 2 workers leaves none"),
    ):
        config = config_of(settings)
        with pytest.raises(ValueError, match=words):
            check_plan(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch_if_known)


# ---------------------------------------------------------------------------------------------- backup workers


BACKUP = {
    "one server": [f"{SYNCHRONOUS}, backup: 1}}", "data.batch_size=120", "schedule.length=1ep"],
    "two": [f"{SYNCHRONOUS}, backup: 1, servers: 2}}", "data.batch_size=120", "schedule.length=1ep", "evaluate.every=4step"],
}


@pytest.fixture(scope="module")
def backed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backup")
    for servers, (name, settings) in enumerate(BACKUP.items(), 1):
        ran_on(folder, {name: settings}, servers=servers, workers=3)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", BACKUP)
def test_late_gradients_are_dropped_and_their_samples_are_handed_out_again(backed, name):
    folder = backed / name
    log = log_of(folder)
    dropped = {event.numbers[0]: event.samples for event in log.events if event.kind == "drop"}
    updates = [event for event in log.events if event.kind == "reduce"]
    assert dropped and set(times_learned(log).values()) == {1}
    assert not {number for event in updates for number in event.numbers} & dropped.keys()
    assert [len(event.numbers) for event in updates] == [2] * 12  # of the 3 workers, in each of 12 steps
    assert set(staleness_of(folder)) == {0}
    assert_close(replayed(folder, BACKUP[name]), weights_of(folder))
    assert [line["dropped"] for line in record(folder, "updates") if line["dropped"]]
    assert sum(line["dropped"] for line in record(folder, "updates")) <= sum(map(len, dropped.values()))


# ---------------------------------------------------------------------------------------------- parts


def test_the_pieces_of_all_parts_are_the_weights_and_what_an_optimizer_keeps_of_them():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    net[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": [net[0].weight, net.scale], "lr": 0.1}, {"params": [
        net[0].bias, net[1].weight, *net[2].parameters()], "weight_decay": 0.0}], fused=True)  # fmt: skip
    whole = FlatModel(net)
    for one in whole.trained[1:]:  # the first one has no state yet
        one.grad = torch.randn_like(one)
    optimizer.step()
    expected = {place: dict(optimizer.state[one]) for place, one in enumerate(whole.trained) if one in optimizer.state}
    cuts = [slice(0, 20), slice(20, 58), slice(58, 61), slice(61, whole.numel)]
    parts = [WeightPart(whole, optimizer, cut) for cut in cuts]
    assert torch.equal(torch.cat([part.weights() for part in parts]), whole.weights())
    sent = [from_bytes(to_bytes(part.states())) for part in parts]
    join_states(whole, optimizer, [(part.places, states) for part, states in zip(parts, sent, strict=True)])
    assert optimizer.state.keys() == {whole.trained[place] for place in expected}
    for place, kept in expected.items():
        found = optimizer.state[whole.trained[place]]
        assert found.keys() == kept.keys() and all(torch.equal(found[key], kept[key]) for key in kept)
        assert all(found[key].stride() == kept[key].stride() for key in kept)


def test_parts_step_as_the_whole_does():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2)).double()
    whole = FlatModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    parts = [WeightPart(whole, optimizer, cut) for cut in (slice(0, 7), slice(7, 50), slice(50, whole.numel))]
    for _ in range(3):
        gradient = torch.randn(whole.numel, dtype=torch.float64)
        whole.set_gradient(gradient, ())
        optimizer.step()
        for part in parts:
            whole.with_pieces(part.pieces).set_gradient(gradient[part.part], ())
            part.optimizer.step()
    assert (torch.cat([part.weights() for part in parts]) - whole.weights()).abs().max() <= 1e-15


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor"])
def test_optimizers_that_look_at_whole_weights_are_refused(kind):
    optimizer = getattr(torch.optim, kind)(nn.Linear(2, 2).parameters())
    with pytest.raises(NotImplementedError, match=f"{kind} looks at whole weights in each step, and 2 servers hold a part"):
        check_optimizer(optimizer, 2)
