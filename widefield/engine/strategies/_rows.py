"""Copies of a model as tiles of one batch: each rank has its rows, and the numbers are those of all samples at once.

Where samples do not meet, a copy runs on its own samples as if they were all, and nothing is lost.  They meet in a BatchNorm,
which is synchronized; in random numbers, of which one device draws a batch's in one go; in buffers that a forward writes, as
running statistics of an InstanceNorm or a queue; and in a layer that mixes samples, as a minibatch standard deviation.  A model
that has one of the last three runs on tiled tensors whose batch dim is cut over copies, by the same rules as images are.

That is found out and not asked: a forward that draws or writes is run again on rows; a model's first training forward runs on
rows once, where operations that send something between copies tell that samples meet, or other numbers than a copy's alone.
"""

from __future__ import annotations

import datetime
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from widefield.engine import collectives, halo
from widefield.engine.ghost import counted, is_ghost, real_buffers
from widefield.engine.layout import Cut, Grid, Layout, layout_of
from widefield.engine.mesh import Mesh, device_of_words
from widefield.engine.mixing import Watch
from widefield.engine.nests import refuse_hidden
from widefield.engine.partial import settled
from widefield.engine.places import is_dense, on_layout
from widefield.engine.strategies._forward_state import ForwardState
from widefield.engine.strategies._halves import differ, mix_among_themselves
from widefield.engine.strategies._route import Compiled
from widefield.engine.strategies._unit_calls import Parted
from widefield.engine.stream.streamed import Streamed
from widefield.engine.tiled import TiledTensor, wrap, wrap_view
from widefield.engine.tiling import cut_by
from widefield.geometry.strides import strides_like

PATIENCE_SECONDS = 120.0
"""For other copies to find out that a model draws, too."""
ADVICE = (
    "set mesh.independent=true to let each copy draw, write to buffers and mix samples by itself, which is not one device's"
)


