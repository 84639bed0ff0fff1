"""What does a strategy of widefield cost beside the same one written by hand?  ResNet-18, 2 ranks, one step each in turn.

Both train the same network on the same tensors, in the same processes, in turns (turns.py).

  DDP             DistributedDataParallel as PyTorch's tutorial has it, gradient_as_bucket_view, static_graph, fused SGD
  FSDP2           fully_shard on every stage of the network and on the whole, SGD; reshard_after_forward for ZeRO-3, not for 2
  ZeRO-1          ZeroRedundancyOptimizer over DDP
  recompute       torch.utils.checkpoint, non-reentrant, around every block (each rank alone)

BatchNorm is each copy's own on both sides (batch_norm=averaged): peers know no other, and its price is in data_parallel.json.

    python benchmarks/strategies.py [--ranks 2] [--batch 16] [--side 64] [--steps 2] [--pairs 12] [--only DDP,ZeRO-3] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
import turns
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from widefield.comm.mesh import Mesh, join, leave
from widefield.launchers import world_from
from widefield.parallel.parallelize import parallelize, share_states
from widefield.plans import Plan

RESULT = Path(__file__).parent / "results" / "strategies.json"
CLASSES = 10
Loop = Iterator[None]


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=CLASSES).to(device)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, image: Tensor, target: Tensor) -> Loop:
    """One step per `next`: the same lines for both sides."""
    while True:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(image), target).backward()
        optimizer.step()
        yield


def sgd(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **options)


# ---------------------------------------------------------------------------------------------- by hand


def ddp_by_hand(*batch: Tensor) -> Loop:
    model = DistributedDataParallel(network(batch[0].device), gradient_as_bucket_view=True, static_graph=True)
    return steps(model, sgd(model, fused=True), *batch)


def zero1_by_hand(*batch: Tensor) -> Loop:
    model = DistributedDataParallel(network(batch[0].device), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True)
    return steps(model, optimizer, *batch)


def fsdp_by_hand(reshard: bool, *batch: Tensor) -> Loop:
    device = batch[0].device
    model, mesh = network(device), init_device_mesh(device.type, (dist.get_world_size(),))
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        fully_shard(stage, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return steps(model, sgd(model, foreach=True), *batch)


def recompute_by_hand(*batch: Tensor) -> Loop:
    model = network(batch[0].device)
    for block in (block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return steps(model, sgd(model, fused=True), *batch)


# ---------------------------------------------------------------------------------------------- widefield


def ours(mesh: Mesh, plan: Plan, *batch: Tensor) -> Loop:
    laid, model = join(mesh.world, plan), network(mesh.device)
    image, target = batch
    parallelize(model, laid, trial_step=lambda: F.cross_entropy(model(image[:2]), target[:2]))
    option = "foreach" if plan.shard > 1 and plan.sharding.zero > 1 else "fused"
    return steps(model, share_states(sgd(model, **{option: True}), laid), image, target)


def alone(plan: Plan, *batch: Tensor) -> Loop:
    model, mesh = network(batch[0].device), join(type(world_from(os.environ))(), plan, device=batch[0].device)
    parallelize(model, mesh)
    return steps(model, sgd(model, fused=True), *batch)


def pairs_of(mesh: Mesh) -> dict[str, tuple[Callable[..., Loop], Callable[..., Loop]]]:
    """By hand, and ours, of every strategy."""
    ranks, local = mesh.size, {"batch_norm": "averaged"}
    blocks = [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
    return {
        "DDP": (ddp_by_hand, partial(ours, mesh, Plan(replicate=ranks, **local))),
        "ZeRO-1": (zero1_by_hand, partial(ours, mesh, Plan(shard=ranks, sharding={"zero": 1}, **local))),
        "ZeRO-2": (partial(fsdp_by_hand, False), partial(ours, mesh, Plan(shard=ranks, sharding={"zero": 2}, **local))),
        "ZeRO-3": (partial(fsdp_by_hand, True), partial(ours, mesh, Plan(shard=ranks, **local))),
        "recompute": (recompute_by_hand, partial(alone, Plan(recompute={"blocks": blocks}))),
    }


# ---------------------------------------------------------------------------------------------- measuring


def batch_of(images: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images drawn at random on the CPU, and their classes."""
    return torch.randn(images, 3, side, side).to(device), (torch.arange(images) % CLASSES).to(device)


def on_rank(options: argparse.Namespace) -> None:
    world = world_from(os.environ)
    mesh = join(world, Plan(replicate=world.size))
    torch.manual_seed(world.rank)
    batch = batch_of(options.batch, options.side, mesh.device)
    about = turns.conditions(mesh, options, model="torchvision resnet18", **{"batch per rank": options.batch})
    result: dict = {
        "question": "seconds of widefield's step over those of the same strategy by hand",
        "conditions": about,
    }
    for name, both in pairs_of(mesh).items():
        if options.only is None or name in options.only.split(","):
            loops = dict(zip(("by hand", "widefield"), (make(*batch) for make in both), strict=True))
            result[name] = turns.compared(turns.in_turns(loops, options, mesh.device), "widefield", "by hand", options.steps)
    if mesh.is_main:
        turns.tell(result, RESULT, options)
    leave(mesh)


if __name__ == "__main__":
    sys.exit(turns.command(on_rank, RESULT, about=__doc__, only="strategies", ranks=2, batch=16, side=64, steps=2, pairs=12))
