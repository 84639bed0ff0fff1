"""Replicas in a run of real ranks: their numbers, beside plain models averaged by hand in one process."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from agreement.replicas_by_hand import ByHand
from command import DIGITS, fingerprint, forget_after, losses, record
from ranks import on_ranks
from training.test_gan import RECIPE as GAN

from widefield import sharded_state
from widefield.agreement import Descent, EventLog, PeriodicAveraging, SlowMomentum, of_module, replay
from widefield.agreement.events import Event
from widefield.agreement.simulator import in_words
from widefield.comm.mesh import join, leave
from widefield.config import read_config
from widefield.data.order import Key, order_of, share_of
from widefield.parallel.parallelize import parallelize
from widefield.planner.emulation.step import emulated_step
from widefield.plans import Plan, from_text, plan_of, to_text
from widefield.plans import check as check_plan
from widefield.plans.replicas import check_steps_together
from widefield.run import train
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches
from widefield.training.checkpoint import read
from widefield.training.checkpoint_directory import name_of, sound_at
from widefield.training.guard import Guard
from widefield.training.loop import Learner
from widefield.training.replica_kinds import check_replicas
from widefield.verification.training import compare_training

SMALL = [
    "precision=float64", "data.augment=[]", "data.batch_size=13", "model.options={widths: [4, 6], blocks: 1}",
    "batch_norm=averaged", "optimizer.lr=0.05", "schedule.warmup=0step",
]  # fmt: skip
NO_NORM = ["model.name=agreement.nets:Plain", "model.options={}"]
STEPS = 5
AGREEMENTS = {
    "local": ["agreement={name: local_sgd, period: 2}"],
    "post local": ["agreement={name: post_local_sgd, period: 2, start: 2}"],
    "slowmo": ["agreement={name: slowmo, period: 2, outer_momentum: 0.6, outer_rate: 0.9}"],
    "slowmo, later": ["agreement={name: slowmo, period: 2, start: 1}"],
    "diloco": ["agreement={name: diloco, period: 2}", "optimizer={name: adamw, lr: 0.01}"],
    "forgets": ["agreement={name: local_sgd, period: 2, keeps_state: false}"],
    "every step": ["agreement={name: local_sgd, period: 1}"],
    "clipped": ["agreement={name: local_sgd, period: 3}", "optimizer.clip_norm=0.3"],
    "accumulated": ["agreement={name: local_sgd, period: 2}", "gradient.accumulate=2"],
    "averaged weights": ["agreement={name: local_sgd, period: 2}", "ema.decay=0.5"],
}  # fmt: skip


def config_of(settings):
    return read_config(DIGITS, [*SMALL, *settings])


def trained(mesh, settings, steps=STEPS):
    """Losses, each rank's own weights, the consensus, and the loss of an evaluation of it."""
    parts = assemble(config_of(settings), mesh)
    learner, _ = learner_of(parts)
    learner.guard = Guard(parts.config.guard)
    batches = training_batches(parts, first=0, last=steps)
    losses = [
        learner.learn([next(batches) for _ in range(parts.config.gradient.accumulate)], stop=False)[0] for _ in range(steps)
    ]
    own = full_of(learner.model, learner.replica)
    with learner.consensus():
        model = learner.model if learner.ema is None else learner.ema.module
        mean = full_of(model, learner.replica)
        found = evaluate_parts(parts, model)
    assert full_of(learner.model, learner.replica).keys() == own.keys()
    assert all(torch.equal(one, own[name]) for name, one in full_of(learner.model, learner.replica).items())
    told = [(one.step, one.replicas, one.distance) for one in learner.replicas.averages()]
    return {"losses": losses, "own": own, "mean": mean, "loss": found.loss, "told": told}


def full_of(model, mesh):
    state = {name: one for name, one in model.state_dict().items() if one.is_floating_point()}
    whole = {}
    for name, one in state.items():
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        spec = sharded_state.registered(model).get(name)
        whole[name] = one.clone() if spec is None else spec.whole(one, 0)
    return {name: one for name, one in whole.items() if one is not None}


