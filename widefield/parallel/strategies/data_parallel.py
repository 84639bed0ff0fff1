"""torch.nn.DataParallel: one process drives all GPUs.  The baseline that `data` is measured against.

Each step copies the weights to every GPU and gathers the outputs on the first; BatchNorm sees one GPU's share, and the
first GPU's running statistics stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from widefield.comm.mesh import Mesh
from widefield.parallel.strategies import Case, Phase
from widefield.parallel.strategies._forward_route import inside, route
from widefield.plans import Plan

AXIS = "replicate"
PHASE = Phase.AVERAGE
CHECK_ORDER = 10
CASES: list[Case] = []  # it needs two GPUs in one process


def is_used(plan: Plan) -> bool:
    """Where mesh.data_strategy names it, and neither weights nor layers are cut."""
    return plan.data_strategy == "data_parallel" and plan.shard == plan.stage == 1


def check_plan(plan: Plan) -> None:
    """ValueError: tiles, a stream, several ranks, or synchronized statistics, which one process with threads cannot have."""
    if plan.data_strategy != "data_parallel":
        return
    if plan.space:
        raise ValueError(
            f"data_strategy=data_parallel deals out whole images to the GPUs of one process and mesh.space={plan.space} cuts "
            "them; set mesh.space=[], or mesh.data_strategy=data for one process per GPU"
        )
    if plan.stream is not None:
        raise ValueError(
            f"data_strategy=data_parallel runs copies of the model in threads and a stream (here {plan.stream}) runs one at a "
            "time; set stream=null, or mesh.data_strategy=data for one process per GPU"
        )
    if plan.ranks > 1:
        raise ValueError(
            f"data_strategy=data_parallel drives all GPUs from one process and the mesh asks for {plan.ranks}; "
            "set mesh.replicate=1, or mesh.data_strategy=data for one process per GPU"
        )
    if plan.batch_norm != "broadcast":
        raise ValueError(
            f"torch.nn.DataParallel normalizes each GPU's share alone, so batch_norm={plan.batch_norm} cannot hold; "
            "set batch_norm=broadcast to accept that, or mesh.data_strategy=data"
        )


def apply(model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None) -> list[str]:
    """Split each batch over all GPUs of this machine.  ValueError: there are fewer than two."""
    count = torch.cuda.device_count()
    if count < 2:
        raise ValueError(
            f"mesh.data_strategy=data_parallel spreads a batch over the GPUs of one machine and this one has {count}; "
            "set mesh.data_strategy=data, which runs on any number of ranks, on CPUs too"
        )
    route(model, nn.DataParallel(inside(model)))
    return [f"torch.nn.DataParallel: each batch is spread over {count} GPUs by one process"]
