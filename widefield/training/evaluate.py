"""Exact evaluation: every image once, on any number of ranks, with the count that proves it.

Each copy of the model evaluates its part of the split.  Metric states, the loss sum and a tally of how often each image was
evaluated are summed over ranks once, at the end.  Copies may have different numbers of batches, since they do not communicate
before that; where weights are sharded, passes are collective, and a copy that runs out of images runs dummy batches.
Where a copy has several ranks, each counts the pixels of its window, and the first one counts what belongs to whole images.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from widefield.comm.mesh import Mesh
from widefield.data.device import Preparation
from widefield.data.loader import Batch
from widefield.detection.targets import sizes_in
from widefield.losses import widened
from widefield.quantity import count_of
from widefield.tasks import Task, is_per_pixel, labels_of, scale_of
from widefield.tasks._cases import CaseMetric
from widefield.tasks._metrics import RecipeMetric, columns_of, numbers_of
from widefield.tasks._torchmetrics import Metric, MetricCollection, dim_zero_cat, dim_zero_sum
from widefield.tiled.api import tile_of, whole
from widefield.training.arithmetic import Arithmetic
from widefield.training.batch_sharding import inputs_on_tiles, on_tiles
from widefield.training.drawn_boxes import mistakes_of_boxes
from widefield.training.evaluation import Evaluation, Mistake, by_loss, mistakes_of
from widefield.training.image_thumbnails import pictures_of
from widefield.training.metric_states import merge_states
from widefield.training.sample_grid import SAMPLED
from widefield.training.scores import columns_of_task, curves_of_task
from widefield.training.second_stage import for_loss
from widefield.training.thumbnails import (
    LONGEST_PX,
    SMALL_PX,
    Thumbnail,
    join_thumbnails,
    painted,
    small_thumbnail_of,
    thumbnails_of,
)
from widefield.training.volume_thumbnails import volume_thumbnails_of


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
    classes: Sequence[str] = (),
) -> Evaluation:
    """Evaluate `model` on this rank's `batches` of a split of `samples` images.  Every rank calls it; all get the same result.

    worst: how many mistakes to return.  together: passes of the model are collective, so every rank has equally many batches.
    extra_metrics: metrics besides the task's own.  classes: their names.
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
        output = _output_of(model, task, image, target, batch, mesh, arithmetic)
        if batch.samples:
            seen.add(batch, output, target, task=task, worst=worst, mesh=mesh)
    for module, flag in training:  # not model.train(): the user may keep layers in evaluation mode
        module.training = flag
    mesh.agree(problem)
    return _total(task, seen, mesh, worst, time.monotonic() - start, list(classes))


