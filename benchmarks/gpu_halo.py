"""What does it give that a convolution runs on its tile while the halo travels?  An image in two tiles, a tile per device.

Without overlap, the same code waits for each halo as soon as it has asked for it.  Forward and backward, in turns (turns.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import torch
import turns
from rows import Row, row_of
from torch import Tensor, nn

import widefield as wf
from widefield.comm import halo
from widefield.comm.mesh import join, leave
from widefield.launchers import world_from
from widefield.plans import Plan

LARGE = {"side": 4096, "channels": 64, "dtype": torch.bfloat16, "steps": 10, "pairs": 9}
SMALL = {"side": 96, "channels": 4, "dtype": torch.float32, "steps": 2, "pairs": 3}
_start = halo.start


def start_and_wait(moves: Sequence[halo.Move], tiles: Sequence[Tensor], group_name: str) -> halo.Pending:
    """`halo.start` for whoever computes nothing meanwhile; on a GPU what is queued afterwards runs after the halo has come."""
    pending = _start(moves, tiles, group_name)
    for work in pending.works:
        work.wait()
    pending.works.clear()  # gloo would wait again, for a message that never comes
    return pending


def steps(layer: nn.Module, image: Tensor, *, waits: bool) -> Iterator[Tensor]:
    """Forward and backward per `next`; gives the output."""
    while True:
        layer.zero_grad(set_to_none=True)
        with mock.patch.object(halo, "start", start_and_wait if waits else _start):
            output = layer(image)
            output.backward(output.detach())
        yield output.detach()


def rows(device: torch.device, *, small: bool, until: float) -> Iterator[Row]:
    """Every rank runs it, on its own device; `device` says of which kind."""
    sizes, world = SimpleNamespace(**(SMALL if small else LARGE)), world_from(os.environ)
    assert world is not None, "this part runs on ranks"
    mesh = join(world, Plan(space=[world.size, 1]))
    assert mesh.device.type == device.type, f"asked for {device.type} and the ranks are on {mesh.device}"
    torch.manual_seed(0)
    shape = (1, sizes.channels, sizes.side, sizes.side)
    layer = nn.Conv2d(sizes.channels, sizes.channels, 3, padding=1).to(mesh.device, sizes.dtype)
    image = wf.tile(torch.randn(shape, dtype=sizes.dtype, device=mesh.device), mesh).detach().requires_grad_()
    loops = {name: steps(layer, image, waits=name == "waiting") for name in ("waiting", "overlapped")}
    torch.testing.assert_close(*(wf.whole(next(loop)) for loop in loops.values()))
    times = turns.in_turns(loops, sizes, mesh.device, until=until)
    walls = {name: [wall / sizes.steps for wall, _ in each] for name, each in times.items()}
    about = f"{shape[1]} channels, {sizes.side} x {sizes.side} px in {world.size} tiles, {sizes.dtype}"
    for name, each in walls.items():
        yield row_of(f"convolution, {name}", [1e3 * wall for wall in each], "ms")
    ratios = [waiting / overlapped for waiting, overlapped in zip(walls["waiting"], walls["overlapped"], strict=True)]
    yield row_of("time waiting over time overlapped", ratios, "times", note=about)
    leave(mesh)
