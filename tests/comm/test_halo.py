"""Do the right pixels travel, in one message per peer, and is every exchange undone by its adjoint?"""

from __future__ import annotations

import random

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from torch.nn import functional as F

import widefield as wf
from widefield.comm import halo
from widefield.comm.halo import TRAFFIC, gather, move_of, start
from widefield.geometry import layout
from widefield.geometry.box import size_of, within
from widefield.geometry.interval import Interval, even_cut
from widefield.geometry.layout import Cut, Grid, layout_of
from widefield.plans import Plan
from widefield.tiled.api import _Tile
from widefield.tiled.redistribute import move_cuts, move_for, redistribute, space_group
from widefield.tiled.tensor import wrap

SHAPE = (2, 3, 13, 11)
PLANS = [Plan(space=[2, 1]), Plan(space=[3, 1]), Plan(space=[2, 2])]


def whole_image() -> torch.Tensor:
    return torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float64).view(SHAPE)


def random_cuts(draw: random.Random, sizes) -> list[list[int]]:
    return [
        [0, *sorted(draw.randint(0, extent) for _ in range(size - 1)), extent]
        for size, extent in zip(sizes, SHAPE[2:], strict=True)
    ]


def random_box(draw: random.Random):
    box = []
    for extent in SHAPE:
        a, b = sorted(draw.randint(0, extent) for _ in range(2))
        box.append(Interval(a, b))
    return tuple(box)


def any_boxes(mesh):
    """Twenty random exchanges of two tensors at once: every rank gets its boxes, one message per peer at most."""
    draw = random.Random(1)  # the same on every rank: all know what all want
    image = whole_image()
    for _ in range(20):
        tiled = wf.tile(image, mesh, random_cuts(draw, mesh.grid.sizes))
        boxes = tiled.tile_layout.boxes
        wanted = [[random_box(draw) for _ in boxes] for _ in range(2)]
        moves = [move_of(mesh.grid.index, boxes, boxes_of_one) for boxes_of_one in wanted]
        TRAFFIC.clear()
        tiles = [tiled.local, tiled.local.float()]  # of two dtypes in one message
        got = gather(moves, tiles, space_group(mesh.grid))
        for number, tensor in enumerate(got):
            expected = image[within(tuple(Interval(0, n) for n in SHAPE), wanted[number][mesh.grid.index])]
            torch.testing.assert_close(tensor, expected.to(tiles[number].dtype), rtol=0, atol=0)
        peers = {peer for move in moves for peer, _ in move.route.sends}
        assert TRAFFIC.pixel_messages == len(peers)
        bytes_sent = sum(
            torch.Size(size_of(box)).numel() * tile.element_size()
            for move, tile in zip(moves, tiles, strict=True)
            for _, box in move.route.sends
        )
        assert TRAFFIC.pixel_bytes == bytes_sent


@on_gpu_too
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.space))
def test_every_rank_gets_the_box_it_wants_in_one_message_per_peer(plan):
    on_ranks(plan.ranks, any_boxes, plan=plan)


def any_layouts(mesh):
    """From any layout to any other, also such that several ranks hold the same pixels."""
    draw = random.Random(2)
    image, grid = whole_image(), mesh.grid
    ways = [(0,), (1,), (0, 1), ()]
    for _ in range(30):
        layouts = []
        for _ in range(2):
            axes = list(draw.choice(ways)) if len([s for s in grid.sizes if s > 1]) > 1 else [0]
            dims = draw.sample(range(4), len(axes))
            cuts = [None] * 4
            for axis, dim in zip(axes, dims, strict=True):
                cuts[dim] = Cut((axis,), even_cut(SHAPE[dim], grid.sizes[axis]))
            layouts.append(layout_of(SHAPE, tuple(cuts), grid))
        there = _Tile.apply(image, layouts[0])
        moved_tile = wrap(redistribute(there, layouts[1]), layouts[1])
        assert torch.equal(moved_tile.local, image[within(tuple(Interval(0, n) for n in SHAPE), layouts[1].box)])
        assert torch.equal(wf.whole(moved_tile), image)


