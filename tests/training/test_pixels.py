"""Is the gradient of pixels the mean over those that count, and is each pixel counted once, whoever holds it?"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, parse_config
from widefield.data import BadImageError, Dataset
from widefield.data.loader import Batch
from widefield.geometry import Interval, even_cut, parts_of
from widefield.plans import Plan
from widefield.training.assemble import Parts, assemble, learner_of, training_batches, write_model_of
from widefield.training.evaluate import Evaluation, evaluate
from widefield.training.loop import Learner, NonFiniteLossError
from widefield.training.run_folder import MODEL
from widefield.training.thumbnails import LONGEST_PX, SHOWN, join_thumbnails, thumbnails_of

CPU, CLASSES, IGNORED = torch.device("cpu"), 3, 255
CONFIG = """
model: {name: unet, options: {widths: [4, 6], norm: group}}
data: {name: page, batch_size: 5, workers: 0}
task: {name: segmentation}
optimizer: {name: sgd, lr: 0.1, momentum: 0, weight_decay: 0}
schedule: {name: constant, length: 3step}
precision: float64
"""


@dataclass(frozen=True)
class Noise:
    """Noise of 12 x 10 pixels; the share of pixels that do not count differs from image to image."""

    count: int
    single: bool = False
    size: tuple[int, int] = (12, 10)
    ignored: bool = True
    bad: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        if index in self.bad:
            raise BadImageError(f"cannot read the image noise/{index}")
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (1, *self.size), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, CLASSES, self.size, dtype=torch.uint8, generator=generator)
        if self.ignored:
            labels[torch.rand(self.size, generator=generator) < index % 4 / 4] = IGNORED
        return image, index % CLASSES if self.single else labels

    def name_of(self, index: int) -> str:
        return f"noise/{index}"


def dataset(single: bool = False) -> Dataset:
    names = [str(number) for number in range(CLASSES)]
    return Dataset(
        Noise(7, single), Noise(9, single), names, 1, [0.5], [0.25], in_memory=True, labels="class" if single else "pixels"
    )


def config(*settings: str) -> RunConfig:
    return parse_config(CONFIG, settings)


# ---------------------------------------------------------------------------------------------- learning


def losses_and_weights(mesh: Mesh, passes: int) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, of 5 and then of the 2 images that are left."""
    parts = assemble(config(f"gradient.accumulate={passes}"), mesh, dataset())
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=2)
    losses = [learner.learn([next(batches) for _ in range(passes)], stop=False)[0] for _ in range(2)]
    return losses, {name: value.detach().clone() for name, value in parts.model.named_parameters()}


def by_plain_torch() -> tuple[list[float], dict[str, Tensor]]:
    """The same steps on all images of a step at once, with the mean over counted pixels that torch takes."""
    parts = assemble(config(), Mesh(Plan(), World(), CPU), dataset())
    optimizer, losses = torch.optim.SGD(parts.model.parameters(), lr=0.1), []
    for batch in training_batches(parts, first=0, last=2):
        image = (batch.image.double() / 255 - 0.5) / 0.25
        loss = F.cross_entropy(parts.model(image), batch.target.long(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in parts.model.named_parameters()}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_follows_the_mean_over_the_pixels_that_count(size, passes):
    """Images have 120, 90, 60 or 30 pixels that count, so a mean of the means of images or of ranks is another number."""
    losses, weights = by_plain_torch()
    for found_losses, found in on_ranks(size, losses_and_weights, passes):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)


def learner_on(mesh: Mesh, images: Noise) -> tuple[Learner, list[Batch]]:
    """A learner on `images`, and this rank's passes of its first step."""
    parts = assemble(config("data.bad_images=skip", "data.batch_size=4"), mesh, replace(dataset(), train=images))
    learner, _ = learner_of(parts)
    return learner, [next(training_batches(parts, first=0, last=1))]


def scale_of_gradients(mesh: Mesh) -> float:
    learner, passes = learner_on(mesh, Noise(4, ignored=False))
    scales: list[float] = []
    learner._update = lambda scaler, *, scale: scales.append(scale)
    learner.learn(passes, stop=False)
    return scales[0]


@pytest.mark.parametrize("plan", [Plan(), Plan(space=[2, 1]), Plan(replicate=2)], ids=str)
def test_where_every_pixel_counts_no_gradient_is_scaled_again(plan):
    """Else a loss would be summed over millions of pixels before it is divided, which overflows float16."""
    assert on_ranks(plan.ranks, scale_of_gradients, plan=plan) == [1.0] * plan.ranks


def skipped(mesh: Mesh) -> list[str]:
    learner, passes = learner_on(mesh, Noise(4, bad=(2,)))
    learner.learn(passes, stop=False)
    return learner.skipped


def test_an_image_left_out_of_training_is_named_by_one_rank_of_a_copy():
    assert on_ranks(2, skipped, plan=Plan(space=[2, 1])) == [["noise/2"], []]


