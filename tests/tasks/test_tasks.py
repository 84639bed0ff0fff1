"""Is a task's loss the sum that torch takes the mean of, and do its metrics and words follow?"""

import re

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

from widefield.config import TaskConfig
from widefield.detection.targets import sizes_in
from widefield.naming import load, names_in
from widefield.tasks import build, labels_of, output_of

CASES = [(name, *case) for name in names_in("widefield.tasks") for case in load("widefield.tasks", name).CASES]
NUMBERED = pytest.mark.parametrize(("name", "task", "output", "target", "wanted"), CASES, ids=[case[0] for case in CASES])


def classification(classes: int = 7, **options):
    return build(TaskConfig(name="classification", options=options), num_classes=classes)


def doubled(output):
    """In float64; of a detector the maps of all levels."""
    return output.double() if isinstance(output, torch.Tensor) else [tuple(one.double() for one in level) for level in output]


def samples_of(output, part: slice):
    return output[part] if isinstance(output, torch.Tensor) else [tuple(one[part] for one in level) for level in output]


def random_batch(classes: int = 7, count: int = 12):
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(count, classes, dtype=torch.float64, generator=generator)
    return output, torch.randint(0, classes, (count,), generator=generator)


@NUMBERED
def test_every_task_gives_the_metrics_that_its_cases_state(name, task, output, target, wanted):
    metrics = task.metrics()
    if labels_of(task) == "boxes":
        metrics.update(torch.arange(len(target)), task.found(output, sizes_in(target)), target)
    else:
        metrics.update(task.answers(output), target)
    values = metrics.compute()
    assert {key: float(values[key]) for key in wanted} == wanted and task.headline in values


@NUMBERED
def test_every_tasks_loss_adds_up_over_samples(name, task, output, target, wanted):
    output = doubled(output)
    if getattr(task, "finish", None) is not None:  # of which sums add up, and the loss does not
        sums = [task.sums(samples_of(output, part), target[part]) for part in (slice(0, 1), slice(1, None))]
        loss = task.loss_sum(output, target) / task.count(target)
        torch.testing.assert_close(task.finish(sum(sums)), loss, rtol=1e-12, atol=1e-14)
        return
    each = task.loss_each(output, target)
    total = task.loss_sum(output, target)
    counts = torch.tensor([int(task.count(target[number : number + 1])) for number in range(len(target))])
    torch.testing.assert_close((each * counts).sum(), total, rtol=1e-12, atol=0)
    halves = [task.loss_sum(samples_of(output, part), target[part]) for part in (slice(0, 1), slice(1, None))]
    torch.testing.assert_close(sum(halves), total, rtol=1e-12, atol=0)
    assert task.count(target) == sum(task.count(target[part]) for part in (slice(0, 1), slice(1, None)))


@NUMBERED
def test_every_state_of_every_tasks_metrics_adds_up(name, task, output, target, wanted):
    reductions = [reduce for metric in task.metrics().values() for reduce in metric._reductions.values()]
    wanted = dim_zero_cat if labels_of(task) in ("boxes", "views") else dim_zero_sum
    assert reductions and all(reduce is wanted for reduce in reductions)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_sum_is_the_mean_cross_entropy_times_the_count(smoothing):
    task, (output, target) = classification(label_smoothing=smoothing), random_batch()
    mean = F.cross_entropy(output, target, label_smoothing=smoothing)
    torch.testing.assert_close(task.loss_sum(output, target), mean * task.count(target), rtol=1e-12, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_numbers_and_their_shares_give_the_same_loss(smoothing):
    task, (output, target) = classification(label_smoothing=smoothing), random_batch()
    shares = F.one_hot(target, 7).double()
    torch.testing.assert_close(task.loss_sum(output, shares), task.loss_sum(output, target), rtol=1e-12, atol=0)
    assert task.count(shares) == task.count(target) == 12


def test_top1_top5_and_confusion_are_what_counting_gives():
    task, (output, target) = classification(), random_batch(count=200)
    metrics = task.metrics()
    for part in range(0, 200, 33):
        metrics.update(task.answers(output[part : part + 33]), target[part : part + 33])
    values, ranked = metrics.compute(), output.argsort(1, descending=True)
    assert float(values["top1"]) == pytest.approx(float((ranked[:, 0] == target).double().mean()), abs=1e-7)  # float32
    assert float(values["top5"]) == pytest.approx(float((ranked[:, :5] == target[:, None]).any(1).double().mean()), abs=1e-7)
    counted = torch.zeros(7, 7, dtype=torch.int64).index_put_((target, ranked[:, 0]), torch.tensor(1), accumulate=True)
    assert torch.equal(values["confusion"], counted)


def test_top5_of_five_classes_says_nothing_and_is_left_out():
    assert set(classification(5).metrics()) == {"top1", "confusion"} and "top5" in classification(6).metrics()


def test_answers_are_probabilities():
    output, _ = random_batch()
    answers = classification().answers(output)
    torch.testing.assert_close(answers, output.exp() / output.exp().sum(1, keepdim=True), rtol=1e-12, atol=0)


def test_the_result_is_said_in_percent():
    assert classification().sentence({"top1": 98.6111}) == "98.61 % top-1"


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (torch.zeros(12, 8), "(12, 8)"),
        (torch.zeros(11, 7), "(11, 7)"),
        (torch.zeros(12), "(12,)"),
        ((torch.zeros(12, 7), torch.zeros(12, 7)), "tuple"),
        ({"out": torch.zeros(12, 7)}, "dict"),
    ],
)
def test_an_output_of_another_shape_is_refused(output, got):
    told = f"task 'classification' wants an output of shape (12, 7) and the model gave {got}; take a model"
    with pytest.raises(ValueError, match=re.escape(told)):
        classification().loss_sum(output, random_batch()[1])


def test_a_task_of_pixels_wants_dims_beyond_the_classes():
    output, sizes = torch.zeros(12, 7, 3, 3), {"batch": 12, "classes": 7, "pixels": True}
    assert output_of("segmentation", output, **sizes) is output
    with pytest.raises(ValueError, match=r"wants an output of shape \(12, 7, \.\.\.\) and the model gave \(12, 7\); "):
        output_of("segmentation", output[:, :, 0, 0], **sizes)


@pytest.mark.parametrize("output", [torch.zeros(12, 7, 3), torch.zeros(12, 7, 3, 3)])
def test_an_answer_per_pixel_is_no_classification(output):
    with pytest.raises(ValueError, match=r"shape \(12, 7\) and the model gave \(12, 7, 3.*; take a model that answers so"):
        classification().loss_sum(output, random_batch()[1])


def test_a_task_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"tasks/ has no clasification\.py; did you mean 'classification'\?"):
        build(TaskConfig(name="clasification"), num_classes=3)


@pytest.mark.parametrize("options", [{"smoothing": 0.1}, {"num_classes": 3}])
def test_options_that_a_task_does_not_take_are_refused(options):
    with pytest.raises(ValueError, match=f"task.options {re.escape(str(options))} do not fit 'classification': "):
        classification(**options)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_a_label_smoothing_that_is_no_share_is_refused(smoothing):
    with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}; a number from 0 to below 1 is wanted"):
        classification(label_smoothing=smoothing)
