"""Do the loss and the metrics of pixels come from all pixels together, however images, tiles and ranks share them?"""

import math
import re

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_jaccard_index

from widefield.config import TaskConfig
from widefield.tasks import build, is_per_pixel

CLASSES, IGNORED = 4, 255
TILES = [(slice(0, 5), slice(0, 3)), (slice(0, 5), slice(3, 9)), (slice(5, 7), slice(0, 3)), (slice(5, 7), slice(3, 9))]


def segmentation(classes: int = CLASSES, **options):
    return build(TaskConfig(name="segmentation", options=options), num_classes=classes)


def random_batch(*pixels: int, ignored: float = 0.2):
    """Three images, of 7 x 9 pixels if not said otherwise, a fifth of which do not count."""
    pixels, generator = pixels or (7, 9), torch.Generator().manual_seed(0)
    output = torch.randn(3, CLASSES, *pixels, dtype=torch.float64, generator=generator)
    target = torch.randint(0, CLASSES, (3, *pixels), generator=generator)
    target[torch.rand(target.shape, generator=generator) < ignored] = IGNORED
    return output, target


def measured(task, parts) -> dict[str, float]:
    metrics = task.metrics()
    for output, target in parts:
        metrics.update(task.answers(output), target)
    return {name: value.tolist() for name, value in metrics.compute().items()}


# ---------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("pixels", [(7, 9), (3, 4, 5)])
def test_the_loss_sum_is_the_mean_over_counted_pixels_times_their_number(pixels):
    task, (output, target) = segmentation(), random_batch(*pixels)
    mean = F.cross_entropy(output, target, ignore_index=IGNORED)
    torch.testing.assert_close(task.loss_sum(output, target), mean * task.count(target), rtol=1e-12, atol=0)
    assert task.count(target) == sum(label != IGNORED for label in target.flatten().tolist())


def test_the_loss_and_the_count_of_tiles_add_up_to_those_of_the_whole():
    task, (output, target) = segmentation(), random_batch()
    tiles = [(output[..., rows, columns], target[..., rows, columns]) for rows, columns in TILES]
    total = sum(task.loss_sum(*tile) for tile in tiles)
    torch.testing.assert_close(total, task.loss_sum(output, target), rtol=1e-12, atol=0)
    assert sum(task.count(tile) for _, tile in tiles) == task.count(target)


def test_the_loss_of_an_image_is_the_mean_over_its_counted_pixels():
    task, (output, target) = segmentation(), random_batch()
    each = task.loss_each(output, target)
    for number in range(3):
        alone = F.cross_entropy(output[number : number + 1], target[number : number + 1], ignore_index=IGNORED)
        torch.testing.assert_close(each[number], alone, rtol=1e-12, atol=0)


def test_an_image_without_a_pixel_that_counts_has_no_loss():
    task, (output, target) = segmentation(), random_batch(ignored=1.0)
    assert task.count(target) == task.loss_sum(output, target) == 0 and task.loss_each(output, target).tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------------------------- metrics


def test_iou_dice_and_accuracy_are_what_counting_pixels_gives():
    task, (output, target) = segmentation(), random_batch()
    pairs = [(t, p) for t, p in zip(target.flatten().tolist(), output.argmax(1).flatten().tolist(), strict=True) if t < CLASSES]
    counts = [[pairs.count((truth, answer)) for answer in range(CLASSES)] for truth in range(CLASSES)]
    right = [counts[k][k] for k in range(CLASSES)]
    truth, answered = [sum(row) for row in counts], [sum(column) for column in zip(*counts, strict=True)]
    found = measured(task, [(output, target)])
    assert found["confusion"] == counts
    assert found["iou"] == pytest.approx(sum(right[k] / (truth[k] + answered[k] - right[k]) for k in range(4)) / 4, rel=1e-12)
    assert found["dice"] == pytest.approx(sum(2 * right[k] / (truth[k] + answered[k]) for k in range(4)) / 4, rel=1e-12)
    assert found["accuracy"] == pytest.approx(sum(right) / len(pairs), rel=1e-12)


def test_iou_is_that_of_torchmetrics():
    task, (output, target) = segmentation(), random_batch()
    theirs = multiclass_jaccard_index(output.argmax(1), target, CLASSES, ignore_index=IGNORED)
    assert measured(task, [(output, target)])["iou"] == pytest.approx(float(theirs), rel=1e-6)  # float32


def test_metrics_of_tiles_and_single_images_are_those_of_the_whole():
    """A mean over images, or over tiles, of their IoU would be another number."""
    task, (output, target) = segmentation(), random_batch()
    tiles = [
        (output[n : n + 1, :, rows, columns], target[n : n + 1, rows, columns]) for n in range(3) for rows, columns in TILES
    ]
    whole = measured(task, [(output, target)])
    assert measured(task, tiles) == whole
    assert sum(measured(task, [tile])["iou"] for tile in tiles) / len(tiles) != pytest.approx(whole["iou"], abs=1e-3)


@pytest.mark.parametrize(("truth", "answers", "iou"), [
    ([0, 0, 1, 1], [0, 0, 1, 1], 1.0),  # classes 2 and 3 are nowhere: they neither raise nor lower the mean
    ([0, 0, 1, 1], [0, 0, 1, 3], (1 + 1 / 2 + 0) / 3),  # 3 is in the answers alone: it counts, with 0
    ([0, 0, 1, 2], [0, 0, 1, 1], (1 + 1 / 2 + 0) / 3),  # 2 is in the truth alone: the same
])  # fmt: skip
def test_a_class_in_neither_truth_nor_answers_does_not_count(truth, answers, iou):
    output = F.one_hot(torch.tensor(answers), CLASSES).T.double()[None]
    assert measured(segmentation(), [(output, torch.tensor([truth]))])["iou"] == pytest.approx(iou, rel=1e-12)


def test_metrics_of_no_pixel_are_no_number():
    found = measured(segmentation(), [random_batch(ignored=1.0)])
    assert all(math.isnan(found[name]) for name in ("iou", "dice", "accuracy"))


def test_the_headline_comes_first_and_is_said_in_percent():
    assert next(iter(measured(segmentation(), [random_batch()]))) == segmentation().headline == "iou"
    assert segmentation().sentence({"iou": 84.1437}) == "84.14 % mean IoU"


def test_a_task_says_whether_it_learns_pixels():
    assert is_per_pixel(segmentation()) and not is_per_pixel(build(TaskConfig(), num_classes=3))


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", ["loss_sum", "loss_each"])
def test_an_output_of_another_size_is_refused(method):
    output, target = random_batch()
    with pytest.raises(
        ValueError, match="the labels are 7 x 9 pixels and the model answers for 7 x 8; take a model that keeps"
    ):
        getattr(segmentation(), method)(output[..., :8], target)


def test_an_output_without_pixels_is_refused():
    output, target = random_batch()
    with pytest.raises(ValueError, match=re.escape("wants an output of shape (3, 4, ...) and the model gave (3, 4); ")):
        segmentation().loss_sum(output[:, :, 0, 0], target)


@pytest.mark.parametrize("label", [0, 3])
def test_a_class_that_would_not_count_is_refused(label):
    told = f"ignore_index is {label}, which is one of the 4 classes; take a number outside 0..3"
    with pytest.raises(ValueError, match=re.escape(told)):
        segmentation(ignore_index=label)


def test_an_ignored_label_that_is_no_whole_number_is_refused():
    with pytest.raises(
        ValueError, match=re.escape("ignore_index is 255.5, which is no whole number; take a number outside 0..3")
    ):
        segmentation(ignore_index=255.5)
