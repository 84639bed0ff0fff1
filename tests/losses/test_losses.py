"""Is every loss what its cases state, a sum and a count; and is a loss of one's own refused unless it is unreduced?"""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from widefield.config import TaskConfig
from widefield.losses import Targets, _own, build
from widefield.naming import load, names_in
from widefield.tasks import build as build_task
from widefield.tasks import with_loss
from widefield.training.given import overrides_for

CASES = [(name, *case) for name in names_in("widefield.losses") for case in load("widefield.losses", name).CASES]
PIXELS, CLASS = Targets("pixels", 3, 255), Targets("class", 3)


@pytest.mark.parametrize(("name", "loss", "output", "target", "mean"), CASES, ids=[case[0] for case in CASES])
def test_every_loss_is_what_its_cases_state(name, loss, output, target, mean):
    output = output.double()
    assert float(loss.loss_sum(output, target) / loss.count(target)) == pytest.approx(mean, abs=1e-5)  # Dice adds 1e-5
    if not hasattr(loss, "finish"):
        parts = [slice(0, 1), slice(1, None)]
        sums = [loss.loss_sum(output[part], target[part]) for part in parts if len(target[part])]
        torch.testing.assert_close(sum(sums), loss.loss_sum(output, target), rtol=1e-12, atol=1e-14)
    else:
        sums = sum(loss.sums(output[n : n + 1], target[n : n + 1]) for n in range(len(target)))
        torch.testing.assert_close(loss.finish(sums), loss.loss_sum(output, target) / len(target), rtol=1e-12, atol=1e-14)
    assert loss.loss_each(output, target).shape == (len(target),)


