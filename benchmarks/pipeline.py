"""What do widefield's stages cost beside torch.distributed.pipelining by hand?  ResNet-18 with GroupNorm, a stage per rank.

By hand, the network's modules are put into one nn.Sequential per rank, cut before the same layers, and torch's stage and
schedule run them.  Both train the same weights on the same tensors, in the same processes, in blocks of steps A B B A ...; the
ratio of each pair is noted and the median is the result, so that a machine whose speed drifts does not decide it.  Beside the
wall's seconds stand the processor's, of both ranks: others who use the machine disturb these less.

    python benchmarks/pipeline.py [--batch 16] [--side 64] [--micro 4] [--steps 2] [--pairs 12] [--only 1f1b] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from widefield.engine.mesh import Mesh, World, join, leave
from widefield.engine.parallelize import parallelize
from widefield.engine.passes import backward_of
from widefield.launchers import world_from
from widefield.launchers.local import start
from widefield.plan import Plan

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


def seconds_of(loop: Loop, count: int) -> tuple[float, float]:
    """Of the wall, and of the processor on all ranks."""
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(loop)
    used = torch.tensor(time.process_time() - worked, dtype=torch.float64)
    dist.barrier()
    wall = time.perf_counter() - began
    dist.all_reduce(used)
    return wall, used.item()


def measured(schedule: str, world: World, options: argparse.Namespace) -> list[list[tuple[float, float]]]:
    """Seconds of each block of steps, by hand and ours, in turns."""
    torch.manual_seed(1)
    image, target = torch.randn(options.batch, 3, options.side, options.side), torch.arange(options.batch) % CLASSES
    loops = [make(schedule, world, image, target, options.micro) for make in (by_hand, ours)]
    losses = [[next(loop) for _ in range(3)] for loop in loops]
    if world.rank == RANKS - 1:
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    times: list[list[tuple[float, float]]] = [[], []]
    for pair in range(options.pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[side].append(seconds_of(loops[side], options.steps))
    return times


def on_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = world_from(os.environ)
    mesh = join(world, Plan(stage=RANKS))
    asked = [name for name in SCHEDULES if options.only is None or name in options.only.split(",")]
    times = {name: measured(name, world, options) for name in asked}
    if mesh.is_main:
        report(times, options, mesh)
    leave(mesh)


def report(times: dict[str, list[list[tuple[float, float]]]], options: argparse.Namespace, mesh: Mesh) -> None:
    result: dict = {
        "question": "seconds of widefield's step over those of torch's pipelining by hand",
        "conditions": {
            "model": f"torchvision resnet18, GroupNorm, cut before {CUT}", "ranks": mesh.size, "batch": options.batch,
            "micro-batches": options.micro, "image": [3, options.side, options.side], "steps per block": options.steps,
            "pairs": options.pairs, "device": "cpu, gloo", "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "threads per rank": torch.get_num_threads(), "torch": torch.__version__,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
        },
    }  # fmt: skip
    for name, (hand, our) in times.items():
        result[name] = {}
        for kind, clock in enumerate(("wall", "processor")):
            pair = [[seconds[kind] for seconds in side] for side in (hand, our)]
            ratios = sorted(b / a for a, b in zip(*pair, strict=True))
            found = {f"seconds per step, {who}": statistics.median(side) / options.steps
                     for who, side in zip(("by hand", "widefield"), pair, strict=True)}  # fmt: skip
            found |= {"ratio, median of pairs": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
            result[name][clock] = {key: round(value, 4) for key, value in found.items()}
    print(json.dumps(result, indent=1))
    if options.save:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 16), ("side", 64), ("micro", 4), ("steps", 2), ("pairs", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", help="schedules, by comma; all where left out")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name} into results/")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_rank(options)
        return 0
    return start(RANKS, [], program=[sys.executable, __file__, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
