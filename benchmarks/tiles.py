"""What do tiles in space cost and give?  Ratios of two things measured in turns in one run.

speed      a U-Net's training step on one 1024 x 1024 image: 2 ranks of 1 thread, each with half of it, against 1 rank of
           1 thread with the whole; the other rank sleeps meanwhile
nets       nets that others wrote, in turns: the whole on rank 0 alone, tiles on all ranks, and on all ranks at once a plain
           step on that rank's part of the image without any message: the limit of what tiles can gain on this machine
memory     peak of what the allocator holds during that step beside weights and gradients, per rank over the whole's
overhead   16 residual blocks with GroupNorm on one rank, as a tiled tensor with nothing to exchange, against plain
           PyTorch: at 8 x 8 pixels and 4 channels, where Python is all there is, and at 256 x 256 and 32 channels;
           beside it plain PyTorch and the tiled tensor with the blocks compiled by torch.compile, which wants a C++ compiler,
           and DTensor and PhysicsNeMo's ShardTensor, where they are installed

  python benchmarks/tiles.py speed nets memory overhead [--side 1024] [--pairs 7] [--nets ResNet-50 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import widefield as wf
from widefield.comm.halo import TRAFFIC
from widefield.comm.mesh import Mesh, join, leave
from widefield.config import ModelConfig
from widefield.geometry.layout import Grid
from widefield.launchers import world_from
from widefield.launchers.local import start
from widefield.models import build
from widefield.plans import Plan
from widefield.streaming.storage.heap import keep_memory_of_steps

RESULT = Path(__file__).parent / "results" / "tiles.json"
CLASSES = 5


def unet(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(name="unet", options={"norm": options.norm, "widths": options.widths})
    return build(config, in_channels=3, num_classes=CLASSES)


def page(side: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(1, 3, side, side), torch.randint(0, CLASSES, (1, side, side))


def stepper(model: nn.Module, image: Tensor, target: Tensor) -> Callable[[], float]:
    """A training step: forward, backward, SGD; gives the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def seconds_of(step: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


# ---------------------------------------------------------------------------------------------- ranks


def speed(options: argparse.Namespace) -> dict:
    """Pairs of (whole on rank 0 alone, tiles on all ranks)."""
    mesh = join(world_from(os.environ), Plan(space=[dist_size(), 1]))
    image, target = page(options.side)
    alone = stepper(unet(options), image, target) if mesh.is_main else None
    model = wf.parallelize(unet(options), mesh)
    tiled = stepper(model, wf.tile(image, mesh), wf.tile(target, mesh))
    losses = [tiled() for _ in range(2)]
    if alone is not None:
        expected = [alone() for _ in range(2)]
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-3, (losses, expected)
    turns = []
    for _ in range(options.pairs):
        TRAFFIC.clear()
        turns.append(turn_of(mesh, alone, tiled))
    found: dict[str, Any] = {"speed of tiles over whole": spread([whole / tiles for whole, tiles in turns])}
    found["seconds of the whole, median"] = round(statistics.median(whole for whole, _ in turns), 3)
    found["messages to peers per step and rank"] = TRAFFIC.pixel_messages
    found["MiB to peers per step and rank"] = round(TRAFFIC.pixel_bytes / 2**20, 3)
    leave(mesh)
    return found


class Net(NamedTuple):
    """A net that others wrote: `make` builds it; batch: images per step; is_dense: whether it gives outputs per pixel."""

    make: Callable[[Any, Any], nn.Module]
    batch: int = 1
    is_dense: bool = False


NETS = {
    "ResNet-50": Net(lambda timm, smp: timm.create_model("resnet50", num_classes=CLASSES)),
    "U-Net, ResNet-18": Net(lambda timm, smp: smp.Unet("resnet18", encoder_weights=None, classes=CLASSES), is_dense=True),
    "DeepLabV3+, ResNet-18": Net(
        lambda timm, smp: smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=CLASSES, decoder_aspp_dropout=0.0),
        batch=2,  # its batch norm after global pooling wants two values
        is_dense=True,
    ),
    "EfficientNet-B0": Net(lambda timm, smp: timm.create_model("efficientnet_b0", num_classes=CLASSES)),
    "ConvNeXt-Tiny": Net(lambda timm, smp: timm.create_model("convnext_tiny", num_classes=CLASSES)),
}
"""By the name in the results; from `timm` and `segmentation_models_pytorch`."""


