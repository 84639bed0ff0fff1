"""widefield: train convolutional networks on images of any size, on any number of devices, with the numbers of one device.

    import widefield as wf

    mesh = wf.build_mesh()                       # all ranks there are, from torchrun's, Slurm's, MPI's environment, or one
    model = wf.parallelize(model, mesh)          # the same module, names unchanged; BatchNorm synchronized
    loss = F.cross_entropy(model(x), y, reduction="sum") * mesh.size / samples_of_all_ranks
    loss.backward()                              # every p.grad is the whole batch's gradient, on every rank

What `widefield train` does is `widefield.run.train(config, folder, world)`; `wf.train` is the package of that name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from widefield.config import RunConfig, read_config
    from widefield.engine.mesh import Mesh, World
    from widefield.engine.normalization import SyncBatchNorm
    from widefield.engine.parallelize import parallelize
    from widefield.launchers import build_mesh
    from widefield.plan import Plan
    from widefield.report import write_report

_DOOR = {
    "Mesh": "engine.mesh",
    "Plan": "plan",
    "RunConfig": "config",
    "SyncBatchNorm": "engine.normalization",
    "World": "engine.mesh",
    "build_mesh": "launchers",
    "parallelize": "engine.parallelize",
    "read_config": "config",
    "write_report": "report",
}
"""Each public name and the module it lives in; imported when first asked for, so that `import widefield` costs nothing."""

__all__ = [
    "Mesh",
    "Plan",
    "RunConfig",
    "SyncBatchNorm",
    "World",
    "build_mesh",
    "parallelize",
    "read_config",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"widefield has no '{name}'; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"widefield.{_DOOR[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
