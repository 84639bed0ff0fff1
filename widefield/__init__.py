"""widefield: train convolutional networks on images of any size, on any number of devices, with the numbers of one device.

import widefield as wf

mesh = wf.build_mesh()                       # all ranks there are, from torchrun's, Slurm's, MPI's environment, or one
model = wf.parallelize(model, mesh)          # the same module, names unchanged; BatchNorm synchronized
loss = F.cross_entropy(model(x), y, reduction="sum") * mesh.copies / samples_of_all_copies
loss.backward()                              # every p.grad is the whole batch's gradient, on every rank

batches = wf.sampler(train_set, mesh, batch_size=32)     # every sample once, whatever the number of ranks
wf.save("checkpoints", model=model, optimizer=optimizer, step=step, mesh=mesh)
wf.evaluate_exactly(model, eval_set, {"accuracy": metric}, mesh).values

wf.train("digits", run="runs/one")                       # what `widefield train` does, on the ranks of this script
wf.train(recipe, model=net, data=(train_set, eval_set))  # with your own objects
wf.evaluate("runs/one")
wf.predict("runs/one", "scan.png")
print(wf.plan("digits", "mesh.shard=4"))
print(wf.doctor("runs/one"))                             # what stopped it; without a folder, what would stop a run here
wf.launch("slurm", "my.yaml", nodes=4, gpus=8, time="12:00:00")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from widefield.api import doctor, evaluate, plan, predict, replay, train
    from widefield.comm.mesh import Mesh, World
    from widefield.config import RunConfig, read_config
    from widefield.image_files import open_image
    from widefield.launchers import build_mesh
    from widefield.launching import launch
    from widefield.parallel.optimizer_steps import clip_grad_norm_
    from widefield.parallel.parallelize import parallelize, share_states
    from widefield.parallel.passes import backward_of, without_sync
    from widefield.plans import Plan
    from widefield.report import write_report
    from widefield.streaming.api import stream, stream_to
    from widefield.streaming.storage.windowed_image import from_reader
    from widefield.tiled.api import from_tile, tile, whole, window
    from widefield.tiled.sync_batch_norm import SyncBatchNorm
    from widefield.tiled.tensor import TiledTensor
    from widefield.training.exact_evaluation import evaluate_exactly
    from widefield.training.own_loop import load, sampler, save
    from widefield.verification.api import verify

_DOOR = {
    "Mesh": "comm.mesh",
    "Plan": "plans",
    "RunConfig": "config",
    "SyncBatchNorm": "tiled.sync_batch_norm",
    "TiledTensor": "tiled.tensor",
    "World": "comm.mesh",
    "backward_of": "parallel.passes",
    "build_mesh": "launchers",
    "clip_grad_norm_": "parallel.optimizer_steps",
    "doctor": "api",
    "evaluate": "api",
    "evaluate_exactly": "training.exact_evaluation",
    "from_reader": "streaming.storage.windowed_image",
    "from_tile": "tiled.api",
    "launch": "launching",
    "load": "training.own_loop",
    "open_image": "image_files",
    "parallelize": "parallel.parallelize",
    "plan": "api",
    "predict": "api",
    "read_config": "config",
    "replay": "api",
    "sampler": "training.own_loop",
    "save": "training.own_loop",
    "share_states": "parallel.parallelize",
    "stream": "streaming.api",
    "stream_to": "streaming.api",
    "tile": "tiled.api",
    "train": "api",
    "verify": "verification.api",
    "whole": "tiled.api",
    "window": "tiled.api",
    "without_sync": "parallel.passes",
    "write_report": "report",
}
"""Each public name and its module, which is imported at the first access, so that `import widefield` is cheap."""

__all__ = [
    "Mesh",
    "Plan",
    "RunConfig",
    "SyncBatchNorm",
    "TiledTensor",
    "World",
    "backward_of",
    "build_mesh",
    "clip_grad_norm_",
    "doctor",
    "evaluate",
    "evaluate_exactly",
    "from_reader",
    "from_tile",
    "launch",
    "load",
    "open_image",
    "parallelize",
    "plan",
    "predict",
    "read_config",
    "replay",
    "sampler",
    "save",
    "share_states",
    "stream",
    "stream_to",
    "tile",
    "train",
    "verify",
    "whole",
    "window",
    "without_sync",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _DOOR:
        raise AttributeError(f"widefield has no '{name}'; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"widefield.{_DOOR[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
