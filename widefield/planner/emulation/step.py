"""Runs a training step of one rank without data, and returns what it did."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from widefield import sharded_state
from widefield.comm.mesh import Mesh
from widefield.comm.planned_groups import planned_world
from widefield.config import RunConfig
from widefield.data.batch import Batch
from widefield.data.order import Steps, TrainSampler
from widefield.geometry.box import enlarged, slices
from widefield.planner.emulation.gpu_autocast import GpuAutocast
from widefield.planner.emulation.recording import Recording
from widefield.planner.emulation.stand_in import StandIn
from widefield.planner.emulation.values import SMALL, Emulation, emulated
from widefield.planner.emulation.world import EmulatedMesh, emulated_mesh
from widefield.planner.step_record import StepRecord
from widefield.plans import check, plan_of
from widefield.plans.replicas import check_steps_together
from widefield.private_torch.dispatcher import TorchDispatchMode
from widefield.tasks import views_of
from widefield.tiled.replicated_ops import is_in_place
from widefield.training.agreed import dummy_batch_of
from widefield.training.assemble import Parts, assemble, learner_of
from widefield.training.batch_sharding import window_of
from widefield.training.given import NOTHING, Given
from widefield.training.loop import Learner
from widefield.training.state import load_random_state, random_state

WARM_STEPS = 1
"""Steps before the recorded one: the first makes the optimizer's states, buckets and captures."""


def emulated_step(config: RunConfig, *, ranks: int, rank: int = 0, given: Given = NOTHING, on_cpu: bool = True) -> StepRecord:
    """What rank `rank` of `ranks` does in a training step of a config, once the optimizer's states exist.

    given: objects in place of the config's, see `stand_in_data`.  torch's, NumPy's and Python's generators stay as they are.
    on_cpu: count what the CPU's kernels hold for themselves, for which small ones are run, and cast as its autocast does.
        False: the step of a GPU, whose kernels hold other memory and whose autocast has more in float32.
    ValueError, NotImplementedError: the plan cannot run, in the words of the strategy that refuses it.
    CannotEmulate: the step depends on numbers that only data has.
    RuntimeError: torch.distributed is initialized in this process.
    """
    plan = plan_of(config, ranks)
    check(plan, ranks=ranks, samples_per_step=config.data.batch)
    check_steps_together(plan, "planned are steps that all ranks make together")
    recording = Recording(rank, ranks, kernels=on_cpu)
    autocast = nullcontext() if on_cpu else GpuAutocast()
    with _generators_kept(), _older_objects_left_out(), planned_world(recording), autocast:
        if config.model.compile:
            recording.assumed["model.compile=true is planned as false: what a compiler fuses is not known"] = None
            config = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
        mesh = emulated_mesh(plan, rank=rank, ranks=ranks)
        with _LargeWeightsAreZero():
            parts = assemble(config, mesh, given=given, initial_weights=False)
        dummy_batch, rows = _dummy_batch(parts, mesh), _rows(parts)
        with emulated(recording, of_gpu=not on_cpu) as emulation:
            emulation.model_of(parts.model)
            learner, _ = learner_of(parts, dummy_batch=emulation.batch_of(dummy_batch, 1, samples=0))
            return _recorded(learner, mesh, rows, emulation, samples=config.data.batch)


def _recorded(learner: Learner, mesh: EmulatedMesh, rows: list[int], emulation: Emulation, *, samples: int) -> StepRecord:
    recording = emulation.recording
    mesh.counts.append(float(samples * learner.losses_per_image(learner.dummy_batch)))
    batches = [emulation.batch_of(learner.dummy_batch, count, samples=count) for count in rows]
    for step in range(WARM_STEPS + 1):
        if step == WARM_STEPS:
            gc.collect()  # the first step leaves cycles, as of other stages' weights, which a run collects at some time
            recording.begin(learner.model)
        learner.learn(batches, stop=False)
    states = [state for states in learner.optimizer.state.values() for state in states.values()]
    return recording.finish(
        {
            "inputs": [tensor for batch in batches for tensor in (batch.image, batch.target)],
            "optimizer": [sharded_state.local(state) for state in states if isinstance(state, torch.Tensor)],
            "buffers": list(learner.model.buffers()),
            "gradients": [sharded_state.local(p.grad) for p in learner.model.parameters() if p.grad is not None],
            "weights": [sharded_state.local(parameter) for parameter in learner.model.parameters()],
        },
        samples=samples,
    )


def _rows(parts: Parts) -> list[int]:
    """The samples of this rank in each pass of a full step, even where the data has fewer samples than the batch."""
    config, mesh = parts.config, parts.mesh
    sampler = TrainSampler(
        Steps(2 * config.data.batch, config.data.batch),
        seed=0, first=0, last=1, rank=mesh.copy, ranks=mesh.copies, passes=config.gradient.accumulate,
        multiple=config.data.cut_multiple,
    )  # fmt: skip
    return [len(keys) if keys and keys[0].real else 0 for keys in islice(iter(sampler), config.gradient.accumulate)]


def _dummy_batch(parts: Parts, mesh: Mesh) -> Batch:
    """A batch of this rank's window of one image; of a stand-in that takes no memory."""
    images = parts.dataset.train
    if not isinstance(images, StandIn):
        return dummy_batch_of(parts.reader(train=True), mesh)
    channels, *pixels = images.shape
    images = replace(images, shape=(views_of(parts.task) * channels, *pixels))
    batch, window = images.batch(), window_of(mesh)
    if window is None:
        return batch
    own = window(images.shape[1:])
    cut = (..., *slices(own))
    target = batch.target[..., *slices(enlarged(own, images.scale))] if images.has_labels_of_pixels else batch.target
    return replace(batch, image=batch.image[cut], target=target, whole_shape=images.shape, window=own)


class _LargeWeightsAreZero(TorchDispatchMode):
    """Inside, large tensors that are drawn at random become zeros, in a tenth of the time: nobody reads an emulated model's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and is_in_place(func) and args[0].numel() > SMALL:
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


@contextmanager
def _generators_kept() -> Iterator[None]:
    before = random_state()
    try:
        yield
    finally:
        load_random_state(before)


@contextmanager
def _older_objects_left_out() -> Iterator[None]:
    """Inside, the garbage collector leaves out the objects that there are; with torch's it takes 0.2 s each time."""
    if gc.get_freeze_count():  # by the caller, who shall find it so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
