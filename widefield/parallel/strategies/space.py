"""Tiles in space: the ranks of a copy each hold one tile of every image.  See tiled/tensor.py."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from widefield.comm.mesh import Mesh
from widefield.parallel.strategies import Case, Phase
from widefield.plans import Plan

AXIS = "space"
PHASE = Phase.SPLIT
CHECK_ORDER = 70


def is_used(plan: Plan) -> bool:
    """Where mesh.space cuts images over ranks."""
    return bool(plan.space)


def check_plan(plan: Plan) -> None:
    """Refuses nothing: strategies that exclude tiles refuse them in their own files."""


def apply(
    model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None, sample: Tensor | None = None
) -> list[str]:
    """Returns the reason.  The model stays as it is: operations on a TiledTensor exchange what they need."""
    sizes = mesh.grid.sizes
    return [
        f"tiles in space: {mesh.grid.size} ranks share each image, {' x '.join(map(str, sizes))}, and have the same weights; "
        "they exchange the pixels that a layer reads beyond its tile"
    ]


CASES: list[Case] = []
