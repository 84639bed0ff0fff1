"""The mesh of one rank of a plan, with process groups that send nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from widefield.comm.mesh import Mesh, World, join
from widefield.plans import Plan


@dataclass(frozen=True)
class EmulatedMesh(Mesh):
    """A mesh whose other ranks have the values that this one has.

    counts: of the losses of a step that is emulated, the last: what ranks add up then depends on data that is not there.
    """

    counts: list[float] = field(default_factory=list, compare=False)

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
        return lambda: (arrived(), [0.0, self.counts[-1], *[0.0] * (tensor.numel() - 2)])[1]


def emulated_mesh(plan: Plan, *, rank: int, ranks: int) -> EmulatedMesh:
    """The mesh as `rank` has it, inside of `planned_world`.  All ranks compute on the CPU, whose operations they record."""
    world = World(rank, ranks, rank, ranks, launcher="plan")
    mesh = join(world, plan, device=torch.device("cpu"), control_backend=None)
    return EmulatedMesh(**{each.name: getattr(mesh, each.name) for each in fields(Mesh)})
