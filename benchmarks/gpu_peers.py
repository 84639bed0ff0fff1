"""DDP and ZeRO by hand beside widefield's, ResNet-18, two devices: the loops of strategies.py, for as long as there is time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import strategies
import torch
import turns
from rows import Row, row_of

from widefield.comm.mesh import join, leave
from widefield.launchers import world_from
from widefield.plans import Plan

LARGE = {"compared": ["DDP", "ZeRO-2", "ZeRO-3"], "batch": 128, "side": 224, "steps": 10, "pairs": 9}
SMALL = {"compared": ["DDP", "ZeRO-3"], "batch": 2, "side": 32, "steps": 1, "pairs": 3}


def rows(device: torch.device, *, small: bool, until: float) -> Iterator[Row]:
    """Every rank runs it, on its own device; `device` says of which kind."""
    sizes, world = SimpleNamespace(**(SMALL if small else LARGE)), world_from(os.environ)
    assert world is not None, "this part runs on ranks"
    mesh = join(world, Plan(replicate=world.size))
    assert mesh.device.type == device.type, f"asked for {device.type} and the ranks are on {mesh.device}"
    torch.manual_seed(world.rank)
    batch, pairs = strategies.batch_of(sizes.batch, sizes.side, mesh.device), strategies.pairs_of(mesh)
    began = time.monotonic()
    for number, name in enumerate(sizes.compared, 1):
        loops = dict(zip(("by hand", "widefield"), (make(*batch) for make in pairs[name]), strict=True))
        share = began + (until - began) * number / len(sizes.compared)
        times = turns.in_turns(loops, sizes, mesh.device, until=share)
        by_hand = [1e3 * wall / sizes.steps for wall, _ in times["by hand"]]
        yield row_of(f"{name} by hand, a step", by_hand, "ms")
        ratios = [mine / theirs for (mine, _), (theirs, _) in zip(times["widefield"], times["by hand"], strict=True)]
        about = f"ResNet-18, {world.size} ranks, {sizes.batch} images of {sizes.side} x {sizes.side} px each"
        yield row_of(f"{name}, seconds of a step over those by hand", ratios, "times", note=about)
    leave(mesh)
