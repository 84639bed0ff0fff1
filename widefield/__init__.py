"""widefield: train convolutional networks on images of any size, on any number of devices, with the numbers of one device.

    import widefield as wf

    mesh = wf.build_mesh()                       # all ranks there are, from torchrun's, Slurm's, MPI's environment, or one
    model = wf.parallelize(model, mesh)          # the same module, names unchanged; BatchNorm synchronized
    loss = F.cross_entropy(model(x), y, reduction="sum") * mesh.copies / samples_of_all_copies
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
    from widefield.engine.parity import verify
    from widefield.engine.reader import from_reader
    from widefield.engine.stepping import clip_grad_norm_
    from widefield.engine.stream.streamed import stream
    from widefield.engine.tiled import TiledTensor
    from widefield.engine.tiling import from_tile, tile, whole, window
    from widefield.launchers import build_mesh
    from widefield.plan import Plan
    from widefield.report import write_report

_DOOR = {
    "Mesh": "engine.mesh",
    "Plan": "plan",
    "RunConfig": "config",
    "SyncBatchNorm": "engine.normalization",
    "TiledTensor": "engine.tiled",
    "World": "engine.mesh",
    "build_mesh": "launchers",
    "clip_grad_norm_": "engine.stepping",
    "from_reader": "engine.reader",
    "from_tile": "engine.tiling",
    "parallelize": "engine.parallelize",
    "read_config": "config",
    "stream": "engine.stream.streamed",
    "tile": "engine.tiling",
    "verify": "engine.parity",
    "whole": "engine.tiling",
    "window": "engine.tiling",
    "write_report": "report",
}
"""Each public name and the module it lives in; imported when first asked for, so that `import widefield` costs nothing."""

__all__ = [
    "Mesh",
    "Plan",
    "RunConfig",
    "SyncBatchNorm",
    "TiledTensor",
    "World",
    "build_mesh",
    "clip_grad_norm_",
    "from_reader",
    "from_tile",
    "parallelize",
    "read_config",
    "stream",
    "tile",
    "verify",
    "whole",
    "window",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"widefield has no '{name}'; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"widefield.{_DOOR[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
