"""Are the scores of classes and cases those of scikit-learn and of counting, and the same from parts as from the whole?"""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs

from widefield.config import TaskConfig
from widefield.tasks import build
from widefield.tasks._cases import CaseOverlap, CaseSizes, SurfaceDistance, surface
from widefield.tasks._metrics import columns_of, metrics_of, numbers_of

GENERATOR = torch.Generator().manual_seed(1)
TRUTH = torch.randint(0, 4, (90,), generator=GENERATOR)
CHANCES = torch.rand(90, 5, dtype=torch.float64, generator=GENERATOR).softmax(1)  # class 4 is never true
ANSWERS = CHANCES.argmax(1)
SEVERAL = torch.randint(0, 2, (90, 3), generator=GENERATOR)


def scored(labels: str, entry, parts, classes: int):
    """The numbers and columns of a metric that a recipe lists, updated with these parts."""
    tasks = {"class": "classification", "classes": "multilabel", "pixels": "segmentation", "values": "regression"}
    task = build(TaskConfig(name=tasks[labels]), num_classes=classes)
    (metric,) = metrics_of(TaskConfig(name=tasks[labels], metrics=[entry]), task, num_classes=classes, cut=True)
    states = metric.made()
    for answers, target in parts:
        states.update(answers, target)
    value = states.compute()
    return numbers_of(metric, value, classes=classes), columns_of(metric, value, classes=classes), metric


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("precision", theirs.precision_score(TRUTH, ANSWERS, average="macro", zero_division=0)),
        ("recall", theirs.recall_score(TRUTH, ANSWERS, average="macro", zero_division=0)),
        ("f1", theirs.f1_score(TRUTH, ANSWERS, average="macro", zero_division=0)),
        ("kappa", theirs.cohen_kappa_score(TRUTH, ANSWERS)),
        ("balanced_accuracy", np.mean([float((ANSWERS[TRUTH == k] == k).double().mean()) for k in range(4)])),
        ("auc", np.mean([theirs.roc_auc_score(TRUTH == k, CHANCES[:, k]) for k in range(4)])),
        ("average_precision", np.mean([theirs.average_precision_score(TRUTH == k, CHANCES[:, k]) for k in range(4)])),
        ("top2", theirs.top_k_accuracy_score(TRUTH, CHANCES, k=2, labels=range(5))),
    ],
)
def test_a_score_of_one_class_is_scikit_learns(name, wanted):
    parts = [(CHANCES[:20], TRUTH[:20]), (CHANCES[20:], TRUTH[20:])]
    numbers, columns, metric = scored("class", name, parts, classes=5)
    assert numbers == {name: pytest.approx(wanted, rel=1e-6)}
    assert metric.gathers == (name in ("auc", "average_precision")), "the report says which"
    assert metric.factor == (100 if name == "top2" else 1)
    assert all(len(column) == 5 for column in columns.values())


def test_a_class_that_is_nowhere_has_no_score():
    _, columns, _ = scored("class", "f1", [(CHANCES.masked_fill(torch.arange(5) == 4, 0), TRUTH)], classes=5)
    assert math.isnan(columns["f1"][4]) and not any(map(math.isnan, columns["f1"][:4]))


@pytest.mark.parametrize("name", ["f1", "auc"])
def test_samples_of_one_class_alone_crash_nothing(name):
    numbers, _, _ = scored("class", name, [(CHANCES, torch.zeros(90, dtype=torch.int64))], classes=5)
    assert list(numbers) == [name]


def test_scores_of_several_classes_are_scikit_learns():
    chances = CHANCES[:, :3] * 2
    answers = chances > 0.5
    for name, wanted in (
        ("recall", theirs.recall_score(SEVERAL, answers, average="macro")),
        ("precision", theirs.precision_score(SEVERAL, answers, average="macro")),
        ("auc", theirs.roc_auc_score(SEVERAL, chances, average="macro")),
    ):
        assert scored("classes", name, [(chances, SEVERAL)], classes=3)[0] == {name: pytest.approx(wanted, rel=1e-6)}
    metrics = build(TaskConfig(name="multilabel"), num_classes=3).metrics()
    metrics.update(chances, SEVERAL)
    found = metrics.compute()
    assert float(found["f1"]) == pytest.approx(theirs.f1_score(SEVERAL, answers, average="macro"), rel=1e-12)
    assert float(found["f1_micro"]) == pytest.approx(theirs.f1_score(SEVERAL, answers, average="micro"), rel=1e-12)
    assert float(found["exact"]) == pytest.approx(theirs.accuracy_score(SEVERAL, answers), rel=1e-12)


def test_errors_of_numbers_are_scikit_learns_whatever_the_offset():
    truth = torch.randn(50, 2, generator=GENERATOR).double() + 1e4
    answers = truth + 0.3 * torch.randn(50, 2, generator=GENERATOR)
    metrics = build(TaskConfig(name="regression"), num_classes=2).metrics()
    for part in (slice(0, 7), slice(7, 50)):
        metrics.update(answers[part], truth[part])
    found = metrics.compute()
    assert float(found["rmse"]) == pytest.approx(theirs.mean_squared_error(truth, answers) ** 0.5, rel=1e-9)
    assert float(found["mae"]) == pytest.approx(theirs.mean_absolute_error(truth, answers), rel=1e-9)
    assert float(found["r2"]) == pytest.approx(theirs.r2_score(truth, answers), rel=1e-6)


