"""Builds dataset, model, learner and loaders from a config and a mesh.

Every value that the program chooses is returned with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Sampler

from widefield.comm.mesh import Mesh
from widefield.config import RunConfig
from widefield.cores import usable_cores
from widefield.data import Dataset, open_dataset, spacing_of
from widefield.data.batch import Batch, Window
from widefield.data.device import Preparation
from widefield.data.loader import SampleReader, augments_on_device, load_batches, reader_of
from widefield.data.order import EvaluateSampler, Key, Steps, TrainSampler
from widefield.data.statistics import SplitStatistics
from widefield.data.transforms import Transforms
from widefield.fallback import in_words
from widefield.parallel.members import members_of
from widefield.parallel.parallelize import (
    check_same_model,
    evaluates_together,
    parallelize,
    parallelize_average,
    parallelize_members,
    share_states,
)
from widefield.parallel.parallelize import reasons as parallel_reasons
from widefield.parallel.strategies import TrialStep
from widefield.parallel.strategies.data import broadcast_weights
from widefield.tasks import Task, channels_of_output, noise_of, views_of
from widefield.tasks._metrics import RecipeMetric, metrics_of
from widefield.training.agreed import Agreed, dummy_batch_of
from widefield.training.arithmetic import Arithmetic, arithmetic_of, check_scaling, choose_format, choose_precision
from widefield.training.balance import check_sampling, check_stages, sample_weights_of, task_of
from widefield.training.batch_sharding import cuts_in_words, window_of
from widefield.training.best import best_of
from widefield.training.built_model import built_model
from widefield.training.data_checks import check_data, why_scaled
from widefield.training.evaluate import Evaluation, evaluate
from widefield.training.example_pass import gathered_maps, meta_pass, trial_step
from widefield.training.freezing import freeze
from widefield.training.given import NOTHING, Given
from widefield.training.intensity import Scaled, with_intensity
from widefield.training.loop import Learner
from widefield.training.optimizer import build_optimizer, learning_rate
from widefield.training.parameter_groups import layers_of
from widefield.training.patches import Tissue, sampled, tissue_to_tree
from widefield.training.replica_kinds import check_replicas, replicas_of
from widefield.training.replicas import Replicas
from widefield.training.run_folder import write_model, write_statistics, write_tissue
from widefield.training.schedule import build_schedule
from widefield.training.second_stage import check_second_stage, stages_named
from widefield.training.state import only_deterministic_algorithms, seed_everything
from widefield.training.streaming import check_tiles, look_ahead
from widefield.training.turns import check_turns, divide, members_named
from widefield.training.weight_average import average_of


@dataclass(frozen=True)
class Parts:
    """What training, evaluation and prediction share: the data, the model before `parallelize`, and its precision."""

    config: RunConfig
    mesh: Mesh
    dataset: Dataset
    model: nn.Module
    task: Task
    arithmetic: Arithmetic
    workers: int
    channels_last: bool
    reasons: list[str] = field(default_factory=list)
    window: Callable[[tuple[int, ...]], Window] | None = None
    """From the size of an image, (H, W) or (D, H, W), the window that this rank reads; None: the whole image."""
    metrics: list[RecipeMetric] = field(default_factory=list)
    """The metrics that the recipe adds to the task's."""
    given: Given = NOTHING
    statistics: SplitStatistics | None = None
    """Of the images to train on, where the intensity needs them."""
    tissue: dict[str, Tissue] | None = None
    """Of every slide, by its name, where the recipe asks for it."""

    @property
    def outputs(self) -> int:
        """How many channels the model's output has."""
        return channels_of_output(self.task, classes=len(self.dataset.classes), channels=self.dataset.channels)

    def preparation(self, *, train: bool) -> Preparation:
        """The function that moves batches to the device and normalizes them; in training on a GPU it also augments."""
        data, cut = self.config.data, self.window is not None
        on_device = train and augments_on_device(
            data.augment, self._augments_at, cut=cut, moves_as_one=self.dataset.moves_as_one
        )
        return Preparation(
            device=self.mesh.device,
            dtype=self.arithmetic.dtype,
            mean=data.mean or self.dataset.mean,
            std=data.std or self.dataset.std,
            num_classes=len(self.dataset.classes),
            channels_last=self.channels_last,
            augment=Transforms(data.augment if on_device else [], field="data.augment"),
            labels=self.dataset.labels,
            pixel_dtype=self.dataset.dtype,
            intensity=self.dataset.intensity,
            dims=self.dataset.dims,
            views=views_of(self.task),
            noise=noise_of(self.task, dims=self.dataset.dims),
        )

    @property
    def _augments_at(self) -> torch.device:
        """Views of an image, which have transforms of their own, are made where it is read."""
        return self.mesh.device if views_of(self.task) == 1 else torch.device("cpu")

    def reader(self, *, train: bool) -> SampleReader:
        """The reader of a split; of views, with the transforms of training in an evaluation too, without which none differ."""
        views = views_of(self.task)
        reader = reader_of(
            self.config.data,
            self.dataset.train if train else self.dataset.evaluate,
            num_classes=len(self.dataset.classes),
            seed=self.config.seed,
            train=train or views > 1,
            device=self._augments_at,
            window=self.window,
            ignore=getattr(self.task, "ignore_index", None),
            intensity=self.dataset.intensity,
            pixels=self.dataset.pixels,
            moves_as_one=self.dataset.moves_as_one,
            dims=self.dataset.dims,
            image_scale=self.dataset.image_scale,
            boxes=self.dataset.labels == "boxes",
        )
        return replace(reader, views=views)

    def evaluation_batches(self, *, together: bool = False) -> Iterator[Batch]:
        """This copy's part of the evaluation split.

        together: equally many batches on every copy, with dummy batches at the end, for a model whose passes are collective.
        """
        batch = self.config.data.evaluate_batch_size or self.config.data.batch
        samples = len(self.dataset.evaluate)
        sampler = EvaluateSampler(samples, batch=batch, rank=self.mesh.copy, ranks=self.mesh.copies, even=together)
        reader = self.reader(train=False)
        shared = together and self.mesh.copy_group is not None  # else a batch without a readable image is left out
        return self.agreed(reader, sampler, dummy_batch=dummy_batch_of(reader, self.mesh) if shared else None)

    def agreed(self, reader: SampleReader, sampler: Sampler[list[Key]], *, dummy_batch: Batch | None) -> Iterator[Batch]:
        """The sampler's batches, with the images that all ranks of this copy could read; see `Agreed`."""
        batches = iter(load_batches(reader, sampler, workers=self.workers, device=self.mesh.device))
        return Agreed(batches, self.mesh, dummy_batch=dummy_batch, name_of=reader.images.name_of)


