"""Is the learning rate that is found the same under every plan, and is all as it was once it is found?"""

from __future__ import annotations

import math

import pytest
import torch
from command import DIGITS
from marks import few
from ranks import on_ranks

from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.config import read_config
from widefield.plans import Plan, plan_of
from widefield.training import learning_rate_finder
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.learning_rate_finder import Curve, find_learning_rate
from widefield.training.passes import Passes
from widefield.training.resume import state_of

SETTINGS = [
    "precision=float64", "model.options={widths: [4, 6], blocks: 1, dropout: 0.2}", "schedule.length=2ep", "data.workers=0",
    "data.batch_size=128", "optimizer.name=lamb", "ema.decay=0.9", "optimizer.clip_norm=1",
]  # fmt: skip
PLAIN = [*SETTINGS, "model.options.dropout=0.0", "data.augment=[]", "optimizer.name=adamw"]
PLANS = {
    "copies": ["mesh.replicate=2"],
    "zero1": ["mesh.shard=2", "sharding.zero=1"],
    "zero3": ["mesh.shard=2"],
    "stage": ["mesh.stage=2"],
}


def laid_out(mesh: Mesh, *settings: str):
    torch.manual_seed(0)
    parts = assemble(read_config(str(DIGITS), settings), mesh)
    return parts, learner_of(parts)[0]


def next_losses(parts, learner, steps: int = 3) -> list[float]:
    passes = Passes(training_batches(parts, first=0, last=steps), 1)
    losses = [learner.learn(passes.next(), stop=False)[0] for _ in range(steps)]
    passes.close()
    return losses


def one_rank() -> Mesh:
    return Mesh(Plan(), World(), torch.device("cpu"))


def found(mesh: Mesh, settings: list[str]) -> tuple[list[float], list[float], list[str]]:
    """The rate that is found with three losses after it, the same three where that rate is given, and the reasons."""
    parts, learner = laid_out(mesh, *settings, "optimizer.lr=find")
    reasons = find_learning_rate(parts, learner, is_asked_to_stop=lambda: False)
    after = [learner.lr, *next_losses(parts, learner)]
    assert state_of(learner)["progress"]["lr"] == learner.lr
    parts, learner = laid_out(mesh, *settings, f"optimizer.lr={after[0]!r}")
    return after, [learner.lr, *next_losses(parts, learner)], reasons


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(learning_rate_finder, "STEPS", 24)


def test_training_goes_on_from_the_rate_that_was_found_as_if_it_had_been_given():
    """Bit for bit: weights, running statistics, LAMB's state and counters, the average, dropout and augmentation."""
    after, given, reasons = found(one_rank(), SETTINGS)
    assert after == given
    assert reasons[0].startswith(
        f"optimizer.lr={after[0]:.3g}: a tenth of {10 * after[0]:.3g}, at which the loss was least in "
    )
    assert reasons[1].startswith("  loss by learning rate: 1.0e-06: 2.")


def short_found(mesh: Mesh, settings: list[str]) -> tuple[list[float], list[float], list[str]]:
    learning_rate_finder.STEPS = 24
    return found(mesh, settings)


@pytest.mark.long
@pytest.mark.parametrize("name", few(PLANS, "stage"))
def test_every_plan_finds_the_rate_of_one_device_and_trains_on_as_it_does(name):
    settings = [*PLAIN, *PLANS[name]]
    wanted, _, _ = found(one_rank(), PLAIN)
    for after, given, _ in on_ranks(2, short_found, settings, plan=plan_of(read_config(str(DIGITS), settings), 2)):
        assert after == pytest.approx(wanted, rel=1e-9) and after == given


def test_the_choice_is_a_tenth_of_the_rate_of_the_least_loss():
    curve = Curve([1e-3, 1e-2, 1e-1, 1.0], [2.0, 1.0, 0.5, 3.0])
    assert curve.chosen == pytest.approx(1e-2)


# ---------------------------------------------------------------------------------------------- refusals


def test_a_loss_that_is_never_finite_is_refused_and_weights_stay():
    parts, learner = laid_out(one_rank(), *SETTINGS, "optimizer.lr=find")
    with torch.no_grad():
        learner.model.head.weight.fill_(math.nan)
    with pytest.raises(AgreedError, match="the loss is not finite at the lowest learning rates, so there is nothing to find"):
        find_learning_rate(parts, learner, is_asked_to_stop=lambda: False)
    assert learner.step == 0 and not learner.optimizer.state


def test_a_search_that_is_asked_to_stop_says_that_nothing_was_trained():
    parts, learner = laid_out(one_rank(), *SETTINGS, "optimizer.lr=find")
    with pytest.raises(AgreedError, match="stopped in the search for a learning rate, so nothing was trained"):
        find_learning_rate(parts, learner, is_asked_to_stop=lambda: True)
    assert learner.step == 0


def test_a_group_with_a_rate_of_its_own_is_refused_where_the_rate_is_to_be_found():
    settings = [*SETTINGS, "optimizer.lr=find", "optimizer.groups=[{match: head, lr: 0.1}]"]
    with pytest.raises(ValueError, match="has lr: 0.1 and optimizer.lr is to be found; give a factor, as 0.1x"):
        laid_out(one_rank(), *settings)