def check(found, hand: ByHand, *, each: int, tolerance: float = 1e-12):
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(hand.losses, rel=tolerance, abs=tolerance)
        state = hand.models[rank // each].state_dict()
        for name, value in one["own"].items():
            torch.testing.assert_close(value, state[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(AGREEMENTS))
def test_two_replicas_have_the_numbers_of_plain_models_averaged_by_hand(name):
    config = config_of(AGREEMENTS[name])
    found = on_ranks(2, trained, AGREEMENTS[name], plan=plan_of(config, 2))
    hand = ByHand(config, 2).train(STEPS)
    check(found, hand, each=1)
    if config.ema is None:
        for one in found:
            for key, value in hand.consensus().items():
                torch.testing.assert_close(one["mean"][key], value, rtol=1e-12, atol=1e-12)


SHARED = {
    "ZeRO-3": ["mesh.shard=2"],
    "ZeRO-2": ["mesh.shard=2", "sharding.zero=2"],
    "ZeRO-1": ["mesh.shard=2", "sharding.zero=1"],
    "tiles": ["mesh.space=[2,1]"],
    "channels": ["mesh.channel=2"],
    "stages": ["mesh.stage=2"],
}
"""Of two ranks that make up a replica."""


def trained_under_all(mesh, which, agreement):
    """In one set of ranks: a mesh for each plan."""
    found = {}
    for name in which:
        config = config_of([*agreement, *SHARED[name]])
        one = join(mesh.world, plan_of(config, mesh.size))
        found[name] = trained(one, [*agreement, *SHARED[name]])
        leave(one)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "agreement"),
    [
        (["ZeRO-3", "tiles", "stages"], AGREEMENTS["slowmo"]),
        (["ZeRO-2", "ZeRO-1", "channels"], [*AGREEMENTS["diloco"], "optimizer.clip_norm=0.5", "ema.decay=0.5"]),
    ],
    ids=["slowmo", "diloco, clipped, averaged"],
)
def test_replicas_of_two_ranks_each_have_the_same_numbers_whatever_they_share(which, agreement):
    found = on_ranks(4, trained_under_all, which, agreement)
    for name, settings in ((name, SHARED[name]) for name in which):
        copies = 2 if "shard" in settings[0] else 1
        hand = ByHand(config_of([*agreement, *settings]), 2, copies).train(STEPS)
        check([one[name] for one in found], hand, each=2, tolerance=1e-10)


def test_groups_average_more_often_than_all():
    settings = ["agreement={name: hierarchical, period: 4, groups: [[1, 2]]}"]
    config = config_of(settings)
    found = on_ranks(4, trained, settings, plan=plan_of(config, 4))
    check(found, ByHand(config, 4).train(STEPS), each=1)
    assert [(step, replicas) for step, replicas, _ in found[0]["told"]] == [(1, 2), (2, 2), (3, 2), (4, 4), (5, 2)]


GOSSIP = {
    "ring": ["agreement={name: gossip, graph: ring}"],
    "one peer": ["agreement=gossip", "optimizer={name: adamw, lr: 0.01}", "ema.decay=0.5"],
    "and all": ["agreement={name: gossip, global_period: 2}"],
    "edges": ["agreement={name: gossip, edges: [[0,1],[1,2],[2,3],[3,0],[0,2]]}"],
    "late ring": ["agreement={name: gossip, graph: ring, delay: 1}"],
    "late one peer": ["agreement={name: gossip, delay: 2}", "optimizer={name: adamw, lr: 0.01}"],
    "late edges": ["agreement={name: gossip, edges: [[0,1],[1,2],[2,3],[3,0],[0,2]], delay: 2}"],
    "later than the run": ["agreement={name: gossip, graph: ring, delay: 9}"],
}


def trained_by_gossip(mesh):
    found = {}
    for name, settings in GOSSIP.items():
        one = join(mesh.world, plan_of(config_of(settings), mesh.size))
        found[name] = trained(one, settings)
        leave(one)
    return found


@pytest.mark.long
def test_replicas_that_mix_with_a_few_have_the_numbers_of_plain_models_mixed_by_hand():
    found = on_ranks(4, trained_by_gossip)
    for name, settings in GOSSIP.items():
        hand = ByHand(config_of(settings), 4).train(STEPS)
        check([one[name] for one in found], hand, each=1)
        if not hand.config.ema:
            for key, value in hand.consensus().items():
                torch.testing.assert_close(found[1][name]["mean"][key], value, rtol=1e-12, atol=1e-12)
        assert (max(hand.masses) - min(hand.masses) > 0.1) == ("edges" in name)
        assert [(step, size) for step, size, _ in found[0][name]["told"]] == [(STEPS, 4)] and found[0][name]["told"][0][2] > 0


@pytest.mark.long
def test_a_replica_without_a_sample_leaves_out_the_step():
    settings = [*AGREEMENTS["diloco"], "data.batch_size=359"]  # the fifth step has one sample
    found = on_ranks(2, trained, settings, plan=plan_of(config_of(settings), 2))
    hand = ByHand(config_of(settings), 2).train(STEPS)
    check(found, hand, each=1)
    assert sorted(hand.counts) == [0, 1]