def assemble(
    config: RunConfig,
    mesh: Mesh,
    dataset: Dataset | None = None,
    *,
    given: Given = NOTHING,
    initial_weights: bool = True,
    stored: Dataset | None = None,
) -> Parts:
    """Open the data and build the model, the same on every rank, except for the objects in `given`.

    dataset: used in place of the config's.  initial_weights: load the weights that the config starts from.
    stored: what the run has of its dataset, see `with_intensity`.
    ValueError: what the config names, or `given`, does not exist or fit.
    """
    precision, why_precision = choose_precision(config.precision, mesh.device)
    arithmetic = arithmetic_of(precision, mesh.device)
    scaled = _opened(config, mesh, given, stored) if dataset is None else Scaled(dataset)
    task, why_balanced = task_of(config, given, scaled.dataset, mesh)  # class weights are of whole images
    drawn = sampled(config, scaled.dataset, mesh, ignore=getattr(task, "ignore_index", None), trains=initial_weights)
    dataset = drawn.dataset
    slower = check_data(config, dataset, task, given, cut=bool(mesh.grid.sizes))
    metrics = _metrics(config, task, dataset, cut=bool(mesh.grid.sizes))
    workers, why_workers = _choose_workers(config, dataset, mesh)
    channels_last, why_format = choose_format(config.model.channels_last, arithmetic, dims=dataset.dims)
    if config.deterministic:
        only_deterministic_algorithms()
    seed_everything(config.seed)
    model, why_weights = built_model(
        config, mesh, given, arithmetic, dataset, channels_last=channels_last, initial=initial_weights, task=task
    )
    scaling = (*scaled.reasons, why_scaled(config, dataset))
    of_data = (dataset.about, *drawn.reasons)
    found = (*of_data, why_precision, why_workers, *scaling, why_format, why_balanced, *why_weights, *slower)
    reasons = [reason for reason in found if reason is not None]
    window = window_of(mesh)
    return Parts(
        config, mesh, dataset, model, task, arithmetic, workers, channels_last, reasons, window, metrics, given,
        scaled.statistics, drawn.tissue,
    )  # fmt: skip


def _metrics(config: RunConfig, task: Task, dataset: Dataset, *, cut: bool) -> list[RecipeMetric]:
    spacing = partial(spacing_of, dataset.evaluate) if dataset.dims == 3 else None
    classes = channels_of_output(task, classes=len(dataset.classes), channels=dataset.channels)
    return metrics_of(config.task, task, num_classes=classes, cut=cut, spacing_of=spacing)