def _output_of(
    model: nn.Module, task: Task, image: Tensor, target: Any, batch: Batch, mesh: Mesh, arithmetic: Arithmetic
) -> Any:
    """Of a batch, as the task's metrics take it."""
    with arithmetic.autocast():
        output = model(inputs_on_tiles(image, batch, mesh, task))
    output = output if is_per_pixel(task) else whole(output)
    if labels_of(task) == "boxes":  # also of a dummy batch: ranks that hold weights in parts call each stage equally often
        output = for_loss(task, model, output, target, autocast=arithmetic.autocast, seeds=batch.seeds)
    return output


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
    sums: Tensor | None = None
    """The sums of a loss that is finished from sums; None before the first batch, and of other losses."""
    mistakes: list[Mistake] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    pieces: list[Thumbnail] = field(default_factory=list)
    pictures: dict[int, Thumbnail] = field(default_factory=dict)
    """By image number, thumbnails of this rank's windows of the images in `mistakes`."""
    channels: int = 0
    extra_metrics: list[tuple[RecipeMetric, Metric]] = field(default_factory=list)
    """The metrics that the recipe adds, each with the torchmetrics object that counts."""
    cases: list[CaseMetric] = field(default_factory=list)
    """Those of each image by itself."""

    @classmethod
    def empty(cls, metrics: MetricCollection, samples: int, mesh: Mesh, extra_metrics: Sequence[RecipeMetric] = ()) -> _Counts:
        losses = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        tally = torch.zeros(samples, dtype=torch.int64)
        made = [(metric, metric.made().to(mesh.device)) for metric in extra_metrics if metric.of_cases is None]
        cases = [metric.of_cases(samples) for metric in extra_metrics if metric.of_cases is not None]
        first, counts = mesh.is_first_of_copy, mesh.is_first_of_tile
        return cls(metrics.to(mesh.device), tally, losses, first, counts, extra_metrics=made, cases=cases)

    def add(self, batch: Batch, output: Tensor, target: Tensor, *, task: Task, worst: int, mesh: Mesh) -> None:
        """Add a batch.  output: of all images or, where every pixel has a class, on tiles.  All ranks of a copy call it."""
        pixels, output = is_per_pixel(task), widened(output)
        tiled = on_tiles(target, batch, mesh, scale=scale_of(task)) if pixels else target
        self._add_loss(output, tiled, task)
        if labels_of(task) == "boxes":
            self._add_found(batch, output, target, task, worst)
            return
        measures = whole(task.measures(output, tiled)) if hasattr(task, "measures") else None
        output = tile_of(output, mesh, scale=scale_of(task))
        answers = task.answers(output)
        if self.first:
            self.tally.index_add_(0, batch.index, torch.ones_like(batch.index))
        self._add_metrics(answers, target, measures, pixels=pixels)
        self._add_cases(batch, answers, target, mesh)
        if labels_of(task) == "noise":
            self.pieces += pictures_of(batch, answers, target, **SAMPLED) if self.counts else []
        elif labels_of(task) == "image" and self.counts:
            self.pieces += pictures_of(batch, answers, target)
        elif pixels and self.counts:
            shown = (painted(answers), painted(target)) if labels_of(task) == "layers" else (answers, target)
            of_batch = thumbnails_of if batch.image.ndim == 4 else volume_thumbnails_of
            self.pieces += of_batch(batch, *shown, ignore=getattr(task, "ignore_index", -1))
        elif self.counts and labels_of(task) != "views":
            loss = task.loss_each(output, target)
            mistakes = mistakes_of(batch.index, target, answers, loss, labels=labels_of(task), worst=worst)
            self.mistakes = heapq.nlargest(worst, self.mistakes + mistakes, key=by_loss)
            self._picture(batch)
        self.channels = batch.shape[0]

    def _add_found(self, batch: Batch, output: Any, target: Tensor, task: Task, worst: int) -> None:
        """Add what is found in whole images, which metrics gather: their states are lists."""
        self.channels = batch.shape[0]
        found = task.found(output, sizes_in(target))  # type: ignore[attr-defined]
        if self.first:
            self.tally.index_add_(0, batch.index, torch.ones_like(batch.index))
            self.metrics.update(batch.index, found, target)
        if self.counts:
            mistakes = mistakes_of_boxes(batch.index, target, found, task.loss_each(output, target))
            self.mistakes = heapq.nlargest(worst, self.mistakes + mistakes, key=by_loss)
            self._picture(batch, longest_px=LONGEST_PX)

    def _add_metrics(self, answers: Tensor, target: Tensor, measures: Tensor | None, *, pixels: bool) -> None:
        """measures: see Task; of whole images, the same on every rank of the copy.  pixels: whether each counts its tile."""
        if measures is not None and self.first:
            for metric in self.metrics.values():
                metric.add(measures)
        if self.first or (pixels and self.counts):
            if measures is None:
                self.metrics.update(answers, target)
            for _, metric in self.extra_metrics:
                metric.update(answers, target)

    def _add_loss(self, output: Tensor, target: Tensor, task: Task) -> None:
        """Add the loss of whole images, which every rank of the copy has."""
        if getattr(task, "finish", None) is None:
            loss, count = task.loss_sum(output, target), task.count(target)
            if self.first:
                self.losses += torch.stack([torch.as_tensor(one, device=self.losses.device).double() for one in (loss, count)])
            return
        sums = whole(task.sums(output, target)).double()  # type: ignore[attr-defined]
        if self.first:
            self.sums = sums if self.sums is None else self.sums + sums

    def _add_cases(self, batch: Batch, answers: Tensor, target: Tensor, mesh: Mesh) -> None:
        for metric in self.cases:
            if metric.wants_whole:
                images = [whole(on_tiles(one, batch, mesh)) for one in (answers, target)]
                if self.first:
                    metric.update(batch.index, *images)
            elif self.counts:
                metric.update(batch.index, answers, target)

    def _picture(self, batch: Batch, *, longest_px: int = SMALL_PX) -> None:
        """Make thumbnails of this batch's images among `mistakes`, and drop those of images no longer among them."""
        pictures, rows = {}, {int(index): row for row, index in enumerate(batch.index)}
        for index in (mistake.index for mistake in self.mistakes):
            piece = small_thumbnail_of(batch, rows[index], longest_px=longest_px) if index in rows else self.pictures.get(index)
            pictures |= {} if piece is None else {index: piece}
        self.pictures = pictures


