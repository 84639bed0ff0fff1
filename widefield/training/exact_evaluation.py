"""An evaluation for a loop of one's own: every sample of a map-style dataset once, on any number of ranks, with the tally."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from widefield.comm.mesh import Mesh
from widefield.geometry import even_cut, parts_of
from widefield.parallel.parallelize import evaluates_together
from widefield.tiled.api import tile, whole
from widefield.training.metric_states import MERGED, merge_states
from widefield.training.own_loop import mesh_or_alone


@dataclass(frozen=True)
class ExactEvaluation:
    """values: of each metric, the same on every rank.  tally: (N,) int64, how often each sample was evaluated."""

    values: dict[str, Any]
    tally: Tensor

    @property
    def images(self) -> int:
        """How many samples were evaluated."""
        return int((self.tally > 0).sum())

    @property
    def duplicates(self) -> int:
        """How many evaluations were repetitions: 0."""
        return int(self.tally.sum()) - self.images


def evaluate_exactly(
    model: nn.Module,
    dataset: Any,
    metrics: Mapping[str, Any],
    mesh: Mesh | None = None,
    *,
    batch_size: int = 64,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
) -> ExactEvaluation:
    """Evaluate every sample of a map-style dataset exactly once, on any number of ranks and under any plan.

    dataset: of pairs (image, target), collated as a DataLoader does, or by `collate`.  Where images are cut in space, every
        rank reads whole ones and runs its tile.
    metrics: by name a torchmetrics metric, which is reset and then updated with (output, target), or a function of both that
        returns a number per sample, (B,), of which the mean over all samples is taken.
    batch_size: samples per rank and pass.  The model runs in evaluation mode, without gradients; its mode is restored.
    ValueError: no samples or no metric; a metric with a state that is no sum, extremum or list; a function's result has
        another shape.
    """
    mesh = mesh_or_alone(mesh)
    mesh.together(lambda: _check(dataset, metrics))
    states = {
        name: _MeanOfSamples(metric, name) if not _has_states(metric) else metric.to(mesh.device)
        for name, metric in metrics.items()
    }
    tally, was_training = torch.zeros(len(dataset), dtype=torch.int64), model.training
    for state in states.values():
        state.reset()
    model.eval()
    try:
        with torch.no_grad():
            _run(model, dataset, states, tally, mesh, batch_size, {"num_workers": workers, "collate_fn": collate})
    finally:
        model.train(was_training)
    values = {name: _value(state, mesh) for name, state in states.items()}
    return ExactEvaluation(values, mesh.sum_(tally.to(mesh.device)).cpu())


def _check(dataset: Any, metrics: Mapping[str, Any]) -> None:
    """ValueError: there is nothing to evaluate.  NotImplementedError: a metric that cannot be merged over ranks."""
    if not len(dataset) or not metrics:
        raise ValueError(
            f"there are {len(dataset)} samples and {len(metrics)} metrics to evaluate; 1 or more of each is wanted"
        )
    for name, metric in metrics.items():
        for state, reduce in metric._reductions.items() if _has_states(metric) else ():
            if getattr(reduce, "__name__", "") not in MERGED:
                raise NotImplementedError(
                    f"the state '{state}' of the metric '{name}' ({type(metric).__name__}) is none that adds up over ranks; "
                    "use states with dist_reduce_fx='sum', 'max', 'min' or 'cat'"
                )


def _has_states(metric: Any) -> bool:
    """Whether it is a torchmetrics metric, without importing that, which takes seconds."""
    return hasattr(metric, "_reductions") and hasattr(metric, "update")


def _run(model: nn.Module, dataset: Any, states: dict, tally: Tensor, mesh: Mesh, batch_size: int, options: dict) -> None:
    """Update the states on the first rank of each copy with the copy's samples."""
    share = list(parts_of(even_cut(len(dataset), mesh.copies))[mesh.copy])
    batches = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
    longest = max(len(part) for part in parts_of(even_cut(len(dataset), mesh.copies)))
    dummies = -(-longest // batch_size) - len(batches) if evaluates_together(model) else 0
    loader = DataLoader(dataset, batch_sampler=[*batches, *[[0]] * dummies], **options)  # type: ignore[arg-type]
    for batch, (image, target) in zip([*batches, *[None] * dummies], loader, strict=True):
        image, target = image.to(mesh.device), target.to(mesh.device)
        output = whole(model(tile(image, mesh) if mesh.grid.sizes else image))
        if batch is None or not mesh.is_first_of_copy:
            continue
        tally[batch] += 1
        for state in states.values():
            state.update(output, target)


class _MeanOfSamples:
    """The mean over samples of what a function returns for each."""

    def __init__(self, of: Callable[[Any, Any], Tensor], name: str) -> None:
        self.of, self.name = of, name

    def reset(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)

    def update(self, output: Any, target: Any) -> None:
        values = self.of(output, target)
        if not isinstance(values, Tensor) or values.shape != (len(target),):
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"the metric '{self.name}' returns {found} for {len(target)} samples; a number of each is wanted, "
                f"({len(target)},), as of reduction='none'"
            )
        self.total += torch.tensor([float(values.double().sum()), len(target)], dtype=torch.float64)


def _value(state: Any, mesh: Mesh) -> Any:
    """A metric's value over all ranks; a float where it is one number."""
    if isinstance(state, _MeanOfSamples):
        total, count = mesh.sum_(state.total.to(mesh.device)).tolist()
        return total / count
    merge_states(state, mesh)
    value = state.compute()
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
