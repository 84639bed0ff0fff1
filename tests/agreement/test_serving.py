"""Who may read and which gradients are applied at a server, in random orders of what comes; and what a server refuses."""

from __future__ import annotations

import datetime
import math
import random
import time

import pytest
import torch
import torch.distributed as dist
from agreement.failures import wait_for_failure
from agreement.test_server_runs import SMALL, config_of
from command import DIGITS
from ranks import on_ranks
from torch import nn
from training.test_gan import RECIPE as GAN

from widefield.agreement import ParameterServer
from widefield.agreement.serving import Serving, Shares
from widefield.asynchrony.checks import check_parts, check_recipe
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.worker import Worker
from widefield.comm.mesh import Mesh, World
from widefield.comm.requests import LostPeer, Message, Requests, asked, close_all
from widefield.config import read_config
from widefield.parallel.parallelize import parallelize
from widefield.plans import Plan, from_text, plan_of, to_text
from widefield.plans import check as check_plan
from widefield.run import train
from widefield.training.assemble import assemble
from widefield.training.given import Given

KINDS = {
    "asynchronous": ParameterServer(),
    "synchronous": ParameterServer(kind="synchronous"),
    "backup 1": ParameterServer(kind="synchronous", backup=1),
    "backup 2": ParameterServer(kind="synchronous", backup=2),
    "bound 0": ParameterServer(bound=0),
    "bound 2": ParameterServer(bound=2),
    "max_staleness 0": ParameterServer(max_staleness=0),
    "max_staleness 2": ParameterServer(max_staleness=2),
}
STEPS, PLACES = 5, 3


