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

PHASE = Phase.AVERAGE
CASES: list[Case] = []  # it runs on no rank but this one, and on GPUs alone


def apply(model: nn.Module, mesh: Mesh, *, trial_step: Callable[[], Tensor] | None = None) -> list[str]:
    """Spread each batch over all GPUs of this machine.  ValueError where there are fewer than two."""
    count = torch.cuda.device_count()
    if count < 2:
        raise ValueError(
            f"mesh.data_strategy=data_parallel spreads a batch over the GPUs of one machine and this one has {count}; "
            "set mesh.data_strategy=data, which runs on any number of ranks, on CPUs too"
        )
    route(model, nn.DataParallel(inside(model)))
    return [f"torch.nn.DataParallel: each batch is spread over {count} GPUs by one process"]
