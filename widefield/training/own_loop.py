"""What a training loop of one's own needs besides `build_mesh` and `parallelize`: checkpoints, and each rank's samples.

    batches = wf.sampler(train_set, mesh, batch_size=32, seed=0)
    for step, (images, labels) in enumerate(DataLoader(train_set, batch_sampler=batches)):
        loss = F.cross_entropy(model(images), labels, reduction="sum") * batches.scale(step)

Every rank calls every function here, in the same order.  exact_evaluation.py has the evaluation.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from widefield import sharded_state
from widefield.comm.mesh import Mesh, World, current_world, join
from widefield.data.order import Steps, order_of
from widefield.geometry import even_cut, parts_of
from widefield.plans import Plan, to_text
from widefield.training.checkpoint import About, Checkpoints
from widefield.training.state import load_optimizer_state, load_random_state, optimizer_state, random_state, shapes_of

# ---------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Loaded:
    """What `load` found.  step, extra: as they were saved.  folder: of the checkpoint.

    random: whether the random generators go on where they were, as they do on the same number of ranks.
    """

    step: int
    extra: dict[str, Any]
    folder: Path
    random: bool


def save(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    mesh: Mesh | None = None,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write a checkpoint into the folder `path`; returns its own folder in there, as `path/step_00000120`.

    It has hashes, full tensors whatever the plan, and its name only when it is whole, so that a crash costs no older one.
    model, optimizer: parallelized or not.  The optimizer's hyperparameters, as lr, are not saved: they are the program's.
    step: how many steps are done; a checkpoint of the same step is replaced.
    extra: nested dicts and lists of numbers, texts and tensors, the same on all ranks, as `{"schedule": s.state_dict()}`.
    keep_last: how many checkpoints stay in the folder; None: all.
    ValueError, on every rank: something in `extra` is of another type, or the disk refused it; older checkpoints stay.
    """
    mesh = mesh_or_alone(mesh)
    state = {
        "model": dict(model.state_dict()),
        "optimizer": {} if optimizer is None else optimizer_state(model, optimizer),
        "extra": dict(extra or {}),
        "progress": {"step": step},
    }
    checkpoints = _checkpoints(path, mesh, keep_last=10**9 if keep_last is None else keep_last)
    about = About(
        step=step, epoch=0, samples=0, metric=None, higher_is_better=True, ranks=mesh.size, plan=to_text(mesh.plan),
        model=shapes_of(model), versions={"torch": torch.__version__, "python": platform.python_version()},
    )  # fmt: skip
    checkpoints.save(sharded_state.gather_full(model, mesh, state), about, own={"random": random_state()}, wait=True)
    mesh.agree(checkpoints.failure)
    return Path(path) / f"step_{step:08d}"


def load(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    mesh: Mesh | None = None,
    random: bool = True,
) -> Loaded | None:
    """Load the newest undamaged checkpoint in the folder `path`; None where there is none, and nothing is changed.

    It may have been written under any plan, by `save` or by a run (`runs/one/checkpoints`).  Load after `parallelize`, and
    after the optimizer is made.
    random: also set the random generators, if this number of ranks saved.
    ValueError, on every rank: the checkpoint is of another model or another optimizer, or has none for `optimizer`.
    """
    mesh = mesh_or_alone(mesh)
    checkpoints = _checkpoints(path, mesh, keep_last=10**9)
    found = checkpoints.newest_sound()
    if found is None:
        return None
    state, own = checkpoints.load(found, model=shapes_of(model))
    mesh.together(lambda: _put(state, model, optimizer, found.folder))
    if random and own is not None:
        load_random_state(own["random"])
    return Loaded(state["progress"]["step"], state.get("extra", {}), found.folder, random and own is not None)


def _put(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    if optimizer is not None:
        if not state["optimizer"]:
            raise ValueError(f"the checkpoint {folder} has no optimizer, since none was saved; load it without optimizer=")
        load_optimizer_state(model, optimizer, state["optimizer"])
    model.load_state_dict(sharded_state.parts(model, state["model"]))


def _checkpoints(path: str | Path, mesh: Mesh, *, keep_last: int) -> Checkpoints:
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; 1 or more is wanted, or None to keep all")
    return Checkpoints(
        Path(path), mesh, keep_last=keep_last, keep_best=0, background=False, warn=lambda text: print(text, flush=True)
    )


def mesh_or_alone(mesh: Mesh | None) -> Mesh:
    """The mesh, or one of this process alone.  ValueError: there are other ranks."""
    world = current_world()
    if mesh is None and world is not None and world.size > 1:
        raise ValueError(f"this is one of {world.size} ranks; pass the mesh that they train on, as mesh=mesh")
    return join(World(), Plan()) if mesh is None else mesh


# ---------------------------------------------------------------------------------------------- samples


class ExactSampler(Sampler[list[int]]):
    """The batches of this rank, see `sampler`."""

    def __init__(self, samples: int, mesh: Mesh, *, batch_size: int, seed: int, shuffle: bool, drop_last: bool) -> None:
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        rest = samples % batch_size
        self.steps = Steps(samples - rest if drop_last else samples, batch_size)
        self.samples, self.epoch, self.start = samples, 0, 0
        self._copy, self._copies = mesh.copy, mesh.copies
        least = min(batch_size, rest if rest and not drop_last else batch_size)
        if least < mesh.copies or not self.steps.samples:
            raise ValueError(
                f"{samples:,} samples in batches of {batch_size} leave {least} in the last one, for {mesh.copies} copies of "
                "the model; choose a batch_size whose rest is no smaller, or drop_last=True, which leaves the rest out"
            )

    def __len__(self) -> int:
        return self.steps.per_epoch - self.start

    def __iter__(self) -> Iterator[list[int]]:
        order = order_of(self.seed, self.epoch, self.samples).tolist() if self.shuffle else list(range(self.samples))
        for step in range(self.start, self.steps.per_epoch):
            batch = self.steps.positions(step)
            mine = parts_of(even_cut(len(batch), self._copies))[self._copy]
            yield order[batch.start + mine.start : batch.start + mine.stop]

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Take the order of `epoch`, from its batch `start` on, as when a run is resumed."""
        self.epoch, self.start = epoch, start

    def scale(self, step: int) -> float:
        """copies / samples of batch `step` of the epoch over all copies.

        A loss that is summed over this rank's samples, times this, has after the averaging of `parallelize` the gradient of the
        mean over the whole batch, with unequal shares too.
        """
        return self._copies / len(self.steps.positions(step))


def sampler(
    dataset: Any, mesh: Mesh | None = None, *, batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False
) -> ExactSampler:
    """This rank's samples, for `DataLoader(dataset, batch_sampler=...)`: every sample of an epoch once over all ranks.

    dataset: with a length.  batch_size: of all copies together.  The order depends on `seed` and the epoch alone
    (`set_epoch`), so a batch has the same samples on any number of ranks.
    Uneven ends: the last batch of an epoch has the rest, and every batch is cut evenly, so that copies may have one sample
    more or less than others.  None is repeated and none is padded.  So divide by the samples of all copies, which is what
    `scale(step)` does.  Ranks that share the tiles, channels or stages of a copy get the same samples.
    ValueError: a batch would leave a copy without a sample.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; 1 or more is wanted")
    return ExactSampler(
        len(dataset), mesh_or_alone(mesh), batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last
    )