# ---------------------------------------------------------------------------------------------- cases


def test_dice_of_cases_is_the_mean_of_each_image_and_leaves_out_where_a_class_is_not():
    truth = torch.tensor([[[0, 0, 1, 1]], [[0, 0, 0, 0]], [[0, 0, 0, 255]]])
    answers = torch.tensor([[[0, 0, 1, 0]], [[0, 0, 0, 1]], [[0, 0, 0, 1]]])
    tiled, whole = (CaseOverlap("dice", CaseSizes(2, 3, 255, layered=False)) for _ in range(2))
    whole.update(torch.arange(3), answers, truth)
    for columns in (slice(0, 1), slice(1, 4)):
        tiled.update(torch.arange(3), answers[..., columns], truth[..., columns])
    assert torch.equal(whole.table, tiled.table)
    found = whole.columns()
    assert found["dice_cases"].tolist() == pytest.approx([(4 / 5 + 6 / 7 + 1) / 3, (2 / 3 + 0) / 2])
    assert found["cases"].tolist() == [3, 2], "class 1 is nowhere in the third image"


def test_layers_have_cases_of_their_own():
    truth, answers = torch.tensor([[[[1, 1]], [[0, 0]]]]), torch.tensor([[[[1, 0]], [[0, 0]]]])
    metric = CaseOverlap("iou", CaseSizes(2, 1, None, layered=True))
    metric.update(torch.tensor([0]), answers, truth)
    assert metric.columns()["iou_cases"][0] == 0.5 and metric.columns()["cases"].tolist() == [1, 0]


def by_hand(one: np.ndarray, other: np.ndarray, spacing) -> tuple[float, float, float]:
    """hd95, asd and nsd within 1, from all distances between the two surfaces."""
    points = [np.argwhere(surface(mask)) * np.asarray(spacing) for mask in (one, other)]
    apart = np.linalg.norm(points[0][:, None] - points[1][None], axis=-1)
    there, back = apart.min(1), apart.min(0)
    both = np.concatenate([there, back])
    return max(np.percentile(there, 95), np.percentile(back, 95)), both.mean(), (both <= 1).mean()


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (2.5, 0.5)])
def test_surface_distances_are_those_of_all_pairs_of_pixels(spacing):
    truth, answers = np.zeros((1, 20, 24), dtype=np.int64), np.zeros((1, 20, 24), dtype=np.int64)
    truth[0, 4:13, 5:16], answers[0, 6:18, 3:14], answers[0, 0, 0] = 1, 1, 1
    metric = SurfaceDistance(CaseSizes(2, 1, 255, layered=False), spacing=list(spacing))
    metric.update(torch.tensor([0]), torch.from_numpy(answers), torch.from_numpy(truth))
    found = [float(metric.columns()[name][1]) for name in ("hd95", "asd", "nsd")]
    assert found == pytest.approx(by_hand(answers[0] == 1, truth[0] == 1, spacing), rel=1e-12)
    assert math.isnan(metric.columns()["hd95"][0]), "class 0, the background, has none unless it is asked for"


def test_a_surface_is_the_border_of_a_mask_and_of_the_image():
    mask = np.zeros((5, 6), dtype=bool)
    mask[1:5, 1:5] = True
    inside = np.zeros_like(mask)
    inside[2:4, 2:4] = True
    assert (surface(mask) == (mask & ~inside)).all()


def test_missing_a_class_costs_the_diagonal_and_is_counted():
    """To leave such images out would let a model gain by missing more."""
    truth = torch.zeros(2, 3, 4, dtype=torch.int64)
    truth[0, 1, 1] = 1
    metric = SurfaceDistance(CaseSizes(2, 2, None, layered=False))
    metric.update(torch.arange(2), torch.zeros_like(truth), truth)
    found = metric.columns()
    assert found["hd95"][1] == found["asd"][1] == 5.0 and found["nsd"][1] == 0
    assert found["surface_cases"].tolist() == [0, 1] and found["one_sided"].tolist() == [0, 1]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("labels", "entry", "told"),
    [
        ("class", "dice_cases", r"have no 'dice_cases'.* The short names for labels of this kind are top, precision"),
        ("values", "f1", r"have no 'f1'.* The short names for labels of this kind are none"),
        ("class", "top9", "k is 9 and there are 5 classes; take a number from 1 to 5"),
        ("pixels", {"surface": {"tolerence": 1}}, "task.metrics: surface cannot be made: .*tolerence"),
    ],
)
def test_a_metric_that_is_not_there_is_refused(labels, entry, told):
    with pytest.raises(ValueError, match=told):
        scored(labels, entry, [], classes=5)


def test_a_spacing_of_other_dims_is_refused():
    metric = SurfaceDistance(CaseSizes(2, 1, None, layered=False), spacing=[1.0])
    with pytest.raises(ValueError, match=r"surface has spacing=\[1.0\] and images have 2 dims; give a length above 0 for each"):
        metric.update(torch.tensor([0]), torch.ones(1, 3, 3).long(), torch.ones(1, 3, 3).long())