def with_a_bad_batch(mesh, settings):
    """The third step's loss is NaN on the second replica."""
    real = Learner.loss_of

    def loss_of(self, output, target, **more):
        return real(self, output, target, **more) * (
            math.nan if self.step == 2 and self.mesh.copy == 1 and self.model.training else 1.0
        )

    Learner.loss_of = loss_of
    try:
        return trained(mesh, settings)
    finally:
        Learner.loss_of = real


def test_a_step_that_the_guard_skips_changes_no_replica():
    settings = ["agreement={name: slowmo, period: 1}", "guard.non_finite=skip"]  # nothing to average then
    found = on_ranks(2, with_a_bad_batch, settings, plan=plan_of(config_of(settings), 2))
    hand = ByHand(config_of(settings), 2, skips=(2,)).train(STEPS)
    assert math.isnan(found[0]["losses"].pop(2)) and hand.losses.pop(2) > 0
    check([found[0]], hand, each=1)


TURNS = ["agreement={name: local_sgd, period: 2}", "batch_norm=averaged", "mesh.space=[]", "mesh.replicate=2"]


def of_turns(mesh):
    """The weights of a generator and a discriminator after two steps, the second of which ends a period."""
    parts = assemble(GAN.config(*TURNS), mesh)
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=2)
    found = []
    for _ in range(2):
        learner.learn([next(batches)], stop=False)
        found.append(full_of(learner.model, learner.replica))
    return found


def test_networks_that_learn_by_turns_are_averaged_together():
    first, second = zip(*on_ranks(2, of_turns, plan=plan_of(GAN.config(*TURNS), 2)), strict=True)
    for name in first[0]:
        assert torch.equal(second[0][name], second[1][name]), name
    moved = [name.partition(".")[0] for name in first[0] if not torch.equal(first[0][name], first[1][name])]
    assert set(moved) == {"generator", "discriminator"}


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["batch_norm=synchronized"], "set batch_norm=averaged: running statistics"),
        (["gradient.compression=fp16"], "local_sgd sends weights; set gradient.compression=none"),
        (["batch_norm_group=2"], "set batch_norm_group=1"),
        (["agreement={name: hierarchical, period: 4, groups: [[2, 3]]}"], "groups of 3 copies, into which mesh.replicate=4"),
        (["agreement={name: gossip, edges: [[0, 4]]}"], r"has \[0, 4\] and copies are 0 to 3"),
        (["agreement={name: gossip, edges: [[0, 1], [1, 2], [2, 0], [0, 3]]}"], "lead from copy 3 to 1 of 4 copies and never"),
    ],
)
def test_plans_whose_replicas_could_not_go_their_own_ways_are_refused(settings, words):
    config = config_of(["agreement={name: local_sgd, period: 2}", *settings])
    with pytest.raises(ValueError, match=words):
        check_plan(plan_of(config, 4), ranks=4)


def test_a_hypercube_of_three_is_refused():
    with pytest.raises(ValueError, match="a power of two of copies and mesh.replicate=3"):
        check_plan(plan_of(config_of(["agreement={name: gossip, graph: hypercube}"]), 3), ranks=3)


def test_replicas_in_one_process_are_refused():
    plan = Plan(replicate=2, agreement="local_sgd", batch_norm="averaged", data_strategy="data_parallel")
    with pytest.raises(ValueError, match="has them in one process; set mesh.data_strategy=data"):
        check_plan(plan, ranks=2)


@pytest.mark.parametrize(
    ("settings", "scales", "words"),
    [
        ([], True, "set precision=bfloat16 or float32"),
        (["guard.checksum_every=2"], False, "compares replicas bit by bit"),
        (["optimizer.lr=find"], False, "find the rate with agreement=mean"),
    ],
)
def test_recipes_that_need_replicas_in_step_are_refused(settings, scales, words):
    with pytest.raises(ValueError, match=words):
        check_replicas(config_of(["agreement={name: local_sgd, period: 2}", *settings]), scales=scales)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{name: mean, period: 2}", "period is an option of local_sgd, .*; leave it out"),
        ("{name: local_sgd, outer_rate: 0.5}", "outer_rate is an option of slowmo, diloco"),
        ("{name: post_local_sgd}", "set start to the steps"),
        ("{name: hierarchical}", "hierarchical needs groups, as"),
        ("{name: hierarchical, groups: [[8, 2]]}", "a period below 8"),
        ("{name: hierarchical, groups: [[2, 1]]}", "2 copies or more"),
        ("{name: gossipy}", "agreement.name"),
        ("{name: gossip, period: 2}", "period is an option of"),
        ("{name: gossip, graph: ring, edges: [[0, 1], [1, 0]]}", "both say whom a copy hears"),
        ("{name: gossip, edges: [[1, 1]]}", r"edges has \[1, 1\]; write"),
        ("{name: local_sgd, graph: ring}", "graph is an option of gossip"),
        ("{name: local_sgd, delay: 1}", "delay is an option of gossip"),
        ("{name: gossip, delay: 1, global_period: 4}", "global_period=4 averages what all have and delay=1 leaves some"),
    ],
)
def test_options_that_make_no_sense_are_refused(section, words):
    with pytest.raises(ValueError, match=words):
        config_of([f"agreement={section}"])


