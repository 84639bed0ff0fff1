"""Replicas in a run of real ranks: their numbers, beside plain models averaged by hand in one process."""

from __future__ import annotations

import pytest
import torch
from agreement.replicas_by_hand import ByHand
from command import DIGITS
from ranks import on_ranks

from widefield import sharded_state
from widefield.config import read_config
from widefield.plans import plan_of
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches

SMALL = [
    "precision=float64", "data.augment=[]", "data.batch_size=13", "model.options={widths: [4, 6], blocks: 1}", "batch_norm=averaged",
    "optimizer.lr=0.05", "schedule.warmup=0step",
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
    told = [(one.step, one.replicas, one.distance) for one in learner.replicas.told]
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
