"""Hogwild in real processes: weights in memory that all ranks share, which workers change without locks."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import time

import pytest
import torch
from agreement.nets import Plain
from agreement.replicas_by_hand import ByHand
from agreement.test_server_runs import SLOW, _own_code, assert_close, config_of, log_of, ran_all, replayed, weights_of  # noqa: F401
from command import DIGITS, record, wait_for_step
from command import ranks_of as processes_of
from command import run as run_command
from command import start as start_command
from ranks import on_ranks
from torch import nn

from widefield.agreement.sample_account import times_learned
from widefield.asynchrony import checks, hogwild_weights, hogwild_worker, shared_memory
from widefield.asynchrony import ranks as server_ranks
from widefield.asynchrony.checks import check_recipe, server_in_words
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import WorkersGradient
from widefield.asynchrony.shared_memory import BEGUN, ENDED, IDLE, SharedLayout, made_memory, opened_memory
from widefield.plans import plan_of
from widefield.run import train

SGD = "optimizer={name: sgd, lr: 0.1, momentum: 0}"
HOGWILD, SERVER = ["agreement={name: server, kind: hogwild}", SGD], ["agreement={name: server}", SGD]
NORMALIZED = ["model.name=resnet", "model.options={widths: [4, 6], blocks: 1}", "evaluate.every=2step"]
DECAYED = ["optimizer={name: sgd, lr: 0.1, momentum: 0, weight_decay: 0.1, clip_norm: 0.05}"]
CASES = {
    "plain": [],
    "odd batch": ["data.batch_size=13", "schedule={name: cosine, length: 6step, warmup: 2step}"],
    "decayed and clipped": DECAYED,
    "normalized": NORMALIZED,
    "branches": ["model.name=agreement.nets:Branches"],
    "epoch": ["data.batch_size=400", "schedule.length=2ep"],
    "own rates": ["optimizer={name: sgd, lr: 0.1, momentum: 0, groups: [{match: head*, lr: 2x}], layer_decay: 0.5}"],
}
BOTH = {f"{kind} {name}": [*agreement, *case] for name, case in CASES.items()
        for kind, agreement in (("hogwild", HOGWILD), ("server", SERVER))}  # fmt: skip
COUNTED = [*SLOW, *HOGWILD, "model.name=agreement.nets:Counting"]


def shared_files():
    """Names in /dev/shm but for locks, which ranks of other tests make at the same time, and leave where they are killed."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def plan_for(ranks):
    return plan_of(config_of(HOGWILD), ranks)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """BOTH with one worker, and what goes on from a run of half the steps."""
    folder = tmp_path_factory.mktemp("one")
    half = {"goes on": [*HOGWILD, "schedule.length=3step"], "as another": [*HOGWILD, *DECAYED, "schedule.length=3step"]}
    on_ranks(2, ran_all, folder, BOTH | half, plan=plan_for(2))
    shutil.copytree(folder / "as another", folder / "one device goes on")
    on_ranks(2, ran_all, folder, {"goes on": HOGWILD, "as another": [*SERVER, *DECAYED]}, plan=plan_for(2))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_one_worker_is_an_asynchronous_server_with_one(one, name):
    assert_close(weights_of(one / f"hogwild {name}"), weights_of(one / f"server {name}"))
    found, expected = (record(one / f"{kind} {name}", "step") for kind in ("hogwild", "server"))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-12, abs=0)
    found, expected = (record(one / f"{kind} {name}", "evaluation") for kind in ("hogwild", "server"))
    assert [line["metrics"] for line in found] == [line["metrics"] for line in expected]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("epoch", "own rates")])
def test_one_worker_is_one_device(one, name):
    """But for the last step of an epoch, whose rate is that of its samples, and for rates that `ByHand` does not know."""
    hand = ByHand(config_of(["agreement={name: local_sgd, period: 1000}", SGD, *CASES[name]]), 1).train(6)
    found = weights_of(one / f"hogwild {name}")
    assert_close({name: found[name] for name in hand.weights(0)}, hand.weights(0))


@pytest.mark.parametrize("name", ["plain", "epoch"])
def test_one_workers_log_is_replayed(one, name):
    assert_close(replayed(one / f"hogwild {name}", BOTH[f"hogwild {name}"]), weights_of(one / f"hogwild {name}"))
    assert log_of(one / f"hogwild {name}").exact and "kind='hogwild'" in log_of(one / f"hogwild {name}").algorithm