def test_the_name_alone_is_enough_and_the_earlier_key_says_where_it_went():
    assert config_of(["agreement=adasum"]).agreement.name == "adasum"
    assert from_text(to_text(Plan(replicate=2, agreement="diloco"))) == Plan(replicate=2, agreement="diloco")
    assert from_text("agreement: mean\n") == Plan()
    with pytest.raises(ValueError, match="gradient.agreement is a section of its own now; write agreement.name=adasum"):
        config_of(["gradient.agreement=adasum"])


def refused_apart(mesh):
    texts = []
    net = torch.nn.Linear(2, 2)
    for work in (lambda: parallelize(net, mesh), lambda: check_steps_together(mesh.plan, "so it is")):
        with pytest.raises(ValueError, match="set agreement=mean for that") as error:
            work()
        texts.append(str(error.value))
    return texts, str(compare_training(net, (2, 2), mesh, steps=1, dtype=torch.float64).refusal)


def test_what_makes_all_step_together_refuses_replicas():
    plan = Plan(replicate=2, agreement="local_sgd", batch_norm="averaged")
    for texts, verdict in on_ranks(2, refused_apart, plan=plan):
        assert "`parallelize` makes all copies step together" in texts[0]
        assert "one device is what plans are compared with" in verdict
    with pytest.raises(ValueError, match="planned are steps that all ranks make together"):
        emulated_step(config_of(["agreement={name: local_sgd, period: 2}"]), ranks=2)


# ---------------------------------------------------------------------------------------------- where it is lock-step after all


EVEN = [*NO_NORM, "data.batch_size=12", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}"]
ONE = {
    "local SGD of period 1": ["agreement={name: local_sgd, period: 1}"],
    "DiLoCo at rate 1 without momentum": ["agreement={name: diloco, period: 1, outer_rate: 1.0, outer_momentum: 0.0}"],
    "SlowMo of period 1 without momentum": ["agreement={name: slowmo, period: 1, outer_momentum: 0.0}"],
    "post-local SGD before its start": ["agreement={name: post_local_sgd, period: 4, start: 9}"],
    "gossip on the complete graph": ["agreement={name: gossip, graph: complete}"],
}


def trained_of_all(mesh, which):
    """Losses and weights under each of several settings, and those of data-parallel training."""
    found = {}
    for name, settings in which.items():
        one = join(mesh.world, plan_of(config_of([*EVEN, *settings]), mesh.size))
        parts = assemble(config_of([*EVEN, *settings]), one)
        learner, _ = learner_of(parts)
        batches = training_batches(parts, first=0, last=STEPS)
        losses = [learner.learn([next(batches)], stop=False)[0] for _ in range(STEPS)]
        found[name] = losses, full_of(learner.model, learner.replica)
        leave(one)
    return found


def test_replicas_that_agree_in_every_step_are_data_parallel_training():
    for found in on_ranks(2, trained_of_all, {"data parallel": ["batch_norm=synchronized"]} | ONE):
        losses, weights = found["data parallel"]
        for name in ONE:
            assert found[name][0] == pytest.approx(losses, rel=1e-12, abs=0), name
            for key, value in found[name][1].items():
                torch.testing.assert_close(value, weights[key], rtol=1e-12, atol=1e-12)


