"""What do widefield's stages cost beside torch.distributed.pipelining by hand?  ResNet-18 with GroupNorm, a stage per rank.

By hand, the network's modules are put into one nn.Sequential per rank, cut before the same layers, and torch's stage and
schedule run them.  Both train the same weights on the same tensors, in the same processes, in turns (turns.py).

    python benchmarks/pipeline.py [--batch 16] [--side 64] [--micro 4] [--steps 2] [--pairs 12] [--only 1f1b] [--save]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torchvision
import turns
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from widefield.comm.mesh import Mesh, World, join, leave
from widefield.launchers import world_from
from widefield.parallel.parallelize import parallelize
from widefield.parallel.passes import backward_of
from widefield.plans import Plan

RESULT = Path(__file__).parent / "results" / "pipeline.json"
RANKS, CLASSES, CUT = 2, 10, "layer3"
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}
Loop = Iterator[float]


def network() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=CLASSES, norm_layer=partial(nn.GroupNorm, 8))


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)


def by_hand(schedule: str, world: World, image: Tensor, target: Tensor, micro: int) -> Loop:
    """Torch's tutorial, with shapes given and not inferred."""
    whole, cut = network(), 6
    parts = [part for name, part in whole.named_children() if name != "fc"]
    assert whole.get_submodule(CUT) is parts[cut]
    stage = nn.Sequential(*(parts[:cut] if world.rank == 0 else [*parts[cut:], nn.Flatten(1), whole.fc]))
    like = image[: len(image) // micro].to("meta")
    between = like.new_empty(len(like), 128, image.shape[2] // 8, image.shape[3] // 8).requires_grad_()
    shapes = (like, between) if world.rank == 0 else (between, like.new_empty(len(like), CLASSES))
    taken, given = ((shape,) for shape in shapes)
    made = pipelining.PipelineStage(stage, world.rank, RANKS, torch.device("cpu"), input_args=taken, output_args=given)
    ready = made if schedule != "zero_bubble" else [made]
    run = SCHEDULES[schedule](ready, micro, loss_fn=lambda o, t: summed(o, t) / len(image), scale_grads=False)
    optimizer = sgd(stage.parameters())
    while True:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        run.step(*([image] if world.rank == 0 else []), target=target, losses=losses)
        optimizer.step()
        yield float(sum(loss.detach() for loss in losses))


def ours(schedule: str, world: World, image: Tensor, target: Tensor, micro: int) -> Loop:
    plan = Plan(stage=RANKS, pipeline={"schedule": schedule, "micro_batches": micro, "stages": [CUT]})
    model = parallelize(network(), join(world, plan), sample=image)
    optimizer = sgd(model.parameters())
    while True:
        optimizer.zero_grad(set_to_none=True)
        loss = backward_of(model, image, target, loss_of=summed, scaled=lambda loss: loss / len(image))
        optimizer.step()
        yield loss.item() / len(image)


# ---------------------------------------------------------------------------------------------- measuring


def compared(schedule: str, mesh: Mesh, options: argparse.Namespace) -> dict:
    """Both loops' seconds, once they are seen to learn alike."""
    torch.manual_seed(1)
    image, target = torch.randn(options.batch, 3, options.side, options.side), torch.arange(options.batch) % CLASSES
    makes = {"by hand": by_hand, "widefield": ours}
    loops = {name: make(schedule, mesh.world, image, target, options.micro) for name, make in makes.items()}
    losses = [[next(loop) for _ in range(3)] for loop in loops.values()]
    if mesh.world.rank == RANKS - 1:
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    return turns.compared(turns.in_turns(loops, options, mesh.device), "widefield", "by hand", options.steps)


def on_rank(options: argparse.Namespace) -> None:
    mesh = join(world_from(os.environ), Plan(stage=RANKS))
    more = {"batch": options.batch, "micro-batches": options.micro}
    about = turns.conditions(mesh, options, model=f"torchvision resnet18, GroupNorm, cut before {CUT}", **more)
    result: dict = {"question": "seconds of widefield's step over those of torch's pipelining by hand", "conditions": about}
    for name in SCHEDULES:
        if options.only is None or name in options.only.split(","):
            result[name] = compared(name, mesh, options)
    if mesh.is_main:
        turns.tell(result, RESULT, options)
    leave(mesh)


if __name__ == "__main__":
    options = {"batch": 16, "side": 64, "micro": 4, "steps": 2, "pairs": 12}
    sys.exit(turns.command(on_rank, RESULT, about=__doc__, only="schedules", ranks=RANKS, **options))
