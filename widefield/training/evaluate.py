"""Exact evaluation: every image once, on any number of ranks, with the count that proves it.

Each copy of the model evaluates its part of the split.  Metric states, the loss sum and a tally of how often each image was
evaluated are summed over ranks once, at the end.  Copies may have different numbers of batches, since they do not communicate
before that; where weights are sharded, passes are collective, and a copy that runs out of images runs dummy batches.
Where a copy has several ranks, each counts the pixels of its window, and the first one counts what belongs to whole images.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

from widefield.comm.mesh import Mesh
from widefield.data.device import Preparation
from widefield.data.loader import Batch
from widefield.quantity import count_of
from widefield.tasks import Task, is_per_pixel
from widefield.tasks._metrics import RecipeMetric, numbers_of
from widefield.tiled.api import tile_of, whole
from widefield.training.arithmetic import Arithmetic
from widefield.training.batch_sharding import on_tiles
from widefield.training.thumbnails import Thumbnail, join_thumbnails, small_thumbnail_of, thumbnails_of


@dataclass(frozen=True)
class Mistake:
    """A wrong answer: class numbers, the probability of the predicted class, and the loss."""

    index: int
    truth: int
    prediction: int
    probability: float
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, the same on every rank.

    metrics: the task's in percent, then those that the recipe adds, as they compute themselves.
    confusion: counts of images or, where every pixel has a class, of pixels (`unit`); rows are true classes.
    mistakes: the worst wrong answers by loss, over all ranks; pictures: thumbnails of their images.
    pieces: thumbnails of the first images, where every pixel has a class.
    images, of: how many images were evaluated, and how many the split has.
    """

    metrics: dict[str, float]
    confusion: list[list[int]] | None
    loss: float
    images: int
    of: int
    duplicates: int
    skipped: list[str]
    sentence: str
    seconds: float
    mistakes: list[Mistake] = field(default_factory=list, repr=False)
    unit: Literal["images", "pixels"] = "images"
    pieces: list[Thumbnail] = field(default_factory=list, repr=False)
    pictures: list[Thumbnail] = field(default_factory=list, repr=False)
    channels: int = 3
    """The number of channels of the images; a thumbnail shows one or three."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    task: Task,
    prepare: Preparation,
    arithmetic: Arithmetic,
    mesh: Mesh,
    samples: int,
    worst: int = 24,
    together: bool = False,
    extra_metrics: Sequence[RecipeMetric] = (),
) -> Evaluation:
    """Evaluate `model` on this rank's `batches` of a split of `samples` images.  Every rank calls it; all get the same result.

    worst: how many mistakes to return.  together: passes of the model are collective, so every rank has equally many batches.
    extra_metrics: metrics besides the task's own.
    Counts are exactly those of one rank.  AgreedError, on every rank: an image cannot be read (unless it is skipped).
    """
    start, training = time.monotonic(), [(module, module.training) for module in model.modules()]
    seen, problem = _Counts.empty(task.metrics(), samples, mesh, extra_metrics), None
    model.eval()
    for batch in batches:
        seen.skipped += batch.skipped if seen.first else []
        problem = batch.problem
        if _is_over(batch, mesh, together=together):
            break
        if batch.samples == 0 and not together:
            continue
        image, target = prepare(batch)
        with arithmetic.autocast():
            output = model(on_tiles(image, batch, mesh))
        output = tile_of(output, mesh) if is_per_pixel(task) else whole(output)
        if batch.samples == 0:
            continue
        seen.add(batch, output.to(torch.promote_types(output.dtype, torch.float32)), target, task=task, worst=worst)
    for module, flag in training:  # not model.train(): the user may keep layers in evaluation mode
        module.training = flag
    mesh.agree(problem)
    return _total(task, seen, mesh, worst, time.monotonic() - start)


def _is_over(batch: Batch, mesh: Mesh, *, together: bool) -> bool:
    """Whether to stop before this batch: a rank of this copy has a problem or, with collective passes, any rank."""
    if batch.problem is not None:
        mesh.call_to_agree()  # else other copies would learn of it only when they are done
    stops = batch.refused or batch.problem is not None
    return bool(mesh.sum_(torch.tensor(float(stops), device=mesh.device))) if together else stops


@dataclass
class _Counts:
    """What one rank has counted so far.  losses: their sum and number.  tally: how often each image was evaluated."""

    metrics: MetricCollection
    tally: Tensor
    losses: Tensor
    first: bool
    """Whether this rank is the first of its copy of the model, which counts what belongs to whole images."""
    counts: bool
    """Whether this rank counts the pixels of its window, which ranks of the same tile also have."""
    mistakes: list[Mistake] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    pieces: list[Thumbnail] = field(default_factory=list)
    pictures: dict[int, Thumbnail] = field(default_factory=dict)
    """By image number, thumbnails of this rank's windows of the images in `mistakes`."""
    channels: int = 0
    extra_metrics: list[tuple[RecipeMetric, Metric]] = field(default_factory=list)
    """The metrics that the recipe adds, each with the torchmetrics object that counts."""

    @classmethod
    def empty(cls, metrics: MetricCollection, samples: int, mesh: Mesh, extra_metrics: Sequence[RecipeMetric] = ()) -> _Counts:
        losses = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        tally = torch.zeros(samples, dtype=torch.int64)
        made = [(metric, metric.make().to(mesh.device)) for metric in extra_metrics]
        return cls(metrics.to(mesh.device), tally, losses, mesh.is_first_of_copy, mesh.is_first_of_tile, extra_metrics=made)

    def add(self, batch: Batch, output: Tensor, target: Tensor, *, task: Task, worst: int) -> None:
        pixels, answers = is_per_pixel(task), task.answers(output)
        if self.first:
            self.tally.index_add_(0, batch.index, torch.ones_like(batch.index))
        if self.first or (pixels and self.counts):
            self.metrics.update(answers, target)
            for _, metric in self.extra_metrics:
                metric.update(answers, target)
            self.losses[0] += task.loss_sum(output, target)
            self.losses[1] += task.count(target)
        if pixels and self.counts:
            self.pieces += thumbnails_of(batch, answers, target, ignore=getattr(task, "ignore_index", -1))
        elif self.counts:
            mistakes = _mistakes(batch.index, target, answers, task.loss_each(output, target), worst)
            self.mistakes = heapq.nlargest(worst, self.mistakes + mistakes, key=_by_loss)
            self._picture(batch)
        self.channels = batch.shape[0]

    def _picture(self, batch: Batch) -> None:
        """Make thumbnails of this batch's images among `mistakes`, and drop those of images no longer among them."""
        pictures, rows = {}, {int(index): row for row, index in enumerate(batch.index)}
        for index in (mistake.index for mistake in self.mistakes):
            piece = small_thumbnail_of(batch, rows[index]) if index in rows else self.pictures.get(index)
            pictures |= {} if piece is None else {index: piece}
        self.pictures = pictures


