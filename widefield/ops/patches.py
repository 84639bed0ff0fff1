"""F.unfold, F.fold and Tensor.unfold, forward and backward: windows of pixels as dims of a new tensor, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from widefield.geometry.box import is_empty, size_of
from widefield.geometry.interval import Interval, even_cut
from widefield.geometry.layout import Cut
from widefield.geometry.window import EMPTY, Spread, Window, window_count
from widefield.ops.sampling import repeated
from widefield.rules import Local, LocalBoxes, Meta, Read, Tile, Windowed, case, composed, rule
from widefield.tiled.dispatch import by_rule
from widefield.tiled.redistribute import to_layout
from widefield.tiled.tensor import TiledTensor, wrap_view
from widefield.tiled.view_writeback import stable_alias, version_of

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------- patches: F.unfold, F.fold


@dataclass(frozen=True)
class _Patches:
    """The columns of F.unfold: column p * width + q is the patch at row p and column q.  rows: the patches' Window of rows."""

    rows: Window
    width: int

    def columns_of(self, rows: Interval) -> Interval:
        return Interval(rows.start * self.width, rows.stop * self.width)

    def rows_of(self, columns: Interval) -> Interval:
        """The rows of patches to which these columns belong."""
        return Interval(columns.start // self.width, -(-columns.stop // self.width)) if len(columns) else EMPTY

    def input_read_by(self, output: Interval) -> Interval:
        return self.rows.input_read_by(self.rows_of(output))

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(bound * self.width for bound in self.rows.cut_of(cut))


@dataclass(frozen=True)
class _Folded:
    """The adjoint of _Patches: a row of the image reads the columns of all patches that contain it."""

    patches: _Patches

    def input_read_by(self, output: Interval) -> Interval:
        return self.patches.columns_of(self.patches.rows.output_reading(output))

    def cut_of(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        return Spread(self.patches.rows).cut_of(tuple(-(-bound // self.patches.width) for bound in cut))


def _patches_of(extents: Sequence[int], size, dilation, padding, stride) -> _Patches:
    windows = []
    for n, extent in enumerate(extents):
        count = window_count(extent, size=size[n], stride=stride[n], padding=padding[n], dilation=dilation[n])
        if count < 1:
            raise ValueError(
                f"a patch reaching {dilation[n] * (size[n] - 1) + 1} px does not fit {extent} px padded to "
                f"{extent + 2 * padding[n]} px; use a larger image, a smaller patch, or more padding"
            )
        windows.append(Window(size[n], stride[n], dilation[n], padding[n], extent, count))
    return _Patches(windows[0], windows[1].count)


@rule(aten.im2col.default)
def im2col(image: Meta, kernel_size, dilation, padding, stride) -> Windowed:
    """(B, C, H, W) to (B, C * size, patches), cut by rows of patches: as H is cut; if W is cut, evenly over their axes."""
    if image.ndim != 4:
        raise NotImplementedError(f"unfold on tiles wants (B, C, H, W), not {image.ndim} dims; add image[None]")
    patches = _patches_of(image.shape[2:], kernel_size, dilation, padding, stride)
    area = kernel_size[0] * kernel_size[1]
    shape = (image.shape[0], image.shape[1] * area, patches.rows.count * patches.width)
    cuts = (image.cuts[0], _scaled(image.cuts[1], area), _columns_cut(image, patches))
    reach = {1: repeated(image.shape[1], area), 2: patches}

    def prepare(part: LocalBoxes) -> Callable[[Tensor], Tensor]:
        if is_empty(part.reads[0]):
            return partial(Tensor.new_zeros, size=size_of(part.write))
        rows = patches.rows_of(part.write[2])
        needed, read = patches.rows.input_read_by(rows), part.reads[0][2]
        extra = [0, 0, read.start - needed.start, needed.stop - read.stop]
        at = _slice_of(patches.columns_of(rows), part.write[2])

        def run(tile: Tensor) -> Tensor:
            tile = F.pad(tile, extra) if any(extra) else tile
            return _cropped(aten.im2col.default(tile, kernel_size, dilation, [0, padding[1]], stride), at)

        return run

    return Windowed([Read(image, reach)], [Tile(shape, cuts)], prepare)


def _scaled(cut: Cut | None, times: int) -> Cut | None:
    return None if cut is None else Cut(cut.axes, tuple(bound * times for bound in cut.bounds))


def _columns_cut(image: Meta, patches: _Patches) -> Cut | None:
    high, wide = image.cuts[2:]
    if wide is None:
        return None if high is None else Cut(high.axes, patches.cut_of(high.bounds))
    assert image.layout is not None
    axes = (*(high.axes if high is not None else ()), *wide.axes)
    return _scaled(Cut(axes, even_cut(patches.rows.count, image.layout.grid.num_shards(axes))), patches.width)


def _slice_of(made: Interval, wanted: Interval) -> slice | None:
    return None if made == wanted else slice(wanted.start - made.start, wanted.stop - made.start)


def _cropped(columns: Tensor, at: slice | None) -> Tensor:
    return columns if at is None else columns[:, :, at].contiguous()


@rule(aten.col2im.default)
def col2im(columns: Meta, output_size, kernel_size, dilation, padding, stride) -> Windowed:
    """(B, C * size, patches) to (B, C, H, W): every pixel is the sum over the patches that contain it."""
    if columns.ndim != 3:
        raise NotImplementedError(f"fold on tiles wants (B, C * size, patches), not {columns.ndim} dims; add columns[None]")
    patches = _patches_of(output_size, kernel_size, dilation, padding, stride)
    area, rows = kernel_size[0] * kernel_size[1], patches.rows
    if columns.shape[1] % area or columns.shape[2] != rows.count * patches.width:
        raise ValueError(
            f"fold of {columns.shape[1]} x {columns.shape[2]} columns to {list(output_size)} px does not fit: it wants a "
            f"multiple of {area} and {rows.count} * {patches.width} patches; give the sizes that unfold had"
        )
    channels = columns.shape[1] // area
    reach = {1: Window(area, area, extent=columns.shape[1], count=channels), 2: _Folded(patches)}

    def prepare(part: LocalBoxes) -> Callable[[Tensor], Tensor]:
        if is_empty(part.reads[0]):
            return partial(Tensor.new_zeros, size=size_of(part.write))
        made = rows.input_read_by(patches.rows_of(part.reads[0][2]))
        extra = [0, 0, made.start - part.write[2].start, part.write[2].stop - made.stop]
        size = [len(made), output_size[1]]

        def run(tile: Tensor) -> Tensor:
            image = aten.col2im.default(tile, size, kernel_size, dilation, [0, padding[1]], stride)
            return F.pad(image, extra) if any(extra) else image

        return run

    return Windowed([Read(columns, reach)], [Tile((columns.shape[0], channels, *output_size))], prepare)


# ---------------------------------------------------------------------------------------------- Tensor.unfold


@composed(aten.unfold.default)
def unfold(tensor: TiledTensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of a dim as a new last dim: a view, or where the dim is cut a copy, writes to which are written back."""
    made = by_rule(_unfolded, aten.unfold.default, (tensor, dimension, size, step), {})
    dim = dimension % max(1, tensor.ndim)
    if tensor.tile_layout.cuts[dim] is None:
        return made
    stride = tensor.stride(dim)
    strides = (*tensor.stride()[:dim], stride * step, *tensor.stride()[dim + 1 :], stride)
    view = wrap_view(made.local, made.tile_layout, strides)
    view.writeback, view.may_alias_data, view.may_overlap = (
        _Windows(tensor, made, dim, size, step),
        tensor.may_alias_data,
        tensor.may_overlap,
    )
    tensor.has_views = True
    return view


class _Windows:
    """The write-back of windows of a cut dim; the counterpart of view_writeback.ViewWriteback."""

    def __init__(self, source: TiledTensor, windows: TiledTensor, dim: int, size: int, step: int) -> None:
        self.source, self.windows, self.at = stable_alias(source), windows, (dim, size, step)
        self.version = version_of(source)

    def flush(self, version: int) -> None:
        """Write the windows' pixels back to the tensor.  NotImplementedError: windows overlap."""
        _, size, step = self.at
        if size > step:
            raise NotImplementedError(
                f"windows of {size} px, {step} px apart, share pixels that they cannot write to in place on tiles: "
                f"write to x, or to windows at least {size} px apart, or to x.unfold(...).clone()"
            )
        source, self.version = self.source, version
        pixels, in_windows = (
            aten.unfold_backward.default(part, list(source.shape), *self.at)
            for part in (self.windows, aten.ones_like.default(self.windows, dtype=torch.bool))
        )
        layout = source.tile_layout
        source.local.copy_(torch.where(to_layout(in_windows, layout), to_layout(pixels, layout), source.local))
        if source.writeback is not None:
            source.writeback.flush(version)

    def refresh(self, version: int) -> None:
        """Copy the windows from the tensor again, if it was written to since."""
        if version == self.version:
            return
        self.version = version
        if self.source.writeback is not None:
            self.source.writeback.refresh(version)
        self.windows.local.copy_(by_rule(_unfolded, aten.unfold.default, (self.source, *self.at), {}).local)


def _unfolded(tensor: Meta, dimension: int, size: int, step: int) -> Windowed | Local:
    dim = dimension % max(1, tensor.ndim)
    window = _window_of(tensor.shape, dim, size, step)
    shape = (*tensor.shape[:dim], window.count, *tensor.shape[dim + 1 :], size)
    if tensor.cuts[dim] is None:  # a view, as in torch
        return Local(
            [tensor], lambda layout: [(shape, (*layout.cuts, None))], lambda _, tile: tile.unfold(dim, size, step), is_view=True
        )

    def prepare(part: LocalBoxes) -> Callable[[Tensor], Tensor]:
        return lambda tile: tile.unfold(dim, size, step).clone()  # memory of its own, with the dims in the view's order

    return Windowed([Read(tensor, {dim: window})], [Tile(shape)], prepare)


def _window_of(shape: Sequence[int], dim: int, size: int, step: int) -> Window:
    if not shape or step < 1 or not 0 < size <= shape[dim]:
        raise ValueError(
            f"unfold by windows of {size} px, {step} px apart, does not fit dim {dim} of {list(shape)}; "
            "give a window within the image and a positive step"
        )
    return Window(size, step, extent=shape[dim], count=window_count(shape[dim], size=size, stride=step, padding=0))


@rule(aten.unfold_backward.default)
def unfold_backward(grad: Meta, input_sizes, dim: int, size: int, step: int) -> Windowed:
    """Every pixel is the sum over the windows that contain it."""
    dim %= max(1, len(input_sizes))
    window = _window_of(input_sizes, dim, size, step)

    def prepare(part: LocalBoxes) -> Callable[[Tensor], Tensor]:
        if is_empty(part.reads[0]):
            return partial(Tensor.new_zeros, size=size_of(part.write))
        made = window.input_read_by(part.reads[0][dim])
        extra = [0, 0] * (len(input_sizes) - 1 - dim)
        extra += [made.start - part.write[dim].start, part.write[dim].stop - made.stop]
        sizes = list(size_of(part.write))
        sizes[dim] = len(made)

        def run(tile: Tensor) -> Tensor:
            whole = aten.unfold_backward.default(tile, sizes, dim, size, step)
            return F.pad(whole, extra) if any(extra) else whole

        return run

    return Windowed([Read(grad, {dim: Spread(window)})], [Tile(tuple(input_sizes))], prepare)


# ---------------------------------------------------------------------------------------------- cases


def _windows_written(x: Tensor) -> Tensor:
    y = x * 1
    y.unfold(2, 3, 3).unfold(3, 2, 4)[..., 1].add_(7)
    y[:, :, 1:].unfold(2, 4, 4)[:, 1:].fill_(3)
    return y * y


def _windows_written_alternately(x: Tensor) -> list[Tensor]:
    y = (x * 1).detach()
    windows = y.unfold(2, 2, 5)
    y.add_(1)
    windows[..., 0].mul_(4)
    sines = windows.sin()
    y.mul_(2)
    return [y, sines, windows * 1]


CASES = [
    case("patches 3x3", lambda x: F.unfold(x, 3, padding=1), (2, 3, 13, 9)),
    case("patches, odd", lambda x: F.unfold(x, (3, 2), dilation=(2, 1), padding=(3, 1), stride=(2, 3)), (2, 2, 17, 10)),
    case("patches apart", lambda x: F.unfold(x, 2, stride=4), (2, 2, 17, 10)),
    case("patches of ViT", lambda x: F.unfold(x, 4, stride=4), (2, 3, 16, 12)),
    case("patches as tokens", lambda x: F.unfold(x, 4, stride=4).transpose(1, 2) ** 2, (2, 3, 16, 12)),
    case("patches, channels cut", lambda x: F.unfold(x.transpose(1, 2), 3), (2, 7, 6, 8)),
    case("patches without a batch", lambda x: F.unfold(x, 3), (3, 12, 9), refuses=r"add image\[None\]"),
    case("patch does not fit", lambda x: F.unfold(x, 9), (1, 2, 7, 12), refuses="does not fit"),
    case("fold", lambda x: F.fold(x, (9, 8), 3, padding=1), (2, 18, 72)),
    case("fold, odd", lambda x: F.fold(x, (17, 10), (3, 2), (2, 1), (3, 1), (2, 3)), (2, 12, 40)),
    case(
        "fold of other sizes",
        lambda x: aten.col2im(x, [9, 8], [3, 3], [1, 1], [1, 1], [1, 1]),
        (2, 18, 71),
        refuses="does not fit",
    ),
    case("fold apart", lambda x: F.fold(x, (17, 10), 2, stride=4), (2, 8, 12)),
    case("patches and back", lambda x: F.fold(F.unfold(x, 3, padding=1), (13, 9), 3, padding=1), (2, 3, 13, 9)),
    case("fold, channels cut", lambda x: F.fold(x.transpose(1, 2), (7, 8), 3), (2, 30, 18)),
    case("fold without a batch", lambda x: F.fold(x, (9, 8), 3, padding=1), (18, 72), refuses=r"add columns\[None\]"),
    case("unfold rows", lambda x: x.unfold(2, 3, 2), (2, 3, 13, 9)),
    case("unfold columns", lambda x: x.unfold(-1, 4, 1), (2, 3, 13, 9)),
    case("unfold into patches", lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2), (2, 3, 13, 9)),
    case("unfold apart", lambda x: x.unfold(2, 2, 5), (2, 3, 17, 9)),
    case("unfold channels", lambda x: x.unfold(1, 2, 1), (2, 4, 9, 7)),
    case("unfold 1-D", lambda x: x.unfold(0, 3, 2), (19,)),
    case("written to windows", lambda x: (y := x * 1, y.unfold(2, 2, 3).mul_(5), y * y)[-1], (2, 3, 17, 9)),
    case("written to windows of windows", _windows_written, (2, 3, 17, 9)),
    case("windows and their tensor written in turn", _windows_written_alternately, (2, 3, 17, 9)),
    case("written to windows that overlap", lambda x: (x * 1).unfold(2, 3, 2).mul_(2), (2, 3, 9, 7), refuses="share pixels"),
    case("unfold too far", lambda x: x.unfold(2, 12, 1), (2, 3, 9, 7), refuses="does not fit"),
]