def test_a_run_goes_on_also_with_another_agreement(one):
    assert_close(weights_of(one / "goes on"), weights_of(one / "hogwild plain"))
    assert_close(weights_of(one / "as another"), weights_of(one / "hogwild decayed and clipped"))
    plain = [*DECAYED, "batch_norm=synchronized"]
    on_ranks(2, ran_all, one, {"one device goes on": plain}, plan=plan_of(config_of(plain), 2))
    assert [line["step"] for line in record(one / "one device goes on", "step")] == [1, 2, 3, 4, 5, 6]
    assert_close(weights_of(one / "one device goes on"), weights_of(one / "hogwild decayed and clipped"))


def test_messages_have_no_weights(one):
    events = log_of(one / "hogwild normalized").events
    assert {event.bytes for event in events if event.kind == "read"} == {8 * (5 + 2 + 1)}
    assert {event.bytes for event in events if event.kind == "gradient"} == {8 * (5 + 2)}


# ---------------------------------------------------------------------------------------------- three workers


THREE = {
    "counted": [*HOGWILD, "model.name=agreement.nets:Counting", "data.batch_size=36", "schedule.length=1ep"],
    "normalized": [*HOGWILD, *NORMALIZED, "data.batch_size=60", "schedule.length=3ep", "evaluate.every=1ep"],
    "begun": [*HOGWILD, "schedule.length=3step"],
}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    on_ranks(4, ran_all, folder, THREE, plan=plan_for(4))
    return folder


def assert_learned_once(folder):
    """As the log says, and the weights: each update took 0.1 x its samples / 36."""
    log = log_of(folder)
    assert set(times_learned(log).values()) == {1}
    assert counted_samples(folder) == pytest.approx(log.num_samples, rel=1e-12)


def counted_samples(folder):
    """How many samples the weights say that they have learned from, of a net that counts them."""
    return -sum(float(one) for name, one in weights_of(folder).items() if name.startswith("counts")) * 36 / 0.1


@pytest.mark.long
def test_every_sample_is_in_the_weights_exactly_once(three):
    assert_learned_once(three / "counted")
    gradients = [event for event in log_of(three / "counted").events if event.kind == "gradient"]
    assert {event.workers for event in gradients} == {(0,), (1,), (2,)}


def test_three_workers_learn(three):
    assert set(times_learned(log_of(three / "normalized")).values()) == {1}
    losses = [line["loss"] for line in record(three / "normalized", "step")]
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8]), losses
    assert all(bool(one.isfinite().all()) for one in weights_of(three / "normalized").values())
    accuracies = [line["metrics"]["top1"] for line in record(three / "normalized", "evaluation")]
    assert accuracies[-1] > accuracies[0]


def test_a_log_of_several_workers_is_not_replayed(three, tmp_path):
    with pytest.raises(ValueError, match="3 workers changed shared weights without locks, and who wrote which number first"):
        replayed(three / "counted", THREE["counted"])
    shutil.copytree(three / "begun", tmp_path / "begun")
    on_ranks(2, ran_all, tmp_path, {"begun": HOGWILD}, plan=plan_for(2))  # with one of them
    assert [line["step"] for line in record(tmp_path / "begun", "step")] == [1, 2, 3, 4, 5, 6]
    assert not log_of(tmp_path / "begun").exact


# ---------------------------------------------------------------------------------------------- kill -9


def command_of(folder, *further):
    return ["train", DIGITS, "--run", folder, *COUNTED, "mesh.replicate=4", *further]


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_a_worker_and_then_the_server_are_killed(tmp_path):
    before, folder = shared_files(), tmp_path / "run"
    process = start_command(*command_of(folder))
    wait_for_step(process, folder, 5)
    os.kill(processes_of(process)[0].pid, signal.SIGKILL)
    killed = time.time()
    wait_for_step(process, folder, 20)
    steps = [line["time"] for line in record(folder, "step")]
    assert min(one for one in steps if one > killed) - killed < 5
    assert any("worker 0 is gone" in line["text"] and "2 go on" in line["text"] for line in record(folder, "warning"))
    os.kill(processes_of(process)[-1].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and "rank 3 was killed by SIGKILL" in output, output
    assert "resumed from" in run_command(*command_of(folder, "mesh.replicate=3"))
    assert_learned_once(folder)
    assert shared_files() <= before


@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("ended", r"after an update of which it had not told, which counts \(share \d of step \d\); 2 go on$"),
        ("begun", r"in the middle of an update, which counts, and of which the weights may lack a part \(share"),
    ],
)
@pytest.mark.usefixtures("_own_code")
def test_a_worker_that_is_killed_before_it_tells_of_its_update_has_made_it(tmp_path, monkeypatch, when, words):
    monkeypatch.setenv("WIDEFIELD_TEST_KILLED", when)
    run_command(*command_of(tmp_path / "run", "model.name=agreement.nets:KilledAfterUpdate", "schedule.length=8step"))
    (text,) = [line["text"] for line in record(tmp_path / "run", "warning") if "worker 0 is gone" in line["text"]]
    assert re.search(words, text) and "handed out again" not in text
    gradients = [event for event in log_of(tmp_path / "run").events if event.kind == "gradient"]
    assert sum(event.workers == (0,) for event in gradients) == 3
    assert len({event.samples for event in gradients}) == len(gradients) == 24
    assert counted_samples(tmp_path / "run") == pytest.approx(8 * 36, rel=1e-12)