def _mistakes(index: Tensor, target: Tensor, answers: Tensor, loss: Tensor, worst: int) -> list[Mistake]:
    """The batch's worst wrong answers by loss."""
    probability, prediction = answers.max(1)
    wrong = (prediction != target).nonzero().flatten()
    if len(wrong) == 0:
        return []
    top = wrong[loss[wrong].topk(min(worst, len(wrong))).indices]
    columns = [tensor[top.to(tensor.device)].tolist() for tensor in (index, target, prediction, probability, loss)]
    return [Mistake(*row) for row in zip(*columns, strict=True)]


def _by_loss(mistake: Mistake) -> tuple[float, int]:
    return mistake.loss, -mistake.index


def _total(task: Task, seen: _Counts, mesh: Mesh, worst: int, seconds: float) -> Evaluation:
    """Sum everything over ranks."""
    for metric in seen.metrics.values():
        _add_up(metric, mesh)
    losses = mesh.sum_(seen.losses)
    tally = mesh.sum_(seen.tally.to(mesh.device)).cpu()
    gathered = mesh.gather_objects((seen.mistakes if seen.first else [], seen.skipped, seen.pieces, seen.channels))
    mistakes = heapq.nlargest(worst, [one for some, *_ in gathered for one in some], key=_by_loss)
    shown = [seen.pictures[one.index] for one in mistakes if one.index in seen.pictures]
    values = dict(seen.metrics.compute())
    confusion = torch.atleast_2d(values.pop("confusion")).tolist() if "confusion" in values else None  # one class: a number
    images, of, skipped = int((tally > 0).sum()), len(tally), [name for _, names, *_ in gathered for name in names]
    duplicates = int(tally.sum()) - images
    numbers = {name: 100 * float(value) for name, value in values.items()}
    extra = _extra_metrics(seen, mesh)
    extra_in_words = "".join(f", {name} {value:.4g}" for name, value in extra.items())
    skipped_in_words = f", {len(skipped)} unreadable left out" if skipped else ""
    sentence = f"{task.sentence(numbers)}{extra_in_words} on {images:,}/{of:,} images"
    sentence += f", {count_of(duplicates, 'duplicate')}" if duplicates else ""
    return Evaluation(
        metrics=numbers | extra,
        confusion=confusion,
        loss=float(losses[0] / losses[1]),
        images=images,
        of=of,
        duplicates=duplicates,
        skipped=skipped,
        sentence=sentence + skipped_in_words,
        seconds=seconds,
        mistakes=mistakes,
        unit="pixels" if is_per_pixel(task) else "images",
        pieces=join_thumbnails([piece for *_, pieces, _ in gathered for piece in pieces]),
        pictures=join_thumbnails([piece for pieces in mesh.gather_objects(shown) for piece in pieces]),
        channels=max(channels for *_, channels in gathered),
    )