def test_a_run_of_ranks_is_what_the_simulator_computes_of_its_events():
    settings = [
        *EVEN,
        "agreement={name: slowmo, period: 2}",
        "optimizer={name: sgd, lr: 0.1, momentum: 0.9}",
        "schedule.name=constant",
    ]
    config = config_of(settings)
    found = on_ranks(2, trained, settings, 4, plan=plan_of(config, 2))
    hand = ByHand(config, 2)
    order, steps = order_of(config.seed, 0, hand.learner.steps.samples).tolist(), hand.learner.steps
    events = []
    for step in range(4):
        for rank in range(2):
            (share,) = share_of(steps.positions(step), rank=rank, ranks=2, passes=1, multiple=1)
            number, samples = 2 * step + rank, tuple(order[at] for at in share)
            events += [
                Event(step, "gradient", (rank,), samples, numbers=(number,)),
                Event(step, "step", (rank,), numbers=(number,)),
            ]
        events += [Event(step, "outer", (0, 1))] * (step % 2)
    algorithm = PeriodicAveraging(Descent(lr=0.1, momentum=0.9), 2, outer=SlowMomentum(1.0, 0.5))
    keys = [Key(0, 0, index) for index in range(hand.learner.steps.samples)]
    image, target = hand.learner.prepare(hand.parts.reader(train=True).__getitems__(keys))
    objective = of_module(
        hand.learner.model, image, target, lambda out, wanted: hand.learner.loss_of(out, wanted) / len(wanted)
    )
    log = EventLog(in_words(algorithm), 2, len(keys), 1, objective.start.numel(), 4.0, tuple(events))
    simulated = replay(log, algorithm, objective)
    start, weights = 0, found[1]["mean"]
    for name, one in hand.models[0].named_parameters():
        part = simulated.weights[start : start + one.numel()].view(one.shape)
        torch.testing.assert_close(weights[name], part, rtol=1e-12, atol=1e-12)
        start += one.numel()


# ---------------------------------------------------------------------------------------------- runs, and going on with them


BRANCHES = [
    "model.name=agreement.nets:Branches", "model.options={}", "agreement={name: slowmo, period: 3, start: 1}", "ema.decay=0.5",
    "optimizer={name: adamw, lr: 0.01}", "checkpoint.every=1step", "checkpoint.keep_last=100", "evaluate.every=3step",
    "log.tensorboard=false",
]  # fmt: skip
"""Of which a branch runs on some replicas only, so that others have no optimizer state for it."""


def ran(mesh, folder, settings, length):
    outcome = train(config_of([*settings, f"schedule.length={length}step", "schedule.name=constant"]), folder, mesh.world)
    return outcome.reason, outcome.step


def gone_on(mesh, whole, parts):
    ran(mesh, whole, BRANCHES, 6)
    mesh.barrier()
    if mesh.is_main:
        shutil.copytree(whole, parts)
        forget_after(parts, 3)
    mesh.barrier()
    return ran(mesh, parts, BRANCHES, 6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two replicas that kept all checkpoints, and one that went on after its third step, which no average ended."""
    folder = tmp_path_factory.mktemp("runs")
    plan = plan_of(config_of(BRANCHES), 2)
    assert on_ranks(2, gone_on, folder / "whole", folder / "parts", plan=plan) == [("complete", 6)] * 2
    return folder


@pytest.mark.long
def test_a_run_of_replicas_goes_on_bit_for_bit(whole):
    assert losses(whole / "parts") == losses(whole / "whole") and len(losses(whole / "whole")) == 6
    assert fingerprint(whole / "parts", ranks=2) == fingerprint(whole / "whole", ranks=2)
    assert own_of(whole / "parts", 6) == own_of(whole / "whole", 6)
    assert own_of(whole / "whole", 6)[0] != own_of(whole / "whole", 6)[1]  # two steps after the last average of all


def own_of(folder, step):
    """By rank, the weights of its replica in a checkpoint, as bytes."""
    found = sound_at(folder / "checkpoints" / name_of(step))
    of_ranks = [read(found, rank=rank, ranks=2)[1]["replica"] for rank in range(2)]
    return [b"".join(one.numpy().tobytes() for one in of["weights"].values()) for of in of_ranks]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_saved_is_the_mean_of_the_replicas_from_which_others_go_on(whole, tmp_path, ranks):
    config = config_of([*BRANCHES, "schedule.name=constant"])
    hand = ByHand(config, 2).train(3)
    found = sound_at(whole / "whole" / "checkpoints" / name_of(3))
    state, _ = read(found, rank=0, ranks=2)
    for name, value in hand.consensus().items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-12, atol=1e-12)
    shutil.copytree(whole / "whole", tmp_path / "run")
    forget_after(tmp_path / "run", 3)
    plan = plan_of(config, ranks)
    assert on_ranks(ranks, ran, tmp_path / "run", BRANCHES, 6, plan=plan) == [("complete", 6)] * ranks
    assert ("replicas begin from the mean" in json.dumps(record(tmp_path / "run", "warning"))) == (ranks > 1)


def test_a_run_tells_when_its_replicas_averaged_and_how_far_apart_they_were(whole):
    told = record(whole / "whole", "average")
    assert [(line["step"], line["replicas"]) for line in told] == [(1, 2), (4, 2)]
    assert all(line["distance"] > 0 and line["bytes"] > 0 for line in told)