def _opened(config: RunConfig, mesh: Mesh, given: Given, stored: Dataset | None) -> Scaled:
    """The dataset, with its intensity."""

    def opened() -> Dataset:
        return open_dataset(config.data) if given.data is None else given.data()

    # statistics take messages, so that all ranks have to be here
    dataset = mesh.together(opened) if config.data.intensity.needs_statistics else opened()
    return with_intensity(config.data, dataset, mesh, stored=stored)


def rebuilt(parts: Parts, mesh: Mesh, *, batch: int) -> Parts:
    """The same parts with another data.batch_size, with a new model as `assemble` makes it, on a mesh of the same plan."""
    data = parts.config.data.model_copy(update={"batch_size": batch})
    config = parts.config.model_copy(update={"data": data})
    seed_everything(config.seed)
    model, _ = built_model(
        config, mesh, parts.given, parts.arithmetic, parts.dataset, channels_last=parts.channels_last, initial=True,
        task=parts.task,
    )  # fmt: skip
    return replace(parts, config=config, mesh=mesh, model=model, window=window_of(mesh))


def learner_of(parts: Parts, *, dummy_batch: Batch | None = None) -> tuple[Learner, list[str]]:
    """A learner at step 0, parallelized over the mesh, and the reasons of what was chosen.  Every rank calls it.

    dummy_batch: of one image of the training split; None reads one.
    """
    config, mesh, model = parts.config, parts.mesh, parts.model
    steps = Steps(len(parts.dataset.train), config.data.batch)
    lr, why_lr = learning_rate(config.optimizer, config.data.batch)
    _check(parts)
    freezing, why_frozen = freeze(model, config.model, mesh.plan)
    learner = Learner(
        config=config,
        mesh=mesh,
        task=parts.task,
        model=model,
        optimizer=build_optimizer(config.optimizer, model, lr),
        freezing=freezing,
        schedule=build_schedule(config.schedule, seen=steps.seen, steps_per_epoch=steps.per_epoch),
        lr=lr,
        arithmetic=parts.arithmetic,
        scaler=parts.arithmetic.scaler(),
        prepare=parts.preparation(train=True),
        steps=steps,
        dummy_batch=dummy_batch or dummy_batch_of(parts.reader(train=True), mesh),
        best=best_of(config.checkpoint.best, parts.task, parts.metrics, num_classes=parts.outputs),
        ema=None if config.ema is None else average_of(model, config.ema.decay),
        scalers={member: parts.arithmetic.scaler() for member in members_named(parts.task)},
        replicas=_replicas(parts),
    )
    if config.model.compile:
        model.compile()
    check_tiles(mesh.plan.stream, learner.dummy_batch)
    _parallelize(learner, layers_of(model) if config.optimizer.layer_decay is not None else None)
    why_stream = look_ahead(learner)
    seed_everything(learner.seed_of_rank)
    reasons = [*([why_lr] if why_lr else []), *why_frozen, *_cuts_of(learner.dummy_batch, mesh)]
    gathered = in_words(gathered_maps(learner))
    why_apart = [] if learner.replicas is None else learner.replicas.reasons
    return learner, [*reasons, *parallel_reasons(learner.model), *why_apart, *why_stream, *gathered]


def _check(parts: Parts) -> None:
    """ValueError, NotImplementedError: what the task, the data or the precision cannot have under this plan."""
    config, mesh = parts.config, parts.mesh
    check_scaling(parts.arithmetic, mesh.plan)
    check_stages(parts.task, config, mesh)
    check_turns(config, parts.task, mesh.plan)
    check_second_stage(config, parts.task, mesh.plan)
    check_sampling(config, parts.dataset, labels=parts.dataset.labels)


def _replicas(parts: Parts) -> Replicas | None:
    """This rank's replica, where the plan has some.  ValueError: the recipe asks for what replicas cannot have."""
    if not parts.mesh.plan.has_replicas:
        return None
    check_replicas(parts.config, scales=parts.arithmetic.scaler().is_enabled())
    return replicas_of(parts.mesh)


def _parallelize(learner: Learner, layers: dict[str, int] | None) -> None:
    """Parallelize the model and its average, and build the optimizer again, since parameters may be new objects."""
    config, mesh = learner.config, learner.replica
    if learner.replicas is not None:
        check_same_model(learner.model, learner.mesh)
        broadcast_weights(learner.model, learner.mesh)
    if members_named(learner.task) or stages_named(learner.task):
        _parallelize_members(learner)
    else:
        sample, _ = meta_pass(learner)
        share = 2 / len(sample)
        if learner.ema is not None:
            average = learner.ema.module
            parallelize_average(
                average, mesh, trial_step=TrialStep(partial(trial_step, learner, average), share), sample=sample
            )
        learner.model = parallelize(
            learner.model, mesh, trial_step=TrialStep(partial(trial_step, learner), share), sample=sample
        )
    optimizer = build_optimizer(config.optimizer, learner.model, learner.lr, mesh, layers=layers)
    learner.optimizer = share_states(optimizer, mesh)
    if learner.replicas is not None:
        learner.replicas.begin(learner.model, learner.optimizer)