class _Played:
    """A server and workers without weights or processes, which act in a random order.  ahead: as of Serving.

    back: how many of the dead come back.
    """

    def __init__(self, algorithm, draws, *, deaths, ahead=0, back=0):
        self.back, self.dead, self.came_back = back, [], []
        self.draws, self.deaths, self.stand, self.ahead = draws, deaths, 2, ahead
        self.places = algorithm.needed(3) if algorithm.backup else PLACES
        shares = Shares(lambda step: range(self.places), limit=self.stand)
        self.serving = Serving(algorithm, shares, range(3), ahead=ahead)
        self.asks = dict.fromkeys(range(3), True)  # of the living, whether it has asked nothing yet
        self.has = {worker: [] for worker in range(3)}  # (share, version), the one it learns from first
        self.version, self.learned, self.staleness, self.dropped, self.of_update = 0, [], [], 0, []

    def play(self):
        while len(self.learned) < STEPS * self.places:
            self._hear()
            for found in self.serving.due():
                self.learned += [one.share for one in found]
                self.staleness += [self.version - one.gradient for one in found]
                self.of_update.append(len(found))
                self.version += 1
            if len(self.learned) == self.stand * self.places:  # nothing is in the air: an evaluation could be
                assert not self.serving.shares.taken and not self.serving.held
                self.stand = self.serving.shares.limit = min(STEPS, self.stand + 2)
            for worker, share in self.serving.ready():
                self.has[worker].append((share, self.version))
                self.asks[worker] = bool(self.ahead)  # for the next one, while it learns from this one
                assert len(self.has[worker]) <= 1 + self.ahead

    def _hear(self):
        acts = [(worker, "asks") for worker, asks in self.asks.items() if asks]
        acts += [(worker, "pushes") for worker in self.asks if self.has[worker]]
        if self.dead and self.back and self.draws.random() < 0.2:
            self._comes_back(self.dead.pop())
            return
        assert acts, f"nobody acts and {len(self.learned)} of {STEPS * self.places} are learned"
        worker, act = self.draws.choice(acts)
        if self.deaths and self.draws.random() < 0.1:
            self.deaths -= 1
            del self.asks[worker]
            self.dead.append(worker)
            self.has[worker].clear()
            self.serving.goes(worker)
        elif act == "asks":
            self.asks[worker] = False
            self.serving.joins(worker)
        else:
            self._push(worker, *self.has[worker].pop(0))

    def _comes_back(self, worker):
        self.back -= 1
        self.serving.comes_back(worker)
        self.asks[worker] = True
        self.came_back.append(worker)

    def _push(self, worker, share, version):
        if self.serving.late.get(worker) == share:
            assert version < self.version
            self.dropped += 1
            self.serving.drops_late(worker)
        else:
            self.serving.pushes(worker, share, version)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_in_any_order_and_whoever_dies_or_comes_back_each_share_is_learned_once_and_nobody_waits_for_ever(name, ahead):
    if ahead and KINDS[name].kind == "synchronous":
        return
    most = {"synchronous": 0, "backup 1": 0, "backup 2": 0, "max_staleness 0": 0, "max_staleness 2": 2}.get(name, math.inf)
    dropped = back = 0
    for seed in range(2000):
        played = _Played(KINDS[name], random.Random(f"{name} {seed}"), deaths=seed % 3, ahead=ahead, back=seed // 3 % 3)
        played.play()
        back += len(played.came_back)
        assert sorted(played.learned) == [(step, place) for step in range(STEPS) for place in range(played.places)]
        assert max(played.staleness) <= most
        dropped += played.dropped
        if KINDS[name].backup:  # as many gradients as a step has, of whichever steps
            assert set(played.of_update) == {played.places}
    assert bool(dropped) == bool(KINDS[name].backup) and back > 300


def test_a_run_that_is_asked_to_stop_ends_what_was_begun():
    shares = Shares(lambda step: range(2), limit=9)
    taken = [shares.take(worker) for worker in range(3)]
    assert taken == [(0, 0), (0, 1), (1, 0)]
    shares.stop(0)
    assert shares.limit == 2 and shares.take(3) == (1, 1) and shares.first() is None


# ---------------------------------------------------------------------------------------------- messages


def exchanged(mesh):
    """Rank 1 answers with the request's numbers, doubled; rank 0 counts bytes."""
    group = mesh.checkpoint_group
    if mesh.rank == 0:
        answers = [asked(Message(7, (1, 2), (0.5,), torch.arange(3.0)), 1, group), asked(Message(8), 1, group)]
        return [(one.kind, one.ints, one.floats, one.values) for one in answers]
    requests = Requests([0], group)
    _, first = requests.next(60.0)
    requests.answer(0, Message(9, (2, 4), (1.0,), 2 * first.values))
    close_all([requests], Message(10), seconds=60.0)
    return requests.sent, requests.received, isinstance(first, LostPeer)


def test_a_request_is_answered_and_the_bytes_are_counted():
    answers, (sent, received, is_gone) = on_ranks(2, exchanged)
    assert answers[0][:3] == (9, (2, 4), (1.0,)) and answers[0][3].tolist() == [0.0, 2.0, 4.0]
    assert answers[1][0] == 10 and not is_gone
    assert sent == received == 8 * (5 + 2 + 1) + 3 * 4


def waiting(mesh):
    """Rank 1 answers, over a group whose timeout is shorter than the pause of rank 0, and than its own before an answer."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1), backend="gloo")
    if mesh.rank == 0:
        first = asked(Message(7), 1, group).kind
        time.sleep(1.5)
        return first, asked(Message(8), 1, group).kind
    requests = Requests([0], group)
    came = requests.next(60.0)
    time.sleep(1.5)
    requests.answer(0, Message(9))
    found = came[1].kind, requests.next(60.0)[1]
    close_all([requests], Message(10), seconds=60.0)
    return found[0], getattr(found[1], "kind", found[1])


@pytest.mark.long
def test_a_peer_that_lives_may_take_longer_than_the_groups_timeout():
    assert on_ranks(2, waiting) == [(9, 10), (7, 8)]


# ---------------------------------------------------------------------------------------------- what ends a run


def failing(mesh, folder):
    """What each rank says where worker 0 raises, and where its gradient is NaN."""
    texts, real = [], Worker.gradient

    def raises(self, share, state):
        if mesh.rank == 0:
            raise ValueError("the third page is torn")
        wait_for_failure(folder / name)
        return real(self, share, state)

    def nan(self, share, state):
        found = real(self, share, state)
        found.values[0] = math.nan
        return found

    for name, gradient in (("raises", raises), ("nan", nan)):
        Worker.gradient = gradient
        try:
            train(config_of(["agreement={name: server}"]), folder / name, mesh.world)
        except (RuntimeError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        finally:
            Worker.gradient = real
    return texts


def test_an_error_of_a_worker_or_a_gradient_that_is_no_number_ends_the_run(tmp_path):
    found = on_ranks(3, failing, tmp_path, plan=plan_of(config_of(["agreement={name: server}"]), 3))
    assert found[2][0] == "AgreedError: worker 0: the third page is torn"
    assert found[0][0] == "ValueError: the third page is torn" and "the server failed" in found[1][0]
    assert "no finite number" in found[2][1] and "checkpoints stay" in found[2][1]
    assert all("PeerFailedError: the server failed" in found[rank][1] for rank in range(2))


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{name: server, backup: 1}", "only a synchronous update waits for workers"),
        ("{name: server, kind: synchronous, overlap: true}", "so they cannot come before"),
        ("{name: server, servers: 2, compression: int8}", "servers=2: a compressed gradient is one of all weights"),
        ("{name: server, kind: synchronous, backup: 1, compression: int8}", "backup=1: a compressed gradient"),
        ("{name: ad_psgd, servers: 2}", "servers is an option of server, and the name is ad_psgd"),
        ("{name: server, kind: bounded_staleness}", "with no bound: bounded_staleness takes one of"),
        ("{name: server, kind: bounded_staleness, bound: 1, max_staleness: 2}", "with bound and max_staleness"),
        ("{name: server, max_staleness: 2}", "the other kinds take none"),
        ("{name: server, kind: delay_compensated}", "compensation=None: delay_compensated has one"),
        ("{name: server, compensation: 1.0}", "the other kinds have none"),
        ("{name: server, kind: delay_compensated, compensation: 1.0, compression: int8}", "its delay cannot be compensated"),
        ("{name: server, compression: zip}", "compression"),
        ("{name: server, compression: topk, compression_share: 0}", "compression_share"),
        ("{name: server, compression: int8, compression_share: 0.1}", "compression_share is an option of compression=topk"),
        ("{name: server, compression_block: 16}", "option of compression=int8, and compression is None"),
        ("{name: ad_psgd, compression: int8}", "compression is an option of server, and the name is ad_psgd"),
        ("{name: ad_psgd, kind: synchronous}", "kind is an option of server, and the name is ad_psgd"),
        ("{name: server, period: 4}", "period is an option of local_sgd"),
        ("{name: local_sgd, kind: synchronous}", "kind is an option of server, and the name is local_sgd"),
    ],
)
def test_options_that_a_server_does_not_have_are_refused(section, words):
    with pytest.raises(ValueError, match=words):
        config_of([f"agreement={section}"])


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ([], 1, "a rank that computes no gradients and one or more for workers, and mesh.replicate=1"),
        (["mesh.space=[2,1]"], 4, r"whole images, and mesh.space=\[2, 1\] was asked for"),
        (["mesh.shard=2"], 4, "mesh.shard=2 was asked for"),
        (["stream={tiles: [2, 2]}"], 3, "stream=.* was asked for"),
        (["batch_norm=synchronized"], 3, "set batch_norm=averaged and batch_norm_group=1"),
        (["batch_norm_group=3"], 3, "set batch_norm=averaged and batch_norm_group=1"),
        (["gradient.accumulate=2"], 3, "the gradient of one pass as it is, and gradient.accumulate=2"),
        (["gradient.compression=fp16"], 3, "gradient.compression=fp16"),
        (["mesh.data_strategy=data_parallel"], 3, "has copies in one process"),
        (["data.batch_size=1"], 3, "2 copies of the model share a batch of 1"),
    ],
)
@pytest.mark.parametrize("agreement", ["{name: server}", "ad_psgd"])
def test_plans_without_workers_of_one_rank_are_refused(settings, ranks, words, agreement):
    config = config_of([f"agreement={agreement}", *settings])
    with pytest.raises(ValueError, match=words):
        check_plan(plan_of(config, ranks), ranks=ranks, samples_per_step=config.data.batch_if_known)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.batch_size=auto"], "data.batch_size=auto is found by steps of all ranks"),
        (["data.workers=2"], "data.workers=2 read ahead"),
        (["data.bad_images=skip"], "set data.bad_images=stop"),
        (["precision=float16"], "set precision=bfloat16 or float32"),
        (["optimizer.lr=find"], "find the rate with agreement=mean"),
        (["ema.decay=0.9"], "leave ema out"),
        (["log.timeline=true"], "log.timeline draws"),
        (["model.freeze=[first]", "model.unfreeze={1: first}"], "model.unfreeze=.*leave it out"),
        (["log.predict=true"], "plan steps that all ranks make together"),
        (["guard.non_finite=skip"], "guard.non_finite=skip judges steps of all ranks"),
        (["guard.spike=stop", "guard.checksum_every=4"], "guard.spike=stop, guard.checksum_every=4"),
    ],
)
def test_recipes_that_need_ranks_in_step_are_refused(settings, words):
    check_recipe(read_config(DIGITS, [*SMALL, *settings]))  # of other agreements it says nothing
    with pytest.raises(ValueError, match=words):
        check_recipe(config_of(["agreement={name: server}", *settings]))
    with pytest.raises(ValueError, match=words):
        check_recipe(config_of(["agreement=ad_psgd", *settings]))


def test_planted_faults_are_refused(monkeypatch):
    monkeypatch.setenv("WIDEFIELD_FAULTS", "rank=0 step=1 phase=forward kind=kill")
    with pytest.raises(ValueError, match="unset it, and kill a rank by hand to see"):
        check_recipe(config_of(["agreement=server"]))


def test_objects_of_a_program_are_refused():
    with pytest.raises(ValueError, match="name what makes them, as model.name=package.module:callable"):
        check_recipe(config_of(["agreement={name: server}"]), Given(model=nn.Linear(2, 2)))


class Finished:
    """A task whose loss is no sum."""

    def finish(self, sums):
        return sums


@pytest.mark.parametrize(
    ("model", "task", "words"),
    [
        (nn.BatchNorm2d(3, momentum=None), object(), "has momentum=None, the mean over all batches"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), object(), "torch.float32, torch.float64, and agreement"),
        (nn.Sequential(nn.SyncBatchNorm(3)), object(), "0 is a SyncBatchNorm, which waits for the statistics of all ranks"),
        (nn.Linear(2, 2), Finished(), "finished from the sums of a whole batch"),
    ],
)
def test_models_and_tasks_that_one_gradient_per_pass_cannot_train_are_refused(model, task, words):
    with pytest.raises(NotImplementedError, match=words):
        check_parts(model, task, "agreement=server")


def test_networks_that_learn_by_turns_are_refused():
    parts = assemble(GAN.config(), Mesh(Plan(), World(), torch.device("cpu")))
    with pytest.raises(NotImplementedError, match="modules that learn by turns"):
        check_parts(parts.model, parts.task, "agreement=server")


def test_what_makes_all_step_together_refuses_a_server():
    plan = Plan(replicate=3, agreement={"name": "server"}, batch_norm="averaged")
    assert from_text(to_text(plan)) == plan and "2 workers and a server, asynchronous" in str(plan)
    pairs = Plan(replicate=3, agreement={"name": "ad_psgd"}, batch_norm="averaged")
    assert "2 workers and a rank that keeps their account, ad_psgd" in str(pairs)
    for text in on_ranks(3, refused_together, plan=plan):
        assert "`parallelize` makes all copies step together" in text


def refused_together(mesh):
    with pytest.raises(ValueError, match="set agreement=mean for that") as error:
        parallelize(nn.Linear(2, 2), mesh)
    return str(error.value)


def test_a_flat_model_gives_back_what_it_was_given():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    net[2].weight.requires_grad_(False)
    flat = FlatModel(net)
    state = torch.arange(float(flat.of_state))
    flat.load(state)
    assert torch.equal(flat.state(), state) and flat.of_state - flat.of_push == 8
    flat.set_gradient(state[: flat.numel], absent=[1])
    gradient, absent = flat.gradient()
    assert absent == (1,) and net[0].bias.grad is None
    assert torch.equal(gradient[: 2 * 27], state[: 2 * 27]) and not gradient[54:57].any()