def images_of_no_number(mesh: Mesh) -> list[int]:
    learner, passes = learner_on(mesh, Noise(4))
    with torch.no_grad():
        next(learner.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteLossError) as caught:
        learner.learn(passes, stop=False)
    return sorted(caught.value.refusal.index)


def test_the_images_of_a_loss_that_is_no_number_are_named_once_on_every_rank():
    assert on_ranks(2, images_of_no_number, plan=Plan(space=[2, 1])) == [[0, 1, 2, 3]] * 2


# ---------------------------------------------------------------------------------------------- windows


def tiled(ranks: int, copies: int) -> Plan:
    """Copies of the model whose ranks hold rows of the image."""
    return Plan(replicate=copies, space=[ranks // copies, 1])


def parts_on(mesh: Mesh, *, single: bool = False) -> Parts:
    settings = ["task.name=classification", "model.name=resnet", "model.options={}"] if single else []
    return assemble(config(*settings, "data.evaluate_batch_size=2"), mesh, dataset(single))


class Pointwise(nn.Module):
    """Answers for a pixel from that pixel alone, so that a tile needs nothing of its neighbours."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, classes, dtype=torch.float64).view(1, -1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return (3 * image * self.weight).sin()


class Constant(nn.Module):
    """The same answer for every image, so that every rank of a copy knows it."""

    def forward(self, image: Tensor) -> Tensor:
        return torch.tensor([[0.1, 0.7, 0.2]], dtype=torch.float64).expand(len(image), -1)


def evaluated(mesh: Mesh, single: bool) -> Evaluation:
    parts = parts_on(mesh, single=single)
    return evaluate(
        Constant() if single else Pointwise(CLASSES),
        parts.evaluation_batches(),
        task=parts.task,
        prepare=parts.preparation(train=False),
        arithmetic=parts.arithmetic,
        mesh=parts.mesh,
        samples=9,
    )


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("size", "copies"), [(2, 2), (2, 1), (3, 1), (3, 3)])
def test_every_image_and_every_pixel_is_counted_once(size, copies, single):
    one = on_ranks(1, evaluated, single)[0]
    assert (one.images, one.of, one.duplicates) == (9, 9, 0)
    assert sum(map(sum, one.confusion)) == (9 if single else sum(int((Noise(9).read(i)[1] < CLASSES).sum()) for i in range(9)))
    for found in on_ranks(size, evaluated, single, plan=tiled(size, copies)):
        assert (found.images, found.of, found.duplicates, found.confusion) == (9, 9, 0, one.confusion)
        assert found.metrics == one.metrics and found.sentence == one.sentence
        assert found.loss == pytest.approx(one.loss, rel=1e-12)
        assert [mistake.index for mistake in found.mistakes] == [mistake.index for mistake in one.mistakes]


def order_and_windows(mesh: Mesh) -> list[tuple[list[int], Interval | None]]:
    """Images and rows of them, None being all: a grid of one tile is none."""
    batches = training_batches(parts_on(mesh), first=0, last=2)
    return [(batch.index.tolist(), None if batch.window is None else batch.window[0]) for batch in batches]


def test_ranks_of_a_copy_read_other_windows_of_the_same_images():
    upper, lower = on_ranks(2, order_and_windows, plan=tiled(2, 1))
    alone = on_ranks(1, order_and_windows, plan=tiled(1, 1))[0]
    assert [index for index, _ in upper] == [index for index, _ in lower] == [index for index, _ in alone]
    assert {rows for _, rows in upper} == {Interval(0, 6)} and {rows for _, rows in lower} == {Interval(6, 12)}


def model_file(mesh: Mesh, place: Path) -> dict:
    own = place / str(mesh.rank)
    own.mkdir()
    write_model_of(own, parts_on(mesh))
    return json.loads((own / MODEL).read_text())


def test_a_window_is_not_what_the_model_file_calls_an_image(tmp_path):
    assert [told["image"] for told in on_ranks(2, model_file, tmp_path, plan=tiled(2, 1))] == [[1, 12, 10]] * 2


def test_copies_share_images_out():
    first, second = on_ranks(2, order_and_windows, plan=tiled(2, 2))
    alone = on_ranks(1, order_and_windows, plan=tiled(1, 1))[0]
    shared = [a + b for (a, _), (b, _) in zip(first, second, strict=True)]
    assert shared == [index for index, _ in alone]


def numbers_drawn(mesh: Mesh) -> list[float]:
    learner_of(parts_on(mesh))
    return torch.rand(3).tolist()


@pytest.mark.parametrize(
    ("settings", "alike"), [({}, True), ({"independent": True}, False), ({"batch_norm": "averaged"}, False)], ids=str
)
def test_copies_draw_as_one_device_or_each_by_itself(settings, alike):
    """Copies whose samples are rows of one batch draw for all of them; others must not draw the same masks twice."""
    first, second = on_ranks(2, numbers_drawn, plan=Plan(replicate=2, **settings))
    assert (first == second) == alike


@pytest.mark.parametrize(
    ("ranks", "copies", "first"), [(6, 6, [0, 1, 2, 3, 4, 5]), (6, 3, [0, 2, 4]), (6, 2, [0, 3]), (6, 1, [0])]
)
def test_one_rank_of_each_copy_counts_its_images(ranks, copies, first):
    meshes = [Mesh(Plan(replicate=copies, space=[ranks // copies]), World(rank, ranks), CPU) for rank in range(ranks)]
    assert [mesh.rank for mesh in meshes if mesh.is_first_of_copy] == first


# ---------------------------------------------------------------------------------------------- pictures


def batch_at(size: tuple[int, int], window: tuple[Interval, ...] | None) -> tuple[Batch, Tensor, Tensor]:
    """Images SHOWN - 1 and SHOWN of a split, or a window of them, with their answers and labels."""
    generator = torch.Generator().manual_seed(5)
    image = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8, generator=generator)
    answers, target = torch.randint(0, 4, (2, 2, *size), generator=generator)
    index, part = torch.tensor([SHOWN - 1, SHOWN]), tuple(slice(run.start, run.stop) for run in window or ())
    part = (..., *part)
    whole = None if window is None else (3, *size)
    return Batch(image[part], target[part], index, samples=2, whole_shape=whole, window=window), answers[part], target[part]


@pytest.mark.parametrize("size", [(40, 30), (2 * LONGEST_PX + 1, 33), (17, 3 * LONGEST_PX)])
@pytest.mark.parametrize("tiles", [(1, 2), (3, 1), (2, 3)])
def test_pieces_of_windows_are_the_picture_of_the_whole(size, tiles):
    whole = join_thumbnails(thumbnails_of(*batch_at(size, None), ignore=3))
    rows, columns = (parts_of(even_cut(length, parts)) for length, parts in zip(size, tiles, strict=True))
    pieces = [piece for r in rows for c in columns for piece in thumbnails_of(*batch_at(size, (r, c)), ignore=3)]
    (found,), (wanted,) = join_thumbnails(pieces), whole
    assert (found.index, found.size, found.shape) == (SHOWN - 1, size, wanted.shape) and max(found.shape) <= LONGEST_PX
    assert (found.right, found.counted) == (wanted.right, wanted.counted)
    assert all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in ("image", "truth", "prediction"))


def test_a_picture_keeps_every_so_many_th_pixel_and_counts_them_all():
    batch, answers, target = batch_at((2 * LONGEST_PX + 1, 33), None)
    (piece,) = thumbnails_of(batch, answers, target, ignore=3)
    assert torch.equal(piece.truth, target[0, ::3, ::3]) and torch.equal(piece.image, batch.image[0, :, ::3, ::3])
    counted = target[0] != 3
    assert (piece.counted, piece.right) == (int(counted.sum()), int((answers[0] == target[0])[counted].sum()))


def test_a_picture_of_which_a_part_is_missing_is_not_shown():
    upper = thumbnails_of(*batch_at((40, 30), (Interval(0, 20), Interval(0, 30))), ignore=3)
    assert len(upper) == 1 and join_thumbnails(upper) == []


# ---------------------------------------------------------------------------------------------- refusals


def refusal(*settings: str, data: Dataset | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        assemble(config(*settings), Mesh(Plan(), World(), CPU), data or dataset())
    return str(caught.value)


def test_labels_that_are_not_what_the_task_learns_are_refused():
    assert refusal("task.name=classification") == (
        "task.name=classification learns one class number per image and data.name=page has one per pixel; "
        "set task.name=segmentation, or take other data"
    )
    assert refusal(data=dataset(single=True)) == (
        "task.name=segmentation learns one per pixel and data.name=page has one class number per image; "
        "set task.name=classification, or take other data"
    )


@pytest.mark.parametrize("field", ["read", "read_evaluate", "augment"])
@pytest.mark.parametrize("name", ["RandomErasing", "RandAugment", "AugMix"])
def test_what_labels_cannot_follow_is_refused(field, name):
    asked, told = config(f"data.{field}=[Grayscale, {name}]"), rf"data.{field} has {name}, .* labels of pixels cannot follow"
    with pytest.raises(NotImplementedError, match=told):
        assemble(asked, Mesh(Plan(), World(), CPU), dataset())


def test_what_changes_colour_alone_is_allowed():
    jitter = "data.augment=[{ColorJitter: {brightness: 0.2}}, RandomInvert]"
    assert assemble(config(jitter), Mesh(Plan(), World(), CPU), dataset()).dataset.pixels


@pytest.mark.parametrize("field", ["mixup", "cutmix"])
def test_mixing_of_images_whose_pixels_have_labels_is_refused(field):
    told = (
        f"data.{field}=0.2 mixes images of one class number per image and data.name=page has one per pixel; set data.{field}=0"
    )
    assert refusal(f"data.{field}=0.2") == told
