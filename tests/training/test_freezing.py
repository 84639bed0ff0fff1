"""Frozen parts do not learn, learn when they shall, and under every plan as on one device, in float64, also where resumed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from command import RECIPES
from marks import few
from ranks import on_ranks
from torch import nn

from widefield.comm.mesh import Mesh, World
from widefield.config import ModelConfig, read_config
from widefield.models import build
from widefield.plans import Plan, plan_of
from widefield.sharded_state import gather_full_on_main
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.checkpoint import About, Checkpoints
from widefield.training.freezing import freeze
from widefield.training.passes import Passes
from widefield.training.resume import resume, state_of
from widefield.training.state import shapes_of

PAGE = str(RECIPES / "page.yaml")
SETTINGS = [
    "mesh.space=[]", "mesh.replicate=1", "data.options.size=[24, 20]", "data.options.digit_px=[10, 12]",
    "data.options.pages=[8, 2]", "data.batch_size=4", "data.workers=0", "precision=float64", "model.options.widths=[6, 8, 12]",
    "schedule.length=4ep", "schedule.name=constant", "schedule.warmup=0step", "ema.decay=0.9", "gradient.bucket_mib=1",
    "model.freeze=[down, narrow.0]", "model.unfreeze={1: [down.1, narrow.0], 2: down.2}", "model.frozen_batch_norm=[down.0]",
    "optimizer.weight_decay=0.05", "optimizer.lr=0.01", "optimizer.layer_decay=0.8", "optimizer.clip_norm=0.5",
    "optimizer.groups=[{match: head, lr: 3x, weight_decay: 0.1}, {match: up.1, lr: 0.02}]",
]  # fmt: skip
"""Two steps an epoch: the first without down and narrow.0, then more, and from the third epoch all but down.0."""
STEPS, SAVED = 6, 3
OPTIMIZERS = {"adamw": [], "lamb": ["optimizer.name=lamb"], "sgd": ["optimizer.name=sgd"]}
PLANS = {
    "one": (1, []),
    "accumulation": (1, ["gradient.accumulate=2", "batch_norm=averaged", "model.frozen_batch_norm=true"]),
    "copies": (2, ["mesh.replicate=2"]),
    "zero1": (2, ["mesh.shard=2", "sharding.zero=1"]),
    "zero2": (2, ["mesh.shard=2", "sharding.zero=2"]),
    "zero3": (2, ["mesh.shard=2"]),
    "channel": (2, ["mesh.channel=2"]),
    "stage": (2, ["mesh.stage=2"]),
    "tiles": (2, ["mesh.space=[2,1]"]),
    "stream": (1, ["stream.tiles=[2,1]"]),
    "copies x tiles": (4, ["mesh.replicate=2", "mesh.space=[2,1]"]),
}


def learnt(mesh: Mesh, settings: list[str], source: Path | None, target: Path | None) -> tuple[list[float], dict, list[str]]:
    """Losses of the steps up to STEPS, and at the end on rank 0 all weights, averages and states, and what never had a state.

    source: a checkpoint to go on from.  target: where to save one after SAVED steps.
    """
    parts = assemble(read_config(PAGE, settings), mesh)
    learner, reasons = learner_of(parts)
    kept = {"keep_last": 9, "keep_best": 0, "background": False, "warn": pytest.fail}
    if source is not None:
        checkpoints = Checkpoints(source, mesh, **kept)
        resume(learner, checkpoints, checkpoints.newest_sound())
    count = parts.config.gradient.accumulate
    passes = Passes(training_batches(parts, first=learner.step, last=STEPS), count)
    losses = []
    while learner.step < STEPS:
        losses.append(learner.learn(passes.next(), stop=False)[0])
        if target is not None and learner.step == SAVED:
            about = About(
                step=learner.step, epoch=1, samples=learner.steps.seen(learner.step), metric=None, higher_is_better=True,
                ranks=mesh.size, plan="", model=shapes_of(learner.model), versions={},
            )  # fmt: skip
            Checkpoints(target, mesh, **kept).save(state_of(learner), about, wait=True)
    passes.close()
    state = {"model": dict(learner.model.state_dict()), "ema": dict(learner.ema.module.state_dict())}
    return losses, gather_full_on_main(learner.model, mesh, state), reasons


def under(name: str, optimizer: str, source: Path | None = None, target: Path | None = None, *more: str):
    ranks, axes = PLANS[name]
    settings = [*SETTINGS, *OPTIMIZERS[optimizer], *axes, *more]
    return on_ranks(ranks, learnt, settings, source, target, plan=plan_of(read_config(PAGE, settings), ranks))[0]


@cache
def on_one_device(optimizer: str, *more: str):
    return under("one", optimizer, None, None, *more)


def check_equal(found, wanted) -> None:
    """Losses and all tensors, after at most six steps in float64; LAMB divides small numbers by small ones."""
    assert found[0] == pytest.approx(wanted[0][-len(found[0]) :], rel=1e-9)
    for kind in ("model", "ema"):
        assert sorted(found[1][kind]) == sorted(wanted[1][kind]) and len(wanted[1][kind]) > 40
        for name, value in wanted[1][kind].items():
            torch.testing.assert_close(
                found[1][kind][name], value, rtol=1e-8, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
            )


CASES = [(name, optimizer) for name in PLANS for optimizer in OPTIMIZERS if name not in ("one", "accumulation")]
FIRST = [(name, "adamw") for name in ("zero1", "stage", "tiles", "stream")] + [("zero2", "lamb")]
THEN = [("copies", "sgd"), ("zero3", "lamb"), ("channel", "adamw"), ("copies x tiles", "adamw")]


@pytest.mark.parametrize(("name", "optimizer"), few(CASES, *FIRST, then=THEN, is_sweep=True))
def test_unfreezing_under_every_plan_is_that_of_one_device(name, optimizer):
    check_equal(under(name, optimizer), on_one_device(optimizer))


def test_accumulation_gives_the_same_where_batch_norms_are_frozen():
    """With statistics that do not depend on the batch, passes of half a batch add up to the whole one's."""
    check_equal(under("accumulation", "adamw"), on_one_device("adamw", "model.frozen_batch_norm=true"))


