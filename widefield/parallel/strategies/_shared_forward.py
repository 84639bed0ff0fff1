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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from widefield.capture.containers import refuse_hidden
from widefield.comm import collectives
from widefield.comm.mesh import Mesh, control_device
from widefield.parallel.inactive import is_inactive, on_rows, real_buffers
from widefield.parallel.strategies._forward_route import Compiled
from widefield.parallel.strategies._forward_state import ForwardState
from widefield.parallel.strategies._sample_probe import differ, mix_among_themselves
from widefield.parallel.strategies._shared_batch import BatchShare, EnterBatch, dims_of_samples, left, strides_of_batch
from widefield.parallel.strategies._unit_calls import Parted
from widefield.private_torch.modules import BatchNorm
from widefield.private_torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from widefield.streaming.api import Streamed
from widefield.tiled.sample_mixing import SampleMixingWatch
from widefield.tiled.tensor import TiledTensor

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
        self.rows_each: dict[bool, list[list[int] | None]] = {}
        """In each mode, of each dim of each output, how many rows belong to a sample; None of what is no tensor."""
        self.has_run: set[bool] = set()
        """The modes in which a forward has run on rows; where the first cannot, the model is to blame and not its user."""
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

    def _rows_each(self, leaves: list[Any], count: int) -> list[list[int] | None]:
        """Of each dim of each output, how many rows may belong to a sample, by what `count` samples alone gave on each copy.

        Not known where copies give outputs of unequally many dims.
        """
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
        found = [extent // count if count and extent % count == 0 else 0 for shape in shapes for extent in shape]
        many = torch.tensor([len(found), -len(found)], device=control_device(self.group))
        dist.all_reduce(many, dist.ReduceOp.MAX, group=self.group)
        if many.sum():
            return [None] * len(leaves)
        told = torch.tensor(found, device=control_device(self.group))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        rest = iter(told.tolist())
        each = [[next(rest) for _ in shape] for shape in shapes]
        return [many if isinstance(leaf, Tensor) else None for leaf, many in zip(leaves, each, strict=True)]

    def _some(self, holds: bool) -> bool:
        """Whether something holds on some rank; RuntimeError where not all come to ask."""
        found = torch.tensor([int(holds)], device=control_device(self.group))
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
        watch = SampleMixingWatch(self.mesh.grid_of_rows())
        try:
            with watch:
                among_all = self._run(model, run, args, kwargs), _statistics(model)
        except NotImplementedError:  # raised on every rank, before any message
            mixes = self._mix_among_themselves(model, run, args, kwargs) or bool(watch.found)
            return self._some(mixes and not is_inactive(model))
        except Parted:
            raise
        except Exception as error:
            raise self._refusal(model, error) from error
        pairs = zip(tree_leaves(made), tree_leaves(among_all), strict=True)
        apart = [differ(alone, found) for alone, found in pairs]  # all of them, for ranks look at them together
        mixes = bool(watch.found) or self.gives_sums or any(apart)
        return self._some(mixes and not is_inactive(model))

    def _mix_among_themselves(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict) -> bool:
        """Whether this copy's samples meet; NotImplementedError, on every rank, where a copy's cannot be told."""
        mixes, failed = False, None
        try:
            mixes = mix_among_themselves(model, run, args, kwargs, _samples_in(args, kwargs))
        except Exception as error:
            failed = error
        if self._some(failed is not None):
            raise self._refusal(model, failed or "another copy cannot, and says why") from failed
        return mixes

    def _refusal(self, model: nn.Module, why: Exception | str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(model).__qualname__} runs on one copy's samples and not on a batch that its {self.mesh.copies} copies "
            f"share, as with images in a list, so whether samples meet cannot be seen: {why}; {ADVICE}"
        )

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
        except Parted:
            raise
        except Exception as error:
            if model.training in self.has_run:
                raise
            raise self._refusal(model, error) from error

    def _run(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The forward on tiled tensors whose batch dim is cut over copies; of what it gives, what is this copy's."""
        if isinstance(model, Streamed):
            raise NotImplementedError("a stream runs tiles of images and no rows of a batch; set stream=null")
        samples = _samples_in(args, kwargs)
        count = len(samples[0])
        rows = self._rows_of(samples, 0 if is_inactive(model) else count, _sum_of_others(args, kwargs, samples))
        if is_inactive(model):
            real_buffers(model)

        def entered(leaf: Any) -> Any:
            if not any(leaf is each for each in samples):
                return leaf
            layout = rows.of_batch(leaf)
            return EnterBatch.apply(leaf, rows, layout, 1, strides_of_batch(leaf, layout))

        with on_rows(model):
            leaves, spec = tree_flatten(run(*tree_map(entered, args), **tree_map(entered, kwargs)))
        known = self.rows_each[model.training]
        if len(known) != len(leaves):
            known = [None] * len(leaves)
        pairs = list(zip(leaves, known, strict=True))
        self.gives_sums = any(_is_of_all(leaf, each, rows) for leaf, each in pairs)
        known[:] = [_told_by(leaf, each, rows) for leaf, each in pairs]
        self.has_run.add(model.training)
        return tree_unflatten([left(leaf, rows, count, n) if isinstance(leaf, Tensor) else leaf for leaf, n in pairs], spec)

    def _rows_of(self, samples: list[Tensor], count: int, others: int) -> BatchShare:
        """Which rows of the batch this copy has; one small message.  others: a sum of what else the model is given."""
        tiles, device = self.mesh.grid.size, control_device(self.group)
        shapes = [tuple(sample.shape[1:]) for sample in samples]
        mine = torch.tensor([count, zlib.crc32(str(shapes).encode()), others], dtype=torch.int64, device=device)
        told = mine.new_empty(self.group.size(), 3)
        collectives.all_gather_single(told, mine[None], group=self.group)
        of_copies = told[::tiles].tolist()
        if len({found for rows, found, _ in of_copies if rows}) > 1:
            raise NotImplementedError(
                f"copies got samples of different sizes, this one {', '.join(map(str, shapes))}, which make no batch; give all "
                "of them one size"
            )
        if len({others for rows, _, others in of_copies if rows}) > 1:
            raise NotImplementedError(
                "copies gave the model other numbers besides their samples, and one device has one of each; give all of them "
                "the same, or a tensor with a row for each sample"
            )
        bounds = [0]
        for rows, *_ in of_copies:
            bounds.append(bounds[-1] + rows)
        return BatchShare(self.mesh.grid_of_rows(), self.mesh.grid, tuple(bounds))


def _statistics(model: nn.Module) -> list[Tensor]:
    """The buffers of its BatchNorms, as they are now."""
    return [b.detach().clone() for part in model.modules() if isinstance(part, BatchNorm) for b in part.buffers(recurse=False)]


def _samples_in(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that have a row for each sample: as many as the first."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def _sum_of_others(args: tuple, kwargs: dict, samples: list[Tensor]) -> int:
    """A checksum of the numbers that a model is given besides samples."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if not any(leaf is each for each in samples)]
    words = [str(leaf) for leaf in leaves if leaf is None or isinstance(leaf, bool | int | float | complex | str)]
    found = zlib.crc32(str(words).encode())
    for leaf in leaves:
        if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_meta:
            numbers = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            found = zlib.crc32(numbers.flatten().view(torch.uint8).numpy().data, found)
    return found


def _same(tensor: Any) -> Any:
    """(A result that is saved as it is would hold the operation that saves it, and neither would ever go.)"""
    return tensor


def _is_of_all(leaf: Any, each: list[int] | None, rows: BatchShare) -> bool:
    """Whether a result, which is no number, is of all samples of a batch together; by chance it may be what one copy gives."""
    return type(leaf) is TiledTensor and leaf.ndim > 0 and each is not None and not dims_of_samples(leaf, each, rows)


def _told_by(leaf: Any, each: list[int] | None, rows: BatchShare) -> list[int] | None:
    """`each` without dims that hold no samples, as far as this batch tells: the extents of another one may fit by chance."""
    dims = [] if each is None else dims_of_samples(leaf, each, rows)
    return each if each is None or len(dims) > 1 else [many if dim in dims else 0 for dim, many in enumerate(each)]