@pytest.mark.parametrize("name", ["cross_entropy", "focal", "dice", "tversky", "dice_cross_entropy"])
@pytest.mark.parametrize("options", [{}, {"batch": True}], ids=["of images", "of the batch"])
def test_a_loss_of_pixels_that_all_do_not_count_is_0(name, options):
    loss = build(name, PIXELS, options if name in ("dice", "tversky", "dice_cross_entropy") else {})
    output = torch.zeros(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    total = loss.loss_sum(output, torch.full((2, 4, 4), 255))
    total.backward()
    assert total.item() == pytest.approx(0, abs=1e-12) and not output.grad.any()


@pytest.mark.parametrize(
    ("name", "targets", "options", "told"),
    [
        ("dice", CLASS, {}, r"task.loss=dice is for targets of the kinds pixels, layers and the task learns 'class'; take"),
        ("dice", Targets("pixels", 2, 255, torch.ones(2)), {}, "task.loss=dice takes no class weights: each class counts once"),
        ("dice", Targets("layers", 1), {"background": False}, "background: false leaves out class 0, and there is no other"),
        ("dice", PIXELS, {"smooth": 0}, "smooth is 0; a number above 0 is wanted"),
        ("tversky", PIXELS, {"alpha": -1}, "alpha is -1 and beta is 0.7; numbers of 0 or more are wanted"),
        ("focal", CLASS, {"gamma": -1}, "gamma is -1; a number of 0 or more is wanted"),
        ("huber", Targets("values", 1), {"delta": 0}, "delta is 0; a number above 0 is wanted"),
        ("mse", CLASS, {}, "task.loss=mse is for targets of the kinds values, image and the task learns 'class'"),
        ("l1", Targets("values", 1, weights=torch.ones(1)), {}, "takes no class weights: numbers have no classes"),
        ("cross_entropy", CLASS, {"label_smoothing": 1}, "label_smoothing is 1; a number from 0 to below 1"),
        ("dice_cross_entropy", Targets("layers", 2), {"label_smoothing": 0.1}, "several classes per pixel have none"),
        ("dice_cross_entropy", PIXELS, {"dice": 0, "cross_entropy": 0}, "the weights are 0 and 0; numbers of 0 or more"),
        ("focall", CLASS, {}, r"losses/ has no focall.py; did you mean 'focal'\?"),
        ("focal", CLASS, {"gama": 1}, "task.loss_options {'gama': 1} do not fit 'focal'"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(name, targets, options, told):
    with pytest.raises(ValueError, match=told):
        build(name, targets, options)


def test_weighted_cross_entropy_divides_by_the_weights_as_torch_does():
    weights, generator = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), torch.Generator().manual_seed(0)
    output = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator)
    target = torch.randint(0, 3, (2, 4, 5), generator=generator)
    target[0, 0] = 255
    loss = build("cross_entropy", Targets("pixels", 3, 255, weights), {"label_smoothing": 0.1})
    theirs = F.cross_entropy(output, target, weight=weights, ignore_index=255, label_smoothing=0.1)
    torch.testing.assert_close(loss.loss_sum(output, target) / loss.count(target), theirs, rtol=1e-12, atol=0)
    shares = F.one_hot(torch.tensor([0, 2]), 3).double()  # mixed samples: their number, as torch too
    of_class = build("cross_entropy", Targets("class", 3, weights=weights), {})
    mine = of_class.loss_sum(output[:, :, 0, 0], shares) / of_class.count(shares)
    torch.testing.assert_close(mine, F.cross_entropy(output[:, :, 0, 0], shares, weight=weights), rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------- one's own


def hinge(output, target, margin=1.0):
    return F.multi_margin_loss(output, target, margin=margin, reduction="none")


def mean_hinge(output, target):
    return F.multi_margin_loss(output, target)


def centred(output, target):
    return hinge(output - output.mean(0), target)


def of_float(output, target):
    return 3.0


def broken(output, target):
    raise RuntimeError("no such kernel")


class MeanOfOwn(nn.Module):
    reduction = "mean"

    def forward(self, output, target):
        return mean_hinge(output, target)


def test_a_function_and_a_module_of_torch_give_their_own_mean():
    output, target = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    for given in (hinge, nn.MultiMarginLoss(), nn.MultiMarginLoss(reduction="sum"), nn.CrossEntropyLoss()):
        loss = _own.checked(given, CLASS, name="mine")
        theirs = F.cross_entropy(output, target) if isinstance(given, nn.CrossEntropyLoss) else mean_hinge(output, target)
        torch.testing.assert_close(loss.loss_sum(output, target) / loss.count(target), theirs, rtol=1e-12, atol=0)
    named = _own.named("torch.nn:MultiMarginLoss", CLASS, {"margin": 0.5})
    torch.testing.assert_close(named.loss_each(output, target), hinge(output, target, 0.5), rtol=1e-12, atol=0)


def test_a_module_that_a_program_passed_is_not_changed():
    given = nn.MultiMarginLoss()
    _own.checked(given, CLASS, name="mine")
    assert given.reduction == "mean"


def test_pixels_that_do_not_count_have_no_loss_of_ones_own():
    output, target = torch.randn(2, 3, 4, 4).double(), torch.randint(0, 3, (2, 4, 4))
    target[0, :2] = 255
    loss = _own.checked(nn.CrossEntropyLoss(), PIXELS, name="mine")
    theirs = F.cross_entropy(output, target, ignore_index=255)
    torch.testing.assert_close(loss.loss_sum(output, target) / loss.count(target), theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            mean_hinge,
            "gives a tensor of shape () for outputs of (6, 3) and targets of (6,); a mean over a batch is no sum",
        ),
        (MeanOfOwn(), "gives a tensor of shape () for outputs of (6, 3) and targets of (6,); its attribute reduction did not"),
        (
            centred,
            "gives a sample another loss in another batch, so it would change with the ranks; let it",
        ),
        (lambda output, target: output, "gives a tensor of shape (6, 3) for outputs of (6, 3) and targets of (6,); let it"),
        (of_float, "gives a float and no tensor; let it return one loss per sample"),
        (broken, "fails with outputs of (6, 3) and targets of (6,): RuntimeError: no such kernel"),
        (3, "gives a int; a function of (output, target) is wanted"),
        (nn.MultiMarginLoss, "gives the class MultiMarginLoss; a function of (output, target) is wanted"),
    ],
)
def test_a_loss_that_is_not_of_each_sample_is_refused(given, told):
    with pytest.raises(ValueError, match=re.escape(f"mine {told}")):
        _own.checked(given, CLASS, name="mine")


def test_class_weights_are_not_for_a_loss_of_ones_own():
    with pytest.raises(ValueError, match=r"is a loss of your own, and task.class_weights are for ours; give it the weights"):
        _own.checked(hinge, Targets("class", 3, weights=torch.ones(3)), name="mine")


# ---------------------------------------------------------------------------------------------- in a recipe


class Foreign:
    labels, num_classes = "class", 3


def test_a_recipe_sets_the_loss_of_a_task():
    task = build_task(TaskConfig(name="segmentation", loss="dice", loss_options={"batch": True}), num_classes=2)
    assert task.finish is not None and task.sums is not None and task.num_classes == 2
    assert build_task(TaskConfig(name="segmentation", loss="dice"), num_classes=2).counts_images
    assert build_task(TaskConfig(), num_classes=2).finish is None


def test_a_task_with_a_loss_of_its_own_takes_no_other():
    with pytest.raises(ValueError, match=r"task.loss is set and task.name=mine has a loss of its own; leave it out"):
        with_loss(Foreign(), TaskConfig(name="mine", loss="focal"))


def test_smoothing_of_the_task_goes_with_cross_entropy_alone():
    smoothed = {"options": {"label_smoothing": 0.1}}
    assert (
        with_loss(build_task(TaskConfig(**smoothed), num_classes=3), TaskConfig(), weights=torch.ones(3)).loss.smoothing == 0.1
    )
    with pytest.raises(
        ValueError, match=r"label_smoothing=0.1 and task.loss=focal has none of that name there; give the loss's"
    ):
        build_task(TaskConfig(loss="focal", **smoothed), num_classes=3)


def test_a_loss_that_a_program_passes_is_in_the_recipe_by_its_name_alone():
    assert overrides_for(["seed=3"], loss=nn.MultiMarginLoss()) == [
        'task.loss="<torch.nn.modules.loss.MultiMarginLoss>"', "task.loss_options={}", "seed=3"]  # fmt: skip
    assert overrides_for([], loss=mean_hinge)[0].endswith('.mean_hinge>"')
    with pytest.raises(
        ValueError, match=r"task.loss=focal and loss=<torch.nn.*> say two things of task; leave one of them out"
    ):
        overrides_for(["task.loss=focal"], loss=nn.MultiMarginLoss())
    with pytest.raises(ValueError, match=r"task.loss is '<mine.Loss>', an object that a Python program passed.*pass it again"):
        build_task(TaskConfig(loss="<mine.Loss>"), num_classes=3)
