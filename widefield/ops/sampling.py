"""grid_sample, pixel_shuffle, pixel_unshuffle and channel_shuffle.

What `grid_sample` reads depends on the grid's values.  So every rank gets the image with its spatial dims whole, and computes
the output of its part of the grid; the image's gradient is added up over ranks.  A pixel shuffle reads windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.comm import halo
from widefield.geometry.interval import natural_cut
from widefield.geometry.layout import Cut, Cuts, Layout, layout_of, uncut
from widefield.geometry.window import Spread, Window
from widefield.private_torch.fake_tensors import runs_on_gpu
from widefield.rules import Local, LocalBoxes, Meta, Read, Tile, Windowed, case, composed, rule
from widefield.tiled.redistribute import tile_by
from widefield.tiled.tensor import TiledTensor, wrap

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- grid_sample


def _sample(kernel: Any, image: Meta, grid: Meta, *options: Any) -> Local:
    """grid_sample of an image (B, C, H, W) at a grid (B, ..., 2), or the same in 3-D."""
    layout = _sampled_layout(image, grid)
    of_image, of_grid = _source_layouts(image, grid, layout)

    def outs(_: Layout) -> list[tuple[tuple[int, ...], Cuts | None]]:
        return [(layout.shape, layout.cuts)]

    def run(_: Layout, pixels: Tensor, places: Tensor) -> Tensor:
        return kernel(pixels, places, *options)

    return Local([grid, image], outs, run, layouts=[of_grid, of_image])


def _sample_backward(kernel: Any, grad: Tensor, image: Tensor, grid: Tensor, *options: Any) -> tuple[Any, Any]:
    """The gradients of image and grid.  Every rank's outputs add to the image's."""
    layout = grad.tile_layout if type(grad) is TiledTensor and grad.tile_layout.is_cut else _sampled_layout(image, grid)
    of_pixels, of_places = _source_layouts(image, grid, layout)
    of_image, of_grid = kernel(tile_by(grad, layout), tile_by(image, of_pixels), tile_by(grid, of_places), *options)
    space = _axes_of(layout.cuts[2:])
    channels = _axes_of(layout.cuts[1:2])
    return _add_up(of_image, of_pixels, space, image), _add_up(of_grid, of_places, channels, grid)


def _layout(tensor: Tensor | Meta) -> Layout | None:
    """Of a tensor or its Meta; None for a plain one."""
    return tensor.layout if isinstance(tensor, Meta) else tensor.tile_layout if type(tensor) is TiledTensor else None


def _sampled_layout(image: Tensor | Meta, grid: Tensor | Meta) -> Layout:
    """The output's layout: cut like the grid; a dim that is uncut there like the image's."""
    shape = (*image.shape[:2], *grid.shape[1:-1])
    of_image, of_places = _layout(image), _layout(grid)
    ranks = next(layout.grid for layout in (of_image, of_places) if layout is not None)
    along: Cuts = (None,) * grid.ndim if of_places is None else of_places.cuts
    cuts: list[Cut | None] = [along[0], None, *along[1:-1]]
    used = set(_axes_of(cuts))
    for dim, cut in enumerate(() if of_image is None else of_image.cuts):
        if cut is not None and cuts[dim] is None and not used & set(cut.axes):
            same = shape[dim] == image.shape[dim]
            cuts[dim] = cut if same else Cut(cut.axes, natural_cut(shape[dim], ranks.num_shards(cut.axes)))
    return layout_of(shape, tuple(cuts), ranks)


def _source_layouts(image: Tensor | Meta, grid: Tensor | Meta, layout: Layout) -> tuple[Layout, Layout]:
    """What a tile of the output reads: its samples and channels of the image, whole in space, and its part of the grid."""
    pixels = layout_of(tuple(image.shape), (*layout.cuts[:2], *[None] * (image.ndim - 2)), layout.grid)
    return pixels, layout_of(tuple(grid.shape), (layout.cuts[0], *layout.cuts[2:], None), layout.grid)


def _axes_of(cuts: Sequence[Cut | None]) -> tuple[int, ...]:
    return tuple(sorted(axis for cut in cuts if cut is not None for axis in cut.axes))


def _add_up(part: Tensor | None, layout: Layout, axes: tuple[int, ...], like: Tensor) -> Tensor | None:
    """The sum of `part`, a tile by `layout`, over ranks along `axes`; in the layout of `like`, or plain like it."""
    if part is None:
        return None
    whole = halo.add_sums(part, layout.grid.group_name(axes)) if layout.grid.num_shards(axes) > 1 else part
    target = like.tile_layout if type(like) is TiledTensor else uncut(tuple(like.shape), layout.grid)
    tile = tile_by(wrap(whole, layout), target)
    return wrap(tile, target) if type(like) is TiledTensor else tile


for _op in (aten.grid_sampler_2d, aten.grid_sampler_3d):
    rule(_op.default)(partial(_sample, _op.default))
for _op in (aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward):
    composed(_op.default)(partial(_sample_backward, _op.default))


@composed(aten.cudnn_grid_sampler.default)
def cudnn_grid_sampler(image: Tensor, grid: Tensor) -> Tensor:
    """CuDNN's grid_sample: bilinear, zeros outside, corners aligned."""
    return aten.grid_sampler_2d.default(image, grid, 0, 0, True)


