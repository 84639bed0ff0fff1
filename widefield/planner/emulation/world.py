"""The mesh of one rank of a plan, with process groups that send nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from widefield.comm.mesh import Mesh, World, join
from widefield.plans import Plan


@dataclass(frozen=True)
class EmulatedMesh(Mesh):
    """A mesh whose other ranks have the values that this one has."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def agree(self, problem: str | None) -> None:
        """ValueError: this rank has a problem."""
        if problem is not None:
            raise ValueError(problem)

    def start_sum(self, tensor: Tensor) -> Callable[[], list[float]]:
        """The sums of a step's loss, its count, problems and stops: no loss, all that count, none, none.

        The message is sent as ever; what it would bring depends on the data.
        """
        arrived = super().start_sum(tensor)
        return lambda: (arrived(), [0.0, COUNT[-1], *[0.0] * (tensor.numel() - 2)])[1]


COUNT: list[float] = []
"""The losses that count in the step that is emulated; the last."""


def emulated_mesh(plan: Plan, *, rank: int, ranks: int, ranks_per_node: int | None = None) -> Mesh:
    """The mesh as `rank` has it, inside of `planned_world`.  All ranks compute on the CPU, whose operations they record."""
    each = ranks_per_node or ranks
    world = World(rank, ranks, rank % each, each, launcher="plan")
    mesh = join(world, plan, device=torch.device("cpu"), control_backend=None)
    return EmulatedMesh(**{field.name: getattr(mesh, field.name) for field in fields(Mesh)})