@on_gpu_too
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.space))
def test_any_layout_becomes_any_other(plan):
    on_ranks(plan.ranks, any_layouts, plan=plan)


def inner(mesh, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """<a, b> of two tiled tensors."""
    return (a * b).sum()


def adjoints(mesh):
    """<F x, y> = <x, F' y> (the dot-product test): F' is what autograd runs backward."""
    torch.manual_seed(3)
    weight = torch.randn(4, 3, 5, 3, dtype=torch.float64)
    operations = {
        "convolution": lambda x: F.conv2d(x, weight, stride=2, padding=(3, 1)),
        "transposed": lambda x: F.conv_transpose2d(x, weight.transpose(0, 1), stride=3, padding=1),
        "average pooling": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "resize": lambda x: F.interpolate(x, size=(9, 17), mode="bilinear"),
        "reflection": lambda x: F.pad(x, (2, 3, 4, 1), mode="reflect"),
        "roll": lambda x: x.roll((3, -2), (2, 3)),
        "slice": lambda x: x[:, :, 3:-2, ::2],
        "whole": wf.whole,
    }
    for name, operation in operations.items():
        x = wf.tile(torch.randn(SHAPE, dtype=torch.float64), mesh).detach().requires_grad_()
        out = operation(x)
        whole = torch.randn(out.shape, dtype=torch.float64)
        y = _Tile.apply(whole, out.tile_layout) if hasattr(out, "tile_layout") else whole
        (back,) = torch.autograd.grad(out, x, y)
        torch.testing.assert_close(inner(mesh, out, y), inner(mesh, x, back), rtol=1e-12, atol=1e-9, msg=name)


@on_gpu_too
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.space))
def test_backward_is_the_adjoint(plan):
    on_ranks(plan.ranks, adjoints, plan=plan)


def idle(mesh):
    """Who neither has nor wants foreign pixels sends nothing at all."""
    tiled = wf.tile(whole_image(), mesh)
    TRAFFIC.clear()
    redistribute(tiled, tiled.tile_layout)
    F.relu(tiled) + tiled * 2
    F.conv2d(tiled, torch.randn(4, 3, 1, 1, dtype=torch.float64))
    F.max_pool2d(tiled[:, :, :12], 1)
    return TRAFFIC.pixel_messages, TRAFFIC.sum_messages


@on_gpu_too
def test_operations_on_single_pixels_send_nothing():
    assert on_ranks(2, idle, plan=Plan(space=[2, 1])) == [(0, 0)] * 2


def overlapped(mesh):
    """A message is under way between `start` and `wait`: the tile may be read meanwhile."""
    tiled = wf.tile(whole_image(), mesh)
    other = move_cuts(tiled.tile_layout, (2,))
    move = move_for(tiled.tile_layout, other.boxes)
    pending = start([move], [tiled.local], space_group(mesh.grid))
    total = tiled.local.sum()
    (pieces,) = pending.wait()
    assert torch.equal(halo.assemble(move, tiled.local, pieces), redistribute(tiled, other))
    return bool(torch.isfinite(total))


@on_gpu_too
def test_an_exchange_is_started_and_waited_for_apart():
    assert on_ranks(2, overlapped, plan=Plan(space=[2, 1])) == [True, True]


def test_a_route_that_does_not_cover_what_is_wanted_is_our_bug():
    rows = [(Interval(0, 4),), (Interval(4, 8),)]
    with pytest.raises(AssertionError, match="4 px come for"):
        move_of(0, rows, [(Interval(0, 9),), (Interval(4, 8),)], [[0], [1]])


def test_layouts_that_are_equal_stay_one_while_tensors_have_them(monkeypatch):
    """Ranks that forgot them at different times would disagree on what must be sent."""
    monkeypatch.setattr(layout, "CACHE_SIZE", 1)
    grid = Grid((2,))
    held = layout_of((4,), (Cut((0,), (0, 2, 4)),), grid)
    layout_of((5,), (None,), grid)
    layout_of((6,), (None,), grid)
    assert layout_of((4,), (Cut((0,), (0, 2, 4)),), grid) is held
