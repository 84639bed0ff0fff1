"""Is the learning rate the curve that torch draws, and the same however the samples are shared out?"""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from widefield.config import ScheduleConfig
from widefield.data.order import Steps
from widefield.quantity import Duration
from widefield.training.schedule import build_schedule

EPOCH = Steps(samples=100, batch=10)


def schedule(steps: Steps = EPOCH, **options):
    known = {"length": Duration(50, "step")}
    return build_schedule(ScheduleConfig(**(known | options)), seen=steps.seen, steps_per_epoch=steps.per_epoch)


def factors(steps: Steps = EPOCH, count: int = 50, **options) -> list[float]:
    """The factor at which each step trains."""
    made = schedule(steps, **options)
    return [made.factor(steps.seen(step)) for step in range(count)]


def torchs(make, count: int = 50) -> list[float]:
    """The factors of one of torch's schedulers over a learning rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def refusal(**options) -> str:
    with pytest.raises(ValueError) as caught:
        schedule(**options)
    return str(caught.value)


near = {"rel": 1e-12, "abs": 1e-12}  # torch's schedulers multiply step by step, which rounds some 50 times


# ---------------------------------------------------------------------------------------------- curves


def test_cosine_is_torchs():
    wanted = torchs(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1))
    assert factors(name="cosine", final=0.1) == pytest.approx(wanted, **near)


def test_polynomial_is_torchs():
    wanted = torchs(lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=2.0))
    assert factors(name="polynomial", power=2.0) == pytest.approx(wanted, **near)


def test_polynomial_ends_where_it_is_told():
    made = schedule(name="polynomial", final=0.25)
    assert made.factor(0) == 1 and made.factor(500) == 0.25 and made.factor(250) == 0.625


def test_step_is_torchs():
    wanted = torchs(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5))
    assert factors(name="step", gamma=0.5, every=Duration(2, "ep")) == pytest.approx(wanted, **near)


def test_onecycle_falls_as_torchs_does():
    """torch's reaches its peak at step pct_start * total - 1 and its end at step total - 1; its cosine rise is not ours."""
    options = {"max_lr": 1.0, "div_factor": 10, "final_div_factor": 1e3, "cycle_momentum": False}
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    wanted = torchs(lambda optimizer: one_cycle(optimizer, total_steps=51, pct_start=11 / 51, **options), count=51)
    found = factors(count=51, name="onecycle", warmup=Duration(10, "step"), final=1e-4)
    assert found[10:] == pytest.approx(wanted[10:], **near) and found[10] == 1.0


def test_constant_is_one():
    assert set(factors(name="constant")) == {1.0}


def test_warm_up_is_torchs_linear_one():
    wanted = torchs(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=20))
    found = factors(name="constant", warmup=Duration(20, "step"), warmup_from=0.2)
    assert found == pytest.approx(wanted, **near) and found[20] == 1.0


@pytest.mark.parametrize("name", ["cosine", "polynomial"])
def test_a_curve_runs_from_the_end_of_the_warm_up_to_the_end_of_training(name):
    made = schedule(name=name, warmup=Duration(10, "step"), final=0.1)
    assert made.factor(100) == 1.0 and made.factor(500) == pytest.approx(0.1) == made.factor(10_000)
    assert made.factor(300) == pytest.approx(0.55)


def test_drops_of_step_are_counted_from_the_start_of_training():
    found = factors(name="step", every=Duration(20, "step"), warmup=Duration(10, "step"))
    assert found[19] == 1.0 and found[20] == pytest.approx(0.1) and found[40] == pytest.approx(0.01)


@given(samples=st.integers(0, 600), name=st.sampled_from(["constant", "cosine", "step", "polynomial", "onecycle"]))
def test_a_factor_is_a_share_of_the_peak(samples, name):
    made = schedule(name=name, warmup=Duration(10, "step"), every=Duration(1, "ep"), final=0.05)
    assert 0 <= made.factor(samples) <= 1


# ---------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("name", ["cosine", "step", "polynomial"])
def test_the_batch_size_does_not_move_the_curve(name):
    """After the same number of samples the factor is the same; the last step of each epoch is short at a batch of 30."""
    options = {"name": name, "length": Duration(5, "ep"), "warmup": Duration(1, "ep"), "every": Duration(2, "ep")}
    small, large = Steps(100, 10), Steps(100, 30)
    at = {small.seen(step): factor for step, factor in enumerate(factors(small, **options))}
    shared = {large.seen(step): factor for step, factor in enumerate(factors(large, count=20, **options))}
    both = set(at) & set(shared)
    assert len(both) == 20 and all(at[samples] == shared[samples] for samples in both)


def test_the_curve_knows_nothing_of_ranks_or_passes():
    """`seen` is all it gets: whoever reads the samples, a step of the same batch consumes as many."""
    made = schedule(name="cosine", warmup=Duration(1, "ep"), length=Duration(3, "ep"))
    assert (made.total, made.warmup) == (300, 100)
    assert schedule(Steps(100, 7), name="cosine", warmup=Duration(16, "step"), length=Duration(3, "ep")).warmup == 107


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"name": "cosin"},
            "there is no schedule 'cosin'; did you mean 'cosine'? It can be: constant, cosine, step, polynomial,",
        ),
        ({"length": Duration(0, "ep")}, "schedule.length is 0ep, so there is nothing to train; write 1step or more"),
        (
            {"warmup": Duration(6, "ep")},
            "schedule.warmup is 6ep (60 steps), longer than schedule.length, 50step (50 steps); shorten it",
        ),
        ({"name": "step"}, "schedule.name=step drops the learning rate every so often; add schedule.every, as 30ep"),
        ({"name": "onecycle"}, "schedule.name=onecycle rises and then falls; add schedule.warmup, as a third of"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options, told):
    assert re.match(re.escape(told), refusal(**options))