@pytest.mark.long
@pytest.mark.usefixtures("_own_code")
def test_nothing_is_left_where_all_are_killed(tmp_path):
    before = shared_files()
    process = start_command(*command_of(tmp_path / "run"))
    wait_for_step(process, tmp_path / "run", 2)
    for rank in processes_of(process):
        os.kill(rank.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert shared_files() <= before


# ---------------------------------------------------------------------------------------------- what ends a run


def failing(mesh, folder):
    """What each rank says where something fails on one; and whether a worker has learned from anything."""
    texts, learned = {}, []
    last, first = mesh.rank == mesh.size - 1, mesh.rank == 0
    real = {"learned": hogwild_worker.HogwildWorker.learned, "allocate": os.posix_fallocate, "machine": checks.machine,
            "open": hogwild_worker.opened_memory, "seconds": server_ranks.FAILED_SECONDS}  # fmt: skip

    def nan(self, share, state):
        found = real["learned"](self, share, state)
        learned.append(share)
        if name == "nan" and len(learned) == 1:
            found.gradient[0] = math.nan
        return found

    def full(file, start, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hidden(address, layout):
        return real["open"]((1, *address[1:]), layout)

    def late(address, layout):
        while not (folder / "hidden" / "report.html").exists():
            time.sleep(0.01)  # the server has failed by then
        return real["open"](address, layout)

    hogwild_worker.HogwildWorker.learned = nan
    try:
        for name in ("machines", "full", "hidden", "nan"):
            learned.clear()
            os.posix_fallocate = full if name == "full" and last else real["allocate"]
            checks.machine = (lambda: "n2 boot net") if name == "machines" and first else (lambda: "n1 boot net")
            hogwild_worker.opened_memory = (hidden if first else late) if name == "hidden" else real["open"]
            server_ranks.FAILED_SECONDS = 60.0 if name == "hidden" else real["seconds"]
            try:
                train(config_of(HOGWILD), folder / name, mesh.world)
            except (RuntimeError, ValueError) as error:
                texts[name] = f"{type(error).__name__}: {error}", len(learned)
    finally:
        hogwild_worker.HogwildWorker.learned, os.posix_fallocate = real["learned"], real["allocate"]
        checks.machine, hogwild_worker.opened_memory = real["machine"], real["open"]
        server_ranks.FAILED_SECONDS = real["seconds"]
    return texts


@pytest.mark.long
def test_what_one_rank_cannot_do_ends_the_run_on_all_before_anything_is_learned(tmp_path):
    before = shared_files()
    found = on_ranks(4, failing, tmp_path, plan=plan_for(4))
    machines, full, hidden, nan = ([one[name] for one in found] for name in ("machines", "full", "hidden", "nan"))
    assert {text for text, _ in machines} == {
        "AgreedError: agreement.kind=hogwild has all ranks change weights in one machine's memory, and the 4 ranks are on 2 "
        "machines (or containers): ranks 0 on n2; 1, 2, 3 on n1. Start all of them on one, or set agreement.kind=asynchronous"
    }
    assert re.search(
        r"the weights and 3 workers' cells take 2,7\d\d bytes .*\(No space left on device\); free some", full[3][0]
    )
    assert all("PeerFailedError: the server failed" in text for text, _ in full[:3])
    assert hidden[3][0].startswith("AgreedError: worker 0: the 2,7") and "cannot be mapped here" in hidden[3][0]
    assert hidden[0][0].startswith("ValueError") and {text for text, _ in hidden[1:3]} == {
        "PeerFailedError: the server failed; its message is above"
    }
    assert {count for of in (machines, full, hidden) for _, count in of} == {0}
    assert "no finite number" in nan[3][0] and "checkpoints stay" in nan[3][0]
    assert shared_files() <= before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("servers: 2", "servers=2 with kind=hogwild: workers read and change weights in memory that all share"),
        ("overlap: true", "overlap with kind=hogwild"),
        ("compression: int8", "compression=int8 with kind=hogwild"),
        ("backup: 1", "backup=1 with kind=hogwild: only a synchronous update waits for workers"),
        ("bound: 1", "kind=hogwild with bound: bounded_staleness takes one"),
        ("max_staleness: 1", "kind=hogwild with max_staleness"),
        ("compensation: 0.1", "kind=hogwild with compensation=0.1: delay_compensated has one"),
    ],
)
def test_options_that_need_messages_or_a_server_that_steps_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        config_of([f"agreement={{name: server, kind: hogwild, {options}}}", SGD])


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("{name: sgd}", "optimizer.momentum=0.9 keeps a mean of earlier gradients .* set optimizer.momentum=0 and"),
        ("{name: sgd, nesterov: true}", "optimizer.momentum=0.9 and optimizer.nesterov=true"),
        ("{name: sgd, momentum: 0, options: {momentum: 0.5}}", "optimizer.momentum=0.5 keeps"),
        ("{name: adamw}", "optimizer.name=adamw keeps something of earlier gradients .* or set agreement.kind=asynchronous"),
        ("{name: 'torch.optim:RMSprop', lr: 0.1}", "optimizer.name=torch.optim:RMSprop keeps"),
    ],
)
def test_optimizers_that_keep_something_are_refused(optimizer, words):
    check_recipe(config_of(["agreement={name: server}", f"optimizer={optimizer}"]))
    with pytest.raises(ValueError, match=words):
        check_recipe(config_of([HOGWILD[0], f"optimizer={optimizer}"]))


