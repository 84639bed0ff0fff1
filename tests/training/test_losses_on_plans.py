"""Is every loss, with its gradients, the plain formula on the whole batch, however ranks, tiles and passes divide it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from drawn import CLASSES, IGNORED, IMAGES, TASKS, images_of, net_for
from marks import SWEEP
from ranks import on_ranks
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as ms_ssim
from torchmetrics.functional.image import structural_similarity_index_measure as ssim
from torchmetrics.functional.image import total_variation

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, StreamConfig, parse_config
from widefield.plans import Plan
from widefield.training.assemble import Parts, assemble, evaluate_parts, learner_of, training_batches
from widefield.training.given import Given

CPU = torch.device("cpu")
WEIGHTS = [0.5, 1.0, 2.5]
CONFIG = """
model: {name: unet}
data: {name: page, batch_size: 5, workers: 0, evaluate_batch_size: 2}
optimizer: {name: sgd, lr: 0.1, momentum: 0, weight_decay: 0}
schedule: {name: constant, length: 3step}
precision: float64
"""


# ---------------------------------------------------------------------------------------------- the plain formulas


def entropy(output: Tensor, target: Tensor, weights: list[float] | None = None, smoothing: float = 0.0) -> Tensor:
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    return F.cross_entropy(output, target, weight=weight, ignore_index=IGNORED, label_smoothing=smoothing)


def focal(output: Tensor, target: Tensor) -> Tensor:
    """gamma 2, weights: a sum of single pixels, one after another."""
    p, total, weight = output.softmax(1).movedim(1, -1).reshape(-1, CLASSES), torch.zeros(()).double(), 0.0
    for chances, label in zip(p, target.flatten().tolist(), strict=True):
        if label != IGNORED:
            total = total - WEIGHTS[label] * (1 - chances[label]) ** 2 * chances[label].log()
            weight += WEIGHTS[label]
    return total / weight


def binary(output: Tensor, target: Tensor, weights: list[float] | None = None) -> Tensor:
    factor = None if weights is None else torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (output.ndim - 2))
    return F.binary_cross_entropy_with_logits(output, target.double(), pos_weight=factor)


def binary_focal(output: Tensor, target: Tensor) -> Tensor:
    p = torch.where(target > 0, output.sigmoid(), 1 - output.sigmoid())
    return -((1 - p) ** 2 * p.log()).mean()


def score(p: Tensor, truth: Tensor, alpha: float | None) -> Tensor:
    """Dice, or with alpha Tversky, of the pixels of one class."""
    inside = (p * truth).sum()
    if alpha is None:
        return (2 * inside + 1e-5) / (p.sum() + truth.sum() + 1e-5)
    return (inside + 1e-5) / (inside + alpha * (p.sum() - inside) + (1 - alpha) * (truth.sum() - inside) + 1e-5)


def overlap(output: Tensor, target: Tensor, *, batch: bool, first: int = 0, alpha: float | None = None) -> Tensor:
    """1 - the mean score over classes `first` to the last, of all images as one or of each image."""
    if not batch:
        each = [overlap(output[n : n + 1], target[n : n + 1], batch=True, first=first, alpha=alpha) for n in range(len(output))]
        return torch.stack(each).mean()
    if target.ndim == output.ndim:
        pairs = [(output[:, k].sigmoid(), target[:, k].double()) for k in range(first, CLASSES)]
    else:
        counted = target != IGNORED
        pairs = [(output.softmax(1)[:, k][counted], (target == k)[counted].double()) for k in range(first, CLASSES)]
    return 1 - torch.stack([score(p, truth, alpha) for p, truth in pairs]).mean()


TERMS = "{l1: 1, ssim: {weight: 0.3}, total_variation: 0.1}"


def variation(output: Tensor) -> Tensor:
    return total_variation(output, "mean") / output[0].numel()


Formula = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[str, list[str], Formula]] = {
    "weighted": ("pixels", [f"task.class_weights={WEIGHTS}"], lambda o, t: entropy(o, t, WEIGHTS)),
    "smoothed": ("pixels", ["task.loss=cross_entropy", "task.loss_options.label_smoothing=0.1"],
                 lambda o, t: entropy(o, t, None, 0.1)),
    "focal": ("pixels", ["task.loss=focal", f"task.class_weights={WEIGHTS}"], focal),
    "dice": ("pixels", ["task.loss=dice"], lambda o, t: overlap(o, t, batch=False)),
    "batch dice": ("pixels", ["task.loss=dice", "task.loss_options={batch: true, background: false}"],
                   lambda o, t: overlap(o, t, batch=True, first=1)),
    "dice + ce": ("pixels", ["task.loss=dice_cross_entropy", "task.loss_options={background: false}"],
                  lambda o, t: overlap(o, t, batch=False, first=1) + entropy(o, t)),
    "batch dice + ce": ("pixels", ["task.loss=dice_cross_entropy", "task.loss_options={batch: true, dice: 2}",
                                   f"task.class_weights={WEIGHTS}"],
                        lambda o, t: 2 * overlap(o, t, batch=True) + entropy(o, t, WEIGHTS)),
    "tversky": ("pixels", ["task.loss=tversky", "task.loss_options={batch: true}"],
                lambda o, t: overlap(o, t, batch=True, alpha=0.3)),
    "own of pixels": ("pixels", ["task.loss=torch.nn:CrossEntropyLoss"], entropy),
    "layers": ("layers", [f"task.class_weights={WEIGHTS}"], lambda o, t: binary(o, t, WEIGHTS)),
    "layers dice + bce": ("layers", ["task.loss=dice_cross_entropy"], lambda o, t: overlap(o, t, batch=False) + binary(o, t)),
    "layers focal": ("layers", ["task.loss=focal"], binary_focal),
    "class weighted": ("class", [f"task.class_weights={WEIGHTS}"], lambda o, t: entropy(o, t, WEIGHTS)),
    "class focal": ("class", ["task.loss=focal", f"task.class_weights={WEIGHTS}"], focal),
    "own": ("class", ["task.loss=torch.nn:MultiMarginLoss", "task.loss_options={margin: 0.5}"],
            lambda o, t: F.multi_margin_loss(o, t, margin=0.5)),
    "classes": ("classes", [], binary),
    "classes focal": ("classes", ["task.loss=focal"], binary_focal),
    "image l1": ("image", [], lambda o, t: F.l1_loss(o, t)),
    "image mse": ("image", ["task.loss=mse"], lambda o, t: F.mse_loss(o, t)),
    "charbonnier": ("image", ["task.loss=charbonnier", "task.loss_options.epsilon=0.01"],
                    lambda o, t: ((o - t) ** 2 + 1e-4).sqrt().mean()),
    "ssim": ("image", ["task.loss=ssim"], lambda o, t: 1 - ssim(o, t, data_range=1.0)),
    "ms_ssim": ("image", ["task.loss=ms_ssim", "task.loss_options={sigma: 0.3, betas: [0.4, 0.6]}"],
                lambda o, t: 1 - ms_ssim(o, t, sigma=0.3, kernel_size=3, data_range=1.0, betas=(0.4, 0.6), normalize="relu")),
    "total_variation": ("image", ["task.loss=total_variation"], lambda o, t: variation(o)),
    "weighted images": ("image", ["task.loss=weighted", f"task.loss_options.terms={TERMS}"],
                 lambda o, t: F.l1_loss(o, t) + 0.3 * (1 - ssim(o, t, data_range=1.0)) + 0.1 * variation(o)),
    "mse": ("values", [], lambda o, t: F.mse_loss(o, t.double())),
    "l1": ("values", ["task.loss=l1"], lambda o, t: F.l1_loss(o, t.double())),
    "huber": ("values", ["task.loss=huber", "task.loss_options.delta=0.7"],
              lambda o, t: F.huber_loss(o, t.double(), delta=0.7)),
}  # fmt: skip
OF_A_PASS = ("batch dice", "dice + ce", "batch dice + ce", "tversky", "layers dice + bce")
"""Losses whose batch is that of a pass."""


# ---------------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Found:
    """The loss of a step, the weights after it, and the loss of the evaluation split then."""

    loss: float
    weights: dict[str, Tensor]
    evaluated: float


def config(name: str, passes: int = 1) -> RunConfig:
    labels, settings, _ = LOSSES[name]
    return parse_config(CONFIG, [f"task.name={TASKS[labels]}", f"gradient.accumulate={passes}", *settings])


def parts_of(name: str, mesh: Mesh, passes: int = 1) -> Parts:
    labels = LOSSES[name][0]
    return assemble(config(name, passes), mesh, images_of(labels), given=Given(model=net_for(labels)))


def found(mesh: Mesh, passes: int = 1) -> dict[str, Found]:
    """One step with every loss."""
    return {name: _found(name, mesh, passes) for name in LOSSES}


def _found(name: str, mesh: Mesh, passes: int) -> Found:
    parts = parts_of(name, mesh, passes)
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=1)
    loss, _ = learner.learn([next(batches) for _ in range(passes)], stop=False)
    weights = {key: value.detach().clone() for key, value in parts.model.named_parameters()}
    return Found(loss, weights, evaluate_parts(parts, learner.model).loss)


def plain(name: str, passes: int = 1) -> Found:
    """The same by the formula, on all images at once or, of a loss of passes, on those of each pass."""
    labels, _, formula = LOSSES[name]
    parts = parts_of(name, Mesh(Plan(), World(), CPU))
    model = parts.model
    (batch,) = training_batches(parts, first=0, last=1)
    wanted = in_units(batch.target, labels)
    groups = torch.arange(IMAGES).tensor_split(passes) if name in OF_A_PASS else [torch.arange(IMAGES)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [len(rows) / IMAGES * formula(model(scaled(batch.image[rows])), wanted[rows]) for rows in groups]
    loss = torch.stack(losses).sum()
    loss.backward()
    optimizer.step()
    every = [parts.dataset.evaluate.read(index) for index in range(IMAGES)]
    images, targets = torch.stack([image for image, _ in every]), torch.stack([torch.as_tensor(target) for _, target in every])
    weights = {key: value.detach().clone() for key, value in model.named_parameters()}
    return Found(loss.item(), weights, formula(model(scaled(images)), in_units(targets, labels)).item())


def in_units(target: Tensor, labels: str) -> Tensor:
    """As the task gets it."""
    return target.double() / 255 if labels == "image" else target.double() if labels == "values" else target.long()


def scaled(image: Tensor) -> Tensor:
    return (image.double() / 255 - 0.5) / 0.25


def compare(measured: dict[str, Found], passes: int = 1) -> None:
    for name in LOSSES:
        wanted, got = plain(name, passes), measured[name]
        assert got.loss == pytest.approx(wanted.loss, rel=1e-12), name
        assert got.evaluated == pytest.approx(wanted.evaluated, rel=1e-11), name
        for key, value in wanted.weights.items():
            torch.testing.assert_close(
                got.weights[key], value, rtol=1e-10, atol=1e-13, msg=lambda text, at=name: f"{at}: {text}"
            )


@pytest.mark.long
@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_of_one_rank_follows_the_formula(passes):
    compare(found(Mesh(Plan(), World(), CPU), passes), passes)


@pytest.mark.long
def test_a_stream_follows_the_formula():
    compare(found(Mesh(Plan(stream=StreamConfig(tiles=[2, 2])), World(), CPU)))


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        Plan(replicate=2),
        pytest.param(Plan(replicate=3), marks=SWEEP),
        Plan(space=[2, 1]),
        pytest.param(Plan(replicate=2, space=[1, 2]), marks=SWEEP),
    ],
    ids=str,
)
def test_ranks_and_tiles_follow_the_formula(plan):
    """Five images on two copies are 3 and 2."""
    for measured in on_ranks(plan.ranks, found, plan=plan):
        compare(measured)


def passes_of_copies(mesh: Mesh) -> dict[str, Found]:
    return found(mesh, passes=2)


@pytest.mark.long
def test_passes_of_copies_follow_the_formula():
    """The second pass has two images: one for each copy."""
    compare(on_ranks(2, passes_of_copies)[0], passes=2)


@pytest.mark.parametrize("name", OF_A_PASS)
def test_stages_refuse_a_loss_of_all_images_together(name):
    mesh = Mesh(Plan(stage=2), World(), CPU)
    with pytest.raises(NotImplementedError, match=r"the 2 stages of mesh.stage .*; set mesh.stage=1, or take a loss of each"):
        learner_of(parts_of(name, mesh))