def _add_up(metric: torch.nn.Module, mesh: Mesh) -> None:
    """Sum the states of a torchmetrics metric over ranks; NotImplementedError for a state that is no sum."""
    for name, reduce in metric._reductions.items():
        state = getattr(metric, name)
        if reduce is not dim_zero_sum or not isinstance(state, Tensor):
            raise NotImplementedError(
                f"the state '{name}' of {type(metric).__name__} does not add up over ranks (its reduction is {reduce}); "
                "use a metric whose states are sums"
            )
        mesh.sum_(state)
    metric._to_sync = False  # else torchmetrics would sum the states over ranks once more
    metric._update_count = max(1, metric._update_count)  # else it would warn on a rank that had no images


def _extra_metrics(seen: _Counts, mesh: Mesh) -> dict[str, float]:
    """The values of the metrics that the recipe adds, over all ranks; tasks/_metrics.py checks that their states add up."""
    found: dict[str, float] = {}
    for metric, states in seen.extra_metrics:
        for name, reduce in states._reductions.items():
            setattr(states, name, _joined(getattr(states, name), reduce, mesh))
        states._to_sync = False
        states._update_count = max(1, states._update_count)
        found |= numbers_of(metric, states.compute())
    return found


def _joined(state: Any, reduce: Callable[[Tensor], Tensor], mesh: Mesh) -> Any:
    """A metric's state reduced over ranks: the sum, the largest or smallest, or the states concatenated in rank order."""
    if reduce is dim_zero_sum:
        return mesh.sum_(state)
    if reduce is dim_zero_cat:
        parts = state if isinstance(state, list) else [state]
        gathered = mesh.gather_objects([part.cpu() for part in parts])
        return [part.to(mesh.device) for of_rank in gathered for part in of_rank]
    return reduce(torch.stack([one.to(mesh.device) for one in mesh.gather_objects(state.cpu())]))