def _total(task: Task, seen: _Counts, mesh: Mesh, worst: int, seconds: float, classes: list[str]) -> Evaluation:
    """Sum everything over ranks."""
    for metric in seen.metrics.values():
        _add_up(metric, mesh, lists=labels_of(task) in ("boxes", "views"))
    gathered_metrics = _gathered_metrics(task, seen.metrics)
    loss = _loss_of(task, seen, mesh)
    tally = mesh.sum_(seen.tally.to(mesh.device)).cpu()
    gathered = mesh.gather_objects((seen.mistakes if seen.first else [], seen.skipped, seen.pieces, seen.channels))
    mistakes = heapq.nlargest(worst, [one for some, *_ in gathered for one in some], key=by_loss)
    shown = [seen.pictures[one.index] for one in mistakes if one.index in seen.pictures]
    values = dict(seen.metrics.compute())
    if "confusion" in values:
        values["confusion"] = torch.atleast_2d(values["confusion"])  # of one class it is a number
    columns, confusion = columns_of_task(values), values.pop("confusion").tolist() if "confusion" in values else None
    images, of, skipped = int((tally > 0).sum()), len(tally), [name for _, names, *_ in gathered for name in names]
    duplicates, factor = int(tally.sum()) - images, 100 if getattr(task, "percent", True) else 1
    numbers = {name: factor * float(value) for name, value in values.items() if value.numel() == 1}
    extra, further = _extra_metrics(seen, mesh, classes=len(classes))
    return Evaluation(
        metrics=numbers | extra,
        confusion=confusion,
        loss=loss,
        images=images,
        of=of,
        duplicates=duplicates,
        skipped=skipped,
        sentence=_sentence(task.sentence(numbers), extra, images, of, duplicates, skipped),
        seconds=seconds,
        mistakes=mistakes,
        unit="pixels" if is_per_pixel(task) else "images",
        pieces=join_thumbnails([piece for *_, pieces, _ in gathered for piece in pieces]),
        pictures=join_thumbnails([piece for pieces in mesh.gather_objects(shown) for piece in pieces]),
        channels=max(channels for *_, channels in gathered),
        labels=labels_of(task),
        classes=classes,
        columns=columns | further,
        curves=curves_of_task(values),
        gathered=gathered_metrics + [metric.name for metric, _ in seen.extra_metrics if metric.gathers],
    )


def _gathered_metrics(task: Task, metrics: MetricCollection) -> list[str]:
    """Those of the task for which ranks gather the answers of all samples; of views there are sums in the lists."""
    gathers = labels_of(task) != "views"
    return [name for name, metric in metrics.items() if gathers and dim_zero_cat in metric._reductions.values()]


def _loss_of(task: Task, seen: _Counts, mesh: Mesh) -> float:
    """The loss of the whole split."""
    finish = getattr(task, "finish", None)
    losses = mesh.sum_(seen.losses)
    if finish is None:
        return float(losses[0] / losses[1])
    parts = [sums for sums in mesh.gather_objects(None if seen.sums is None else seen.sums.cpu()) if sums is not None]
    return float(finish(torch.stack(parts).sum(0))) if parts else float("nan")


def _sentence(text: str, extra: dict[str, float], images: int, of: int, duplicates: int, skipped: list[str]) -> str:
    extra_in_words = "".join(f", {name} {value:.4g}" for name, value in extra.items())
    skipped_in_words = f", {len(skipped)} unreadable left out" if skipped else ""
    duplicates_in_words = f", {count_of(duplicates, 'duplicate')}" if duplicates else ""
    return f"{text}{extra_in_words} on {images:,}/{of:,} images{duplicates_in_words}{skipped_in_words}"


def _add_up(metric: torch.nn.Module, mesh: Mesh, *, lists: bool) -> None:
    """Sum the states of a torchmetrics metric over ranks, or with `lists` gather those that are lists.

    NotImplementedError: a state that is neither.
    """
    for name, reduce in metric._reductions.items():
        state = getattr(metric, name)
        gathers = lists and reduce is dim_zero_cat and isinstance(state, list)
        if not gathers and (reduce is not dim_zero_sum or not isinstance(state, Tensor)):
            raise NotImplementedError(
                f"the state '{name}' of {type(metric).__name__} does not add up over ranks (its reduction is {reduce}); "
                "use a metric whose states are sums"
            )
    merge_states(metric, mesh)


def _extra_metrics(seen: _Counts, mesh: Mesh, *, classes: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The values of the metrics that the recipe adds, and those of each class, over all ranks.

    tasks/_metrics.py checks that their states add up.
    """
    found: dict[str, float] = {}
    columns: dict[str, list[float]] = {}
    for metric, states in seen.extra_metrics:
        merge_states(states, mesh)
        value = states.compute()
        value = value if metric.factor == 1 else metric.factor * value
        found |= numbers_of(metric, value, classes=classes)
        columns |= columns_of(metric, value, classes=classes)
    for cases in seen.cases:
        cases.table = mesh.sum_(cases.table.to(mesh.device)).cpu()
        of_classes = cases.columns()
        columns |= {name: values.tolist() for name, values in of_classes.items()} if cases.of_classes else {}
        found |= {name: float(values.nanmean()) for name, values in of_classes.items() if values.is_floating_point()}
    return found, columns