class Rows:
    """How a model is run on several copies; `call` runs it.

    group: of the ranks that have the same part of the model, for small messages of this model alone.
    ended: called where a forward has ended, or failed, for who sends on this group inside of forwards; it may raise Parted.
    """

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup, ended: Callable[[str], None] = lambda how: None) -> None:
        self.mesh, self.group, self.ended, self.has_said = mesh, group, ended, False
        self.together: dict[bool, bool] = {}
        """Whether samples meet, in training mode and in evaluation mode, as far as that is known."""
        self.rows_each: dict[bool, list[int | None]] = {}
        """In each mode, how many rows of each output belong to a sample; 0 of one of all samples, None of what is no tensor."""
        self.gives_sums = False
        """Whether the last forward on rows gave something of all samples together."""

    def call(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """What `run(*args, **kwargs)`, the forward of `model`, gives for this copy's samples among all."""
        if not (model.training or torch.is_grad_enabled()):
            return run(*args, **kwargs)
        refuse_hidden(model, (args, kwargs), "is given")
        if not _samples_in(args, kwargs):
            return run(*args, **kwargs)
        plain = run.uncompiled if isinstance(run, Compiled) else run
        run, plain, is_compiled = partial(self._ended, run), partial(self._ended, plain), plain is not run
        if model.training not in self.together:
            self._find_out(model, plain, args, kwargs)
        if self.together[model.training]:
            return self._on_rows(model, plain, args, kwargs, is_slower=is_compiled)
        before = ForwardState(model)
        output = run(*args, **kwargs)
        if not before.has_changed() or not self._some(True):
            return output
        before.restore()
        self.together[model.training] = True
        return self._on_rows(model, plain, args, kwargs, is_slower=is_compiled)

    def _ended(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward, and that it has ended, or failed, on every copy."""
        try:
            output = run(*args, **kwargs)
        except Parted:
            raise
        except Exception:
            with suppress(Parted):  # that error tells more
                self.ended("an error")
            raise
        self.ended("the end of the forward")
        return output

    # ------------------------------------------------------------------------------------------ finding out

    def _find_out(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        """Run the model by itself, and on rows where that tells more, and leave no trace."""
        before = ForwardState(model)
        failed: Exception | None = None
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, _same):  # not those around, which count what is saved
            try:
                output = run(*args, **kwargs)
            except Exception as error:
                failed = error
            if self._some(failed is not None):  # copies differ in how many samples they have, and so in their tiles
                raise failed or NotImplementedError("another copy of the model cannot run on its samples, and says why")
            refuse_hidden(model, output, "returns")
            self.rows_each[model.training] = self._rows_each(tree_leaves(output), len(_samples_in(args, kwargs)[0]))
            meets, statistics = self._some(before.has_changed(by_value=True)), _statistics(model)
            before.restore()
            self.together[model.training] = meets or self._mixes(model, run, args, kwargs, (output, statistics))
            before.restore()

    def _rows_each(self, leaves: list[Any], count: int) -> list[int | None]:
        """How many rows of each output belong to a sample, by what `count` samples alone gave on any copy that has some.

        Not known where copies give unequally many outputs.
        """
        many = torch.tensor([len(leaves), -len(leaves)], device=device_of_words(self.group))
        dist.all_reduce(many, dist.ReduceOp.MAX, group=self.group)
        if many.sum():
            return [None] * len(leaves)
        found = [divmod(len(leaf), count) if isinstance(leaf, Tensor) and leaf.ndim and count else (0, 0) for leaf in leaves]
        told = torch.tensor([0 if more else each for each, more in found], device=device_of_words(self.group))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return [each if isinstance(leaf, Tensor) else None for leaf, each in zip(leaves, told.tolist(), strict=True)]

    def _some(self, holds: bool) -> bool:
        """Whether something holds on some rank; RuntimeError where not all come to ask."""
        found = torch.tensor([int(holds)], device=device_of_words(self.group))
        work = dist.all_reduce(found, group=self.group, async_op=True)
        try:
            work.wait(datetime.timedelta(seconds=PATIENCE_SECONDS))
        except RuntimeError as error:
            raise RuntimeError(
                "this forward drew random numbers or wrote to a buffer, which none before it did, and within "
                f"{PATIENCE_SECONDS:.0f} s not all {self.mesh.copies} copies of the model came to the same place; let it do so "
                f"on every copy or on none, or {ADVICE}"
            ) from error
        return bool(found.item())

    def _mixes(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict, made: Any) -> bool:
        """Whether samples of several copies meet, on any copy, in an operation on the rows of all or by what that gives.

        made: what the copy alone gave, and the statistics of BatchNorms, which are synchronized; their images' scale is no
        longer seen behind them.
        """
        watch = Watch(self.mesh.grid_of_rows())
        try:
            with watch:
                among_all = self._run(model, run, args, kwargs), _statistics(model)
        except NotImplementedError:  # raised on every rank, before any message
            mixes = mix_among_themselves(model, run, args, kwargs, _samples_in(args, kwargs)) or bool(watch.found)
            return self._some(mixes and not is_ghost(model))
        pairs = zip(tree_leaves(made), tree_leaves(among_all), strict=True)
        apart = [differ(alone, found) for alone, found in pairs]  # all of them, for ranks look at them together
        mixes = bool(watch.found) or self.gives_sums or any(apart)
        return self._some(mixes and not is_ghost(model))

    # ------------------------------------------------------------------------------------------ on rows

    def _on_rows(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict, *, is_slower: bool) -> Any:
        """What `_run` gives, and why it has to be so where it cannot.  is_slower: than the compiled model, as is said once."""
        if is_slower and not self.has_said:
            self.has_said = True
            warnings.warn(
                f"{type(model).__qualname__} draws random numbers, writes to buffers or mixes samples, so its "
                f"{self.mesh.copies} copies share a batch, of which each rank has its rows, and run uncompiled; {ADVICE}",
                stacklevel=2,
            )
        try:
            return self._run(model, run, args, kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{type(model).__qualname__} draws random numbers, writes to buffers or mixes samples, so its "
                f"{self.mesh.copies} copies share a batch, of which each rank has its rows in place of a tile: {error}. Or "
                f"{ADVICE}"
            ) from error

    def _run(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The forward on tiled tensors whose batch dim is cut over copies; of what it gives, what is this copy's."""
        if isinstance(model, Streamed):
            raise NotImplementedError("a stream runs tiles of images and no rows of a batch; set stream=null")
        samples = _samples_in(args, kwargs)
        count = len(samples[0])
        rows = self._rows_of(samples[0], 0 if is_ghost(model) else count)
        if is_ghost(model):
            real_buffers(model)

        def entered(leaf: Any) -> Any:
            if not any(leaf is each for each in samples):
                return leaf
            layout = rows.of_batch(leaf)
            return _Enter.apply(leaf, rows, layout, 1, _strides_of_batch(leaf, layout))

        with counted(model):
            leaves, spec = tree_flatten(run(*tree_map(entered, args), **tree_map(entered, kwargs)))
        known = self.rows_each[model.training]
        pairs = list(zip(leaves, known if len(known) == len(leaves) else [None] * len(leaves), strict=True))
        self.gives_sums = any(_is_of_all(leaf, each, rows) for leaf, each in pairs)
        return tree_unflatten([_left(leaf, rows, count, n) if isinstance(leaf, Tensor) else leaf for leaf, n in pairs], spec)

    def _rows_of(self, sample: Tensor, count: int) -> _Share:
        """Which rows of the batch this copy has; one small message."""
        tiles, device = self.mesh.grid.size, device_of_words(self.group)
        mine = torch.tensor([count, zlib.crc32(str(tuple(sample.shape[1:])).encode())], dtype=torch.int64, device=device)
        told = mine.new_empty(self.group.size(), 2)
        collectives.all_gather_single(told, mine[None], group=self.group)
        of_copies = told[::tiles].tolist()
        if len({shape for rows, shape in of_copies if rows}) > 1:
            raise NotImplementedError(
                f"copies got samples of different sizes, this one {tuple(sample.shape[1:])}, which make no batch; give all of "
                "them one size"
            )
        bounds = [0]
        for rows, _ in of_copies:
            bounds.append(bounds[-1] + rows)
        return _Share(self.mesh.grid_of_rows(), self.mesh.grid, tuple(bounds))


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers of its BatchNorms, as they are now."""
    return [b.detach().clone() for part in model.modules() if isinstance(part, _BatchNorm) for b in part.buffers(recurse=False)]


def _samples_in(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that have a row for each sample: as many as the first."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def _same(tensor: Any) -> Any:
    """(A result that is saved as it is would hold the operation that saves it, and neither would ever go.)"""
    return tensor


# ---------------------------------------------------------------------------------------------- into rows and out of them


@dataclass(frozen=True)
class _Share:
    """grid: copies first, then the axes of `tiles`, the ranks that share this copy's images.  bounds: of the copies' rows."""

    grid: Grid
    tiles: Grid
    bounds: tuple[int, ...]

    @property
    def copies(self) -> int:
        return len(self.bounds) - 1

    @property
    def bounds_here(self) -> tuple[int, int]:
        """Of this copy's rows."""
        copy = self.grid.index // self.tiles.size
        return self.bounds[copy], self.bounds[copy + 1]

    def of_batch(self, tensor: Tensor) -> Layout:
        """The layout on the grid of a tensor of this copy's samples."""
        cuts = tensor.laid.cuts[1:] if type(tensor) is TiledTensor else (None,) * (tensor.ndim - 1)
        further = [None if cut is None else Cut(tuple(axis + 1 for axis in cut.axes), cut.bounds) for cut in cuts]
        return layout_of((self.bounds[-1], *tensor.shape[1:]), (Cut((0,), self.bounds), *further), self.grid)

    def local(self, layout: Layout, count: int | None = None) -> Layout | None:
        """What a tile is a tile of, on this copy alone; None where it is plain.  count: of its rows, where these are cut."""
        if not self.tiles.sizes:
            return None
        cuts = [
            None if cut is None or 0 in cut.axes else Cut(tuple(axis - 1 for axis in cut.axes), cut.bounds)
            for cut in layout.cuts
        ]
        whole = [n if cut is not None else here for n, here, cut in zip(layout.shape, layout.tile_shape, cuts, strict=True)]
        return layout_of(tuple(whole) if count is None else (count, *whole[1:]), tuple(cuts), self.tiles)


def _strides_of_batch(sample: Tensor, layout: Layout) -> tuple[int, ...] | None:
    """Those of all copies' samples, where this copy's tell: a row or a tile that is thin or empty does not."""
    return strides_like(layout.shape, sample.stride()) if is_dense(sample) else None


class _Enter(torch.autograd.Function):
    """This copy's samples, times a factor, as their rows of the batch.

    A loss of this copy's counts by its mean over copies, so the gradient of the batch's is that share of it, and back.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, rows: _Share, layout: Layout, factor: float, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        ctx.rows, ctx.layout, ctx.count, ctx.factor = rows, layout, len(tensor), factor
        local, tensor = rows.local(layout, len(tensor)), settled(tensor)
        own = (tensor if local is None else on_layout(tensor, local))[: layout.tile_shape[0]]
        return wrap_view(own if factor == 1 else own * factor, layout, strides)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows = ctx.rows
        return _Leave.apply(grad, rows, ctx.layout, ctx.count, ctx.factor * rows.copies), None, None, None, None


class _Leave(torch.autograd.Function):
    """The rows of this copy's samples, times a factor; zeros for the `count` samples of a stand-in, which count nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: _Share, layout: Layout, count: int, factor: float) -> Tensor:
        ctx.rows, ctx.layout, ctx.factor = rows, layout, factor
        own = on_layout(settled(tensor), layout)
        if len(own) != count:
            own = own.new_zeros(count, *own.shape[1:])
        own = own.view_as(own) if factor == 1 else own * factor
        local = rows.local(layout, count)
        return own if local is None else wrap_view(own, local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Enter.apply(grad, ctx.rows, ctx.layout, ctx.factor / ctx.rows.copies), None, None, None, None


class _OfAll(torch.autograd.Function):
    """What all samples give together, as a mean over the batch: every copy has it, and its gradient is the mean of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: _Share, layout: Layout | None) -> Tensor:
        ctx.rows, ctx.layout = rows, layout
        if layout is None:
            return tensor.view_as(tensor)
        own, local = on_layout(settled(tensor), layout), rows.local(layout)
        own = own.view_as(own)
        return own if local is None else wrap_view(own, local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Mean.apply(grad, ctx.rows, ctx.layout), None, None


class _Mean(torch.autograd.Function):
    """The mean over copies, as what all samples give together."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: _Share, layout: Layout | None) -> Tensor:
        ctx.rows, ctx.layout = rows, layout
        local = None if layout is None else rows.local(layout)
        part = settled(tensor) if local is None else on_layout(settled(tensor), local)
        mean = halo.add_sums(part.contiguous(), rows.grid.group_name((0,))) / rows.copies
        return mean if layout is None else wrap(mean, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _OfAll.apply(grad, ctx.rows, ctx.layout), None, None


def _is_of_all(leaf: Any, each: int | None, rows: _Share) -> bool:
    """Whether a result, which is no number, is of all samples of a batch together; by chance it may be what one copy gives."""
    return type(leaf) is TiledTensor and leaf.ndim > 0 and each is not None and len(leaf) != each * rows.bounds[-1]


def _left(tensor: Tensor, rows: _Share, count: int, each: int | None) -> Tensor:
    """What this copy gets of a result.

    count: of its samples, where it has none that count.  each: how many rows of the result belong to a sample, 0 where it is of
    all; where that is not known, a result that is cut by samples is theirs.
    """
    by_samples = None
    if each and tensor.ndim and len(tensor) == each * rows.bounds[-1]:
        by_samples = Cut((0,), tuple(bound * each for bound in rows.bounds))
    if type(tensor) is not TiledTensor:  # made for the batch, of no sample, or written to with what is of samples
        if by_samples is None:
            return _OfAll.apply(tensor, rows, None) if tensor.requires_grad else tensor
        tensor = cut_by(tensor, layout_of(tuple(tensor.shape), (by_samples, *[None] * (tensor.ndim - 1)), rows.grid))
    layout = tensor.laid
    first = layout.cuts[0] if layout.cuts else None
    cuts = [None if cut is not None and 0 in cut.axes else cut for cut in layout.cuts]
    if each is None and first is not None and first.axes == (0,):
        return _Leave.apply(tensor, rows, layout, count, 1)
    if each and by_samples is not None:
        return _Leave.apply(tensor, rows, layout_of(layout.shape, (by_samples, *cuts[1:]), layout.grid), count * each, 1)
    return _OfAll.apply(tensor, rows, layout_of(layout.shape, tuple(cuts), layout.grid))