@pytest.mark.long
@pytest.mark.parametrize(("writer", "reader"), few([("copies", "zero3"), ("zero2", "one")], ("zero2", "one")))
def test_a_run_that_goes_on_after_an_unfreezing_is_the_one_that_never_stopped(tmp_path, writer, reader):
    under(writer, "lamb", None, tmp_path)
    check_equal(under(reader, "lamb", tmp_path), on_one_device("lamb"))


# ---------------------------------------------------------------------------------------------- what learns when


def test_what_is_frozen_stays_bit_for_bit_and_learns_from_its_epoch_on():
    parts = assemble(read_config(PAGE, SETTINGS), Mesh(Plan(), World(), torch.device("cpu")))
    learner, reasons = learner_of(parts)
    assert [line for line in reasons if line.startswith("model.")] == [
        "model.freeze: 6 parameters never learn, in down",
        "model.unfreeze: 8 parameters learn after 1 epoch, in down, narrow",
        "model.unfreeze: 6 parameters learn after 2 epochs, in down",
        "model.frozen_batch_norm: 2 layers keep their running statistics and do not learn",
    ]
    passes = Passes(training_batches(parts, first=0, last=STEPS), 1)
    moved: list[set[str]] = []
    for _ in range(STEPS):
        before = {name: value.clone() for name, value in learner.model.state_dict().items()}
        learner.learn(passes.next(), stop=False)
        moved.append({name for name, value in learner.model.state_dict().items() if not value.equal(before[name])})
    passes.close()
    of = lambda step, *parts: {name for name in moved[step] if name.startswith(parts)}  # noqa: E731
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    learning = {step: {name for name in of(step, "down", "narrow.0") if not name.endswith(statistics)} for step in range(STEPS)}
    assert of(0, "head", "up", "narrow.1") and not learning[0] and not learning[1]
    assert {name.rpartition(".")[0][:6] for name in learning[2]} == {"down.1", "narrow"} and len(learning[3]) == 8
    assert len(learning[4]) == len(learning[5]) == 14 and not any(of(step, "down.0") for step in range(STEPS))
    assert of(0, "down.1.1.running_mean")  # its BatchNorm is not frozen, only its weights are


def test_the_learning_rate_of_a_group_follows_the_schedule():
    parts = assemble(read_config(PAGE, [*SETTINGS, "schedule.name=cosine"]), Mesh(Plan(), World(), torch.device("cpu")))
    learner, _ = learner_of(parts)
    learner.step = 3
    passes = Passes(training_batches(parts, first=3, last=4), 1)
    learner.learn(passes.next(), stop=False)
    passes.close()
    factor = learner.schedule.factor(12)
    named = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    rates = {named[id(p)]: group["lr"] for group in learner.optimizer.param_groups for p in group["params"]}
    assert rates["head.weight"] == pytest.approx(0.03 * factor) and rates["up.1.0.weight"] == pytest.approx(0.02 * factor)
    assert rates["down.1.0.weight"] < rates["down.2.0.weight"] < rates["up.0.0.weight"] < 0.01 * factor


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"freeze": ["dwn"]}, "model.freeze names 'dwn', which fits nothing of the model; did you mean 'down'? Its parts are:"),
        ({"freeze": ["*"]}, "model.freeze=['*'] leaves nothing that learns in the first epoch"),
        ({"freeze": ["*"], "unfreeze": {1: "*"}}, "leaves nothing that learns in the first epoch"),
        ({"unfreeze": {1: "up"}}, "model.unfreeze={1: 'up'} and nothing is frozen; name what is in model.freeze"),
        ({"freeze": ["up"], "unfreeze": {1: "down"}}, "of what model.freeze names, names 'down', which fits nothing"),
        ({"frozen_batch_norm": ["head"]}, "model.frozen_batch_norm, of BatchNorms, names 'head', which fits nothing"),
        ({"options": {"norm": "group"}, "frozen_batch_norm": True}, "and the model has no BatchNorm; leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_frozen_is_refused(keys, told):
    config = ModelConfig(name="unet", **keys)
    with pytest.raises(ValueError, match=re.escape(told)):
        freeze(build(config, in_channels=1, num_classes=3), config, Plan())


def test_a_batch_norm_without_running_statistics_cannot_be_frozen():
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="names '1', which has no running statistics; leave it out"):
        freeze(net, ModelConfig(name="x", frozen_batch_norm=True), Plan())