def nets(options: argparse.Namespace) -> dict:
    """Turns of (whole on rank 0 alone, tiles on all ranks, parts on all ranks without a message) of the net `options.net`."""
    mesh = join(world_from(os.environ), Plan(space=[dist_size(), 1]))
    keep_memory_of_steps(mesh)  # as a run does
    net, side = NETS[options.net], options.side
    torch.manual_seed(1)
    image = torch.randn(net.batch, 3, side, side)
    target = torch.randint(0, CLASSES, (net.batch, side, side) if net.is_dense else (net.batch,))
    rows = side // dist_size()
    part = stepper(made_by_others(net), image[:, :, :rows].clone(), target[:, :rows].clone() if net.is_dense else target)
    alone = stepper(made_by_others(net), image, target) if mesh.is_main else None
    model = wf.parallelize(made_by_others(net), mesh)
    tiled = stepper(model, wf.tile(image, mesh), wf.tile(target, mesh) if net.is_dense else target)
    losses = [tiled() for _ in range(2)]
    if alone is not None:
        expected = [alone() for _ in range(2)]
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-3, (losses, expected)
    part()
    turns = [turn_of(mesh, alone, tiled, part) for _ in range(options.pairs)]
    leave(mesh)
    return {
        "speed of tiles over whole": spread([whole / tiles for whole, tiles, _ in turns]),
        "speed of parts without a message over whole, the limit": spread([whole / parts for whole, _, parts in turns]),
        "share of the limit": spread([parts / tiles for _, tiles, parts in turns]),
        "seconds of the whole, median": round(statistics.median(whole for whole, _, _ in turns), 3),
        "load of the machine": round(os.getloadavg()[0], 1),
    }


def made_by_others(net: Net) -> nn.Module:
    import segmentation_models_pytorch as smp
    import timm

    torch.manual_seed(0)
    return net.make(timm, smp)


def turn_of(mesh: Mesh, alone: Callable | None, *steps: Callable[[], object]) -> tuple[float, ...]:
    """Seconds of a step of the whole on rank 0 alone, and then of each of `steps` on all ranks, until the last has ended."""
    seconds = [seconds_of(alone, 1) if alone is not None else 0.0]
    sleep_until_all_are_here(mesh)
    for step in steps:
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds)


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def sleep_until_all_are_here(mesh) -> None:
    """A rank that waits in a barrier takes time from the one it waits for only now and then."""
    store = dist.distributed_c10d._get_default_store()
    key = f"turn{sleep_until_all_are_here.turn}"
    sleep_until_all_are_here.turn += 1
    if mesh.is_main:
        store.set(key, b"1")
    while not store.check([key]):
        time.sleep(0.01)
    dist.barrier()


sleep_until_all_are_here.turn = 0  # type: ignore[attr-defined]


def memory(options: argparse.Namespace) -> dict:
    """Largest share of the whole's peak that any rank holds."""
    mesh = join(world_from(os.environ), Plan(space=[dist_size(), 1] if not options.square else [2, 2]))
    image, target = page(options.side)
    model = wf.parallelize(unet(options), mesh)
    mine = peak_bytes(stepper(model, wf.tile(image, mesh), wf.tile(target, mesh)))
    peaks = mesh.gather_objects(mine)
    whole = peak_bytes(stepper(unet(options), image, target)) if mesh.is_main else 1
    dist.barrier()
    leave(mesh)
    shape = "x".join(map(str, mesh.grid.sizes))
    return {
        f"peak per rank over the whole's, {shape} tiles": round(max(peaks) / whole, 4),
        "whole, MiB": round(whole / 2**20, 1),
    }


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes that the CPU allocator held above where the step began; weights and gradients are there before."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held, peak = 0, 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# ---------------------------------------------------------------------------------------------- one rank


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