@composed(aten.cudnn_grid_sampler_backward.default)
def cudnn_grid_sampler_backward(image: Tensor, grid: Tensor, grad: Tensor) -> tuple:
    return _sample_backward(aten.grid_sampler_2d_backward.default, grad, image, grid, 0, 0, True, [True, True])


# ---------------------------------------------------------------------------------------------- channels and space


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(image: Meta, factor: int) -> Windowed:
    """Channels (c, i, j) become pixels (h * factor + i, w * factor + j) of channel c."""
    channel = _channel_dim(image, factor)
    shape = list(image.shape)
    shape[channel] //= factor**2
    for dim in (channel + 1, channel + 2):
        shape[dim] *= factor
    reach = {channel: Window(factor**2, factor**2, extent=image.shape[channel], count=shape[channel])}
    reach |= {dim: repeated(image.shape[dim], factor) for dim in (channel + 1, channel + 2)}
    return _blocks_rule(image, reach, shape, partial(torch.pixel_shuffle, upscale_factor=factor))


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(image: Meta, factor: int) -> Windowed:
    channel = _channel_dim(image, factor, shuffled=True)
    shape = list(image.shape)
    shape[channel] *= factor**2
    for dim in (channel + 1, channel + 2):
        shape[dim] //= factor
    reach = {channel: repeated(image.shape[channel], factor**2)}
    reach |= {dim: Window(factor, factor, extent=image.shape[dim], count=shape[dim]) for dim in (channel + 1, channel + 2)}
    return _blocks_rule(image, reach, shape, partial(torch.pixel_unshuffle, downscale_factor=factor))


def _channel_dim(image: Meta, factor: int, *, shuffled: bool = False) -> int:
    """The channels' dim.  ValueError: channels, or for an unshuffle rows and columns, are no multiples of the block."""
    name = "pixel_unshuffle" if shuffled else "pixel_shuffle"
    if image.ndim < 3 or factor < 1:
        raise ValueError(f"{name} wants (..., C, H, W) and a positive factor; it got {image.shape} and {factor}")
    channel = image.ndim - 3
    sizes = image.shape[channel + 1 :] if shuffled else image.shape[channel : channel + 1]
    block = factor if shuffled else factor**2
    if any(size % block for size in sizes):
        what = "pixels" if shuffled else "channels"
        raise ValueError(f"{name} by {factor} wants multiples of {block} {what}, not {list(sizes)}; pad or change them")
    return channel


def repeated(extent: int, times: int) -> Spread:
    """The Reach by which output pixels times * i .. times * (i + 1) - 1 read input pixel i."""
    return Spread(Window(times, times, extent=extent * times, count=extent))


def _blocks_rule(image: Meta, reach: dict[int, Any], shape: Sequence[int], run: Callable[[Tensor], Tensor]) -> Windowed:
    """The rule of `run`, which rearranges blocks of pixels: it runs on all blocks that the tile meets, then crops."""

    def prepare(part: LocalBoxes) -> Callable[[Tensor], Tensor]:
        at = [slice(None)] * image.ndim
        for dim, how in reach.items():
            made = how.output_reading(part.reads[0][dim])
            at[dim] = slice(part.write[dim].start - made.start, part.write[dim].stop - made.start)
        if all(s.start in (0, None) and s.stop in (None, len(part.write[d])) for d, s in enumerate(at)):
            return lambda tile: run(tile)[tuple(at)]
        return lambda tile: run(tile)[tuple(at)].contiguous()

    return Windowed([Read(image, reach)], [Tile(tuple(shape))], prepare)


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(image: Meta, groups: int) -> Local:
    def outs(layout: Layout) -> list[tuple[tuple[int, ...], Cuts | None]]:
        return [(layout.shape, layout.cuts)]

    def run(layout: Layout, tile: Tensor) -> Tensor:
        if runs_on_gpu(tile):  # torch's kernel takes contiguous tiles alone there, and contiguous gradients
            return tile.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
        return aten.channel_shuffle.default(tile, groups)

    return Local([image], outs, run, whole=(1,))