def _parallelize_members(learner: Learner) -> None:
    """Each of the modules that learn by turns, or of the stages of a model, and each of their averages."""
    mesh, image, target, learn_together = learner.replica, *meta_pass(learner), bool(stages_named(learner.task))
    models = [(learner.model, False)] if learner.ema is None else [(learner.ema.module, True), (learner.model, False)]
    for model, is_average in models:
        names = list(members_of(divide(model, learner.task, name=learner.config.model.name)))
        turns = {one: "" if learn_together else one for one in names}
        steps = {one: TrialStep(partial(trial_step, learner, model, member=turns[one]), 2 / len(image)) for one in names}
        example = (lambda *_: (image,)) if learn_together else learner.task.example  # type: ignore[attr-defined]
        samples = {one: example(one, image, target) for one in names}
        parallelize_members(model, mesh, trial_steps=steps, samples=samples, is_average=is_average)


def _cuts_of(dummy_batch: Batch, mesh: Mesh) -> list[str]:
    return [] if dummy_batch.whole_shape is None else [cuts_in_words(dummy_batch.whole_shape[1:], mesh.grid.sizes)]


def training_batches(parts: Parts, *, first: int, last: int, dummy_batch: Batch | None = None) -> Iterator[Batch]:
    """The batches of this rank's copy, one per pass, of steps `first` to `last` - 1.  Every rank calls it.

    dummy_batch: the learner's; None reads one.
    """
    config, mesh = parts.config, parts.mesh
    sampler = TrainSampler(
        Steps(len(parts.dataset.train), config.data.batch),
        seed=config.seed,
        first=first,
        last=last,
        rank=mesh.copy,
        ranks=mesh.copies,
        passes=config.gradient.accumulate,
        multiple=config.data.cut_multiple,
        weights=sample_weights_of(config, parts.dataset, mesh, labels=parts.dataset.labels),
        blocks=getattr(parts.dataset.train, "blocks", None),
    )
    reader = parts.reader(train=True)
    return parts.agreed(reader, sampler, dummy_batch=dummy_batch or dummy_batch_of(reader, mesh))


def evaluate_parts(parts: Parts, model: nn.Module, *, batches: int | None = None) -> Evaluation:
    """Evaluate `model` on the evaluation split; every rank calls it.  batches: no more than the first so many of each rank."""
    together = evaluates_together(model)
    return evaluate(
        model,
        islice(parts.evaluation_batches(together=together), batches),
        task=parts.task,
        prepare=parts.preparation(train=False),
        arithmetic=parts.arithmetic,
        mesh=parts.mesh,
        samples=len(parts.dataset.evaluate),
        together=together,
        extra_metrics=parts.metrics,
        classes=parts.dataset.classes,
    )


def write_model_of(folder: Path, parts: Parts) -> None:
    """Write model.json: what is needed to use the model besides its weights."""
    prepare = parts.preparation(train=False)
    batch = parts.reader(train=False).__getitems__([Key(0, 0, 0, real=False)])
    if batch.problem is not None:
        raise ValueError(batch.problem)
    shape, name = [len(batch.image[0]) // views_of(parts.task), *batch.shape[1:]], parts.config.model.name
    write_model(folder, parts.dataset, shape=shape, mean=list(prepare.mean), std=list(prepare.std), name=name)
    if parts.statistics is not None:
        write_statistics(folder, parts.statistics)
    if parts.tissue is not None:
        write_tissue(folder, tissue_to_tree(parts.tissue))


def _choose_workers(config: RunConfig, dataset: Dataset, mesh: Mesh) -> tuple[int, str | None]:
    if config.data.workers is not None:
        return config.data.workers, None
    if dataset.in_memory:
        return 0, f"data.workers=0: {config.data.name} is in memory, so reading is a copy; set it if transforms take long"
    cores = usable_cores()
    workers = max(0, min(8, cores // mesh.world.local_size - 1))
    ranks = f"{mesh.world.local_size} {'rank' if mesh.world.local_size == 1 else 'ranks'}"
    return workers, f"data.workers={workers}: {cores} cores for {ranks}, one left to each rank, 8 at most"