def test_a_system_without_such_memory_is_refused(monkeypatch):
    check_recipe(config_of(HOGWILD))
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="needs memory of the kernel that ranks share, by memfd_create"):
        check_recipe(config_of(HOGWILD))


def test_the_plan_says_what_is_done():
    text = server_in_words(plan_for(4))
    assert "3 workers read and change weights in memory that they share with rank 3, without locks" in text
    assert "3 workers and a server, hogwild" in str(plan_for(4))


# ---------------------------------------------------------------------------------------------- the memory


def test_what_one_writes_another_reads_and_other_memory_is_refused():
    flat = FlatModel(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).double())
    layout = SharedLayout.of(flat, 3)
    made = made_memory(layout)
    opened = opened_memory(made.address, layout)
    made.state.copy_(torch.arange(float(layout.values)))
    assert torch.equal(opened.state, made.state) and opened.statistics.numel() == 10
    gradient = WorkersGradient((7, 2), torch.zeros(30), torch.arange(10.0), frozenset(), 1.5, 12.0, 0.25)
    assert made.cells[1].stage == IDLE
    opened.cells[1].begin(gradient)
    assert made.cells[1].stage == BEGUN
    opened.cells[1].end()
    found = made.cells[1].written(56)
    assert made.cells[1].stage == ENDED and [cell.stage for cell in made.cells] == [IDLE, ENDED, IDLE]
    assert (found.share, found.loss_sum, found.count, found.seconds, found.nbytes) == ((7, 2), 1.5, 12.0, 0.25, 56)
    assert torch.equal(found.statistics, gradient.statistics.double())
    assert torch.equal(made.state, torch.arange(float(layout.values)).double())
    made.cells[2].strike()
    assert opened.cells[2].is_struck and not opened.cells[1].is_struck
    process, file, nbytes, mark = made.address
    for address, words in (
        ((process, file, nbytes, mark + 1), "there is another file of that number"),
        ((process, file, nbytes + 64, mark), f"the server shares {nbytes + 64:,} bytes and this worker's model"),
        ((process, 10**6, nbytes, mark), "No such file or directory"),
    ):
        with pytest.raises(ValueError, match=words):
            opened_memory(address, layout)
    made.close()
    with pytest.raises(ValueError, match="cannot be mapped here"):
        opened_memory((process, file, nbytes, mark), layout)
    opened.state[0] = 5.0
    assert made.state[0] == 5.0  # those who have it keep it


def test_a_worker_that_was_taken_for_dead_changes_nothing_when_it_wakes(monkeypatch):
    weights = object.__new__(hogwild_weights.HogwildWeights)
    layout = SharedLayout.of(FlatModel(Plain()), 2)
    weights.memory = memory = made_memory(layout)
    assert weights.unheard(0, [(3, 1)]) is None and memory.cells[0].is_struck  # it has begun nothing
    gradient = WorkersGradient((3, 1), torch.zeros(0), torch.zeros(0), frozenset(), 1.0, 4.0, 0.1)
    worker = object.__new__(hogwild_worker.HogwildWorker)
    worker.number, worker.memory = 0, shared_memory.opened_memory(memory.address, layout)
    worker.learned = lambda share, state: gradient
    worker.subtract = lambda found, rate: pytest.fail("its share is another one's")
    assert worker.update((3, 1), 0.1).ints == (3, 1)
    memory.cells[1].begin(gradient)
    assert weights.unheard(1, []) is None  # it had told of that one
    assert weights.unheard(1, [(3, 1)])[0].share == (3, 1)
    memory.close()