# ---------------------------------------------------------------------------------------------- cases


def _places(grid: Tensor) -> Tensor:
    """A grid (B, ..., 2 or 3) of places in and around the image, from normal numbers (B, 2 or 3, ...)."""
    return (0.6 * grid).movedim(1, -1)


def _grid_sample(image: Tensor, grid: Tensor, **options: Any) -> Tensor:
    return F.grid_sample(image, _places(grid), **{"align_corners": False, **options})


def _turned(image: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta, [*image.shape[:2], 11, 8], align_corners=False)
    return F.grid_sample(image, grid, align_corners=False)


def _by_cudnn(image: Tensor, grid: Tensor) -> Tensor:
    if type(image) is TiledTensor or type(grid) is TiledTensor:
        return aten.cudnn_grid_sampler(image, _places(grid))
    return _grid_sample(image, grid, align_corners=True)


_IMAGE, _PLACES = (2, 3, 13, 9), (2, 2, 11, 7)
CASES = [
    case(f"grid_sample {mode} {outside} {align}", partial(_grid_sample, mode=mode, padding_mode=outside, align_corners=align),
         _IMAGE, _PLACES, tiled=tiled)
    for mode, outside, align, tiled in (
        ("bilinear", "zeros", False, (0, 1)), ("bilinear", "border", True, (0, 1)), ("bilinear", "reflection", False, (0,)),
        ("nearest", "zeros", True, (0, 1)), ("nearest", "reflection", False, (1,)), ("bicubic", "zeros", False, (0, 1)),
        ("bicubic", "border", False, (0,)), ("bicubic", "reflection", True, (1,)),
    )
]  # fmt: skip
CASES += [
    case("grid_sample 3-D", _grid_sample, (2, 2, 7, 6, 5), (2, 3, 5, 4, 6), tiled=(0, 1)),
    case("grid_sample 3-D, plain grid", partial(_grid_sample, padding_mode="border"), (1, 2, 7, 6, 5), (1, 3, 5, 4, 6)),
    case("grid_sample of the image's size", _grid_sample, (1, 2, 12, 9), (1, 2, 12, 9)),
    case("grid_sample to few rows", _grid_sample, (1, 2, 12, 9), (1, 2, 1, 3)),
    case("grid_sample, constant grid", lambda x, g: _grid_sample(x, g.detach()), _IMAGE, _PLACES),
    case("grid_sample, constant image", lambda x, g: _grid_sample(x.detach(), g), _IMAGE, _PLACES, tiled=(0, 1)),
    case("grid_sample, channels cut", lambda x, g: _grid_sample(x.transpose(1, 2), g), (2, 13, 6, 9), _PLACES),
    case("grid_sample by cuDNN", _by_cudnn, _IMAGE, _PLACES, tiled=(0, 1)),
    case("affine_grid", _turned, _IMAGE, (2, 2, 3)),
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 8, 9, 7)),
    case("pixel_shuffle 3, channels cut", lambda x: F.pixel_shuffle(x.transpose(1, 2), 3), (2, 5, 18, 7)),
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (2, 3, 18, 14)),
    case("pixel_unshuffle 3, channels cut", lambda x: F.pixel_unshuffle(x.transpose(1, 2), 3), (2, 15, 5, 9)),
    case("pixel_shuffle without a batch", lambda x: F.pixel_shuffle(x, 2), (4, 9, 7)),
    case("pixel_shuffle there and back", lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 3), 3), (1, 9, 11, 5)),
    case(
        "pixel_shuffle of 6 channels",
        lambda x: F.pixel_shuffle(x, 2),
        (1, 6, 9, 7),
        refuses="multiples of 4 channels|divisible",
    ),
    case(
        "pixel_unshuffle of 9 rows", lambda x: F.pixel_unshuffle(x, 2), (1, 3, 9, 8), refuses="multiples of 2 pixels|divisible"
    ),
    case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (2, 6, 9, 7)),
    case("channel_shuffle, channels cut", lambda x: F.channel_shuffle(x.transpose(1, 2), 3), (2, 5, 9, 7)),
    case("native_channel_shuffle", lambda x: F.native_channel_shuffle(x.detach(), 3), (2, 6, 9, 7)),
]
