"""Programs of modules on images that are not there, of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.capture.ir import Graph
from widefield.capture.trace import trace
from widefield.streaming.choice import Choice, choose
from widefield.streaming.schedule import TileSchedule, program_of
from widefield.streaming.spatial import SpatialStream
from widefield.streaming.storage.windowed_image import SINGLE_RANK, from_reader
from widefield.streaming.tile_planner import TracedOps, units_of


def graph_of(module: nn.Module, *shape: int, wants_grad: bool = False) -> Graph:
    """What a module does with an image of a shape, whose gradient may be wanted."""
    image = from_reader(torch.empty, shape)
    image.requires_grad = wants_grad
    return trace(module, module.forward, (image,), {})


def units(graph: Graph, tiles: Sequence[int]) -> TracedOps:
    spatial = SpatialStream(SINGLE_RANK, tuple(tiles))
    inputs = {value: spatial.cut(value.shape, None) for value in graph.inputs if value.ndim > len(tiles)}
    return units_of(graph, spatial.virtual, {value: layout for value, layout in inputs.items() if layout.is_cut})


def plain_program(graph: Graph, tiles: Sequence[int]) -> TileSchedule:
    """The program that keeps no more than it must."""
    return program_of(graph, units(graph, tiles))


def chosen(
    graph: Graph, tiles: tuple[int, ...] | None = None, budget: int | None = None, place: str | None = None, **others
) -> Choice:
    settings = {"fixed": 0, "trains": True} | others
    return choose(graph, tiles=tiles, budget=budget, place=place, read=lambda grid: units(graph, grid), **settings)


# ---------------------------------------------------------------------------------------------- nets


class Loss(nn.Module):
    """A net with one number for all that it gives, so that its output is never kept."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        return self.net(image).square().mean()


class UNet(nn.Module):
    """Two levels down and up again; `norm(channels)` after each convolution."""

    def __init__(self, norm: Callable[[int], nn.Module], widths: Sequence[int] = (16, 32, 32)) -> None:
        super().__init__()
        starts = [3, *widths]
        self.down = nn.ModuleList(_double(a, b, norm) for a, b in zip(starts, widths, strict=False))
        self.up = nn.ModuleList(_double(a + b, a, norm) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, skip in zip(reversed(self.up), reversed(skips[:-1]), strict=True):
            x = up(torch.cat([skip, F.interpolate(x, skip.shape[2:], mode="bilinear", align_corners=False)], 1))
        return x


def _double(start: int, width: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    pairs = ((start, width), (width, width))
    layers = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), norm(b), nn.ReLU())]
    return nn.Sequential(*layers)


def unet() -> nn.Module:
    return UNet(lambda _: nn.Identity())


def unet_with_norms() -> nn.Module:
    return UNet(nn.BatchNorm2d)


def stack(depth: int = 6, channels: int = 16) -> nn.Module:
    """Convolutions alone, whose halos grow and grow."""
    starts = [3, *[channels] * depth]
    layers = [(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in zip(starts, starts[1:], strict=False)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


class Residual(nn.Module):
    """Blocks as ConvNeXt has them: a depthwise window, a norm over channels, two products with GELU between, and a sum."""

    def __init__(self, channels: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, 4)
        self.deep = nn.ModuleList(nn.Conv2d(channels, channels, 7, padding=3, groups=channels) for _ in range(blocks))
        self.norm = nn.ModuleList(nn.LayerNorm(channels) for _ in range(blocks))
        self.wide = nn.ModuleList(nn.Linear(channels, 2 * channels) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Linear(2 * channels, channels) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, norm, wide, back in zip(self.deep, self.norm, self.wide, self.back, strict=True):
            y = norm(deep(x).permute(0, 2, 3, 1))
            x = x + back(F.gelu(wide(y))).permute(0, 3, 1, 2)
        return x.mean((2, 3))