def overhead(options: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the peers want one
    found = {}
    for channels, side, count in ((4, 8, 30), (32, 256, 1)):
        image = torch.randn(1, channels, side, side)
        pairs = options.pairs * (3 if side == 8 else 1)
        ratios = {name: ratios_of(make, channels, image, count, pairs) for name, make in PEERS.items()}
        found[f"{channels} channels, {side} x {side}"] = {name: spread(ratio) for name, ratio in ratios.items() if ratio}
    return {"time of a step over plain PyTorch's": found}


def ratios_of(make: Callable, channels: int, image: Tensor, count: int, pairs: int) -> list[float]:
    """A peer and plain PyTorch in turns, with no third model in memory; none where the peer does not run here."""
    alone, step = plain(channels, image), made(make, channels, image)
    if step is None:
        return []
    for warm in (alone, step):
        seconds_of(warm, 3)
    return [1 / (seconds_of(alone, count) / seconds_of(step, count)) for _ in range(pairs)]


def made(make: Callable, channels: int, image: Tensor) -> Callable[[], object] | None:
    """A peer's step; None where it is not installed or does not run here, said on stderr."""
    try:
        step = make(channels, image)
        step()
        return step
    except Exception as error:
        print(f"{make.__name__} does not run here: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def blocks(channels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(channels) for _ in range(16)])


def step_of(model: nn.Module, image: Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        output = model(image)
        output.backward(torch.ones_like(output))

    return step


def plain(channels: int, image: Tensor) -> Callable[[], None]:
    return step_of(blocks(channels), image)


def ours(channels: int, image: Tensor) -> Callable[[], None]:
    return step_of(blocks(channels), one_tile(image))


def plain_compiled(channels: int, image: Tensor) -> Callable[[], None]:
    return step_of(torch.compile(blocks(channels)), image)


def ours_compiled(channels: int, image: Tensor) -> Callable[[], None]:
    return step_of(torch.compile(blocks(channels)), one_tile(image))


def one_tile(image: Tensor) -> Tensor:
    return wf.tile(image, replace(wf.build_mesh(), grid=Grid((1, 1))))  # a grid which a plan takes for none


def dtensor(channels: int, image: Tensor) -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return step_of(distribute_module(blocks(channels), mesh), distribute_tensor(image, mesh, [Replicate()]))


def physicsnemo(channels: int, image: Tensor) -> Callable[[], None]:
    from physicsnemo.domain_parallel import ShardTensor, register_custom_ops
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module

    register_custom_ops()
    mesh = init_device_mesh("cpu", (1,))
    tensor = ShardTensor.from_local(image, mesh, [Shard(2)], sharding_shapes={0: (image.shape,)})
    return step_of(distribute_module(blocks(channels), mesh), tensor)


PEERS = {
    "plain": plain,
    "widefield": ours,
    "plain, compiled": plain_compiled,
    "widefield, compiled": ours_compiled,
    "DTensor": dtensor,
    "PhysicsNeMo ShardTensor": physicsnemo,
}


# ---------------------------------------------------------------------------------------------- results


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "lowest": round(min(values), 3), "highest": round(max(values), 3)}


def write(part: str, found: dict, options: argparse.Namespace) -> None:
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    conditions = {"side": options.side} if part != "overhead" else {}
    conditions |= {"norm": options.norm, "widths": options.widths} if part == "speed" or part.startswith("memory") else {}
    conditions |= {"pairs": options.pairs, "threads per rank": 1, "device": "cpu", "processor": platform.machine()}
    conditions |= {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": str(date.today()),
    }
    results[part] = found | {"conditions": conditions}
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(part, json.dumps(found, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["speed", "nets", "memory", "overhead"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--square", action="store_true", help="2 x 2 tiles")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--widths", type=lambda text: [int(n) for n in text.split(",")], default=[16, 32, 64, 128])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), metavar="NET", help=", ".join(NETS))
    parser.add_argument("--net", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        torch.set_num_threads(1)
        (part,) = options.parts
        found = {"speed": speed, "nets": nets, "memory": memory}[part](options)
        if os.environ["RANK"] == "0":
            write({"speed": part, "nets": f"nets, {options.net}"}.get(part, f"{part}, {options.ranks} ranks"), found, options)
            sys.stdout.flush()
        os._exit(0)
    for part in options.parts:
        if part == "overhead":
            write(part, overhead(options), options)
            continue
        os.environ["OMP_NUM_THREADS"] = "1"
        rest = [word for word in sys.argv[1:] if word not in (*options.parts, "--nets", *options.nets)]
        for more in [["--net", name] for name in options.nets] if part == "nets" else [[]]:
            status = start(options.ranks, [part, *more, *rest], program=[sys.executable, __file__])
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
