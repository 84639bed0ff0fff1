"""The states of torchmetrics objects, merged over ranks by messages of the mesh: exactly, whoever updated them how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from widefield.comm.mesh import Mesh

MERGED = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat")
"""The names of torchmetrics' reductions with which the states of ranks, some of them fresh, give those of one rank."""


def merge_states(metric: Any, mesh: Mesh) -> None:
    """Give the metric of every rank the states of all ranks, so that `compute` is that of one rank.  Every rank calls it.

    A metric that a rank did not update counts as updated, for torchmetrics would warn of it.
    """
    for name, reduce in metric._reductions.items():
        setattr(metric, name, _merged(getattr(metric, name), reduce, mesh))
    metric._to_sync = False  # else torchmetrics would merge them once more
    metric._update_count = max(1, metric._update_count)


def _merged(state: Any, reduce: Callable[[Any], Any], mesh: Mesh) -> Any:
    """The sum, the largest or smallest, or the states concatenated in rank order."""
    if reduce.__name__ == "dim_zero_sum":
        return mesh.sum_(state)
    if reduce.__name__ == "dim_zero_cat":
        parts = state if isinstance(state, list) else [state]
        gathered = mesh.gather_objects([part.cpu() for part in parts])
        return [part.to(mesh.device) for of_rank in gathered for part in of_rank]
    return reduce(torch.stack([one.to(mesh.device) for one in mesh.gather_objects(state.cpu())]))
