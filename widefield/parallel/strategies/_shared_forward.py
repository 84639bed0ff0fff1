"""Copies of a model as tiles of one batch: each rank has some rows, and the numbers are those of one device with all samples.

Where samples do not interact, a copy runs on its own samples alone, which is exact.  They interact in a BatchNorm, which is
synchronized; in random numbers, which one device draws for the whole batch; in buffers that a forward writes, as the running
statistics of an InstanceNorm or a queue; and in a layer that mixes samples, as a minibatch standard deviation.  A model with
one of the last three runs on tiled tensors whose batch dim is cut over copies, by the same rules as images.

Which models these are is detected.  A forward that draws or writes is run again on rows of the batch, unless what it writes
is the same whatever the samples are, as by a spectral norm.  A model's first training forward also runs on rows once: samples
interact where an operation communicates between copies, or where outputs differ from those of this copy alone.
"""

from __future__ import annotations

import datetime
import warnings
import zlib
from collections.abc import Callable, Iterable
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
from widefield.parallel.strategies._forward_state import ForwardState, Place
from widefield.parallel.strategies._sample_probe import (
    changed_in_last_bit,
    differ,
    mix_among_themselves,
    numbers_of,
    rounding_of,
    writes_without_samples,
)
from widefield.parallel.strategies._shared_batch import BatchShare, EnterBatch, dims_of_samples, leave_batch, strides_of_batch
from widefield.parallel.strategies._unit_calls import RanksDiverged
from widefield.private_torch.modules import BatchNorm
from widefield.private_torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from widefield.streaming.api import Streamed
from widefield.tiled.sample_mixing import SampleMixingWatch
from widefield.tiled.tensor import TiledTensor

PATIENCE_SECONDS = 120.0
"""How long to wait for other copies to detect the same; after that the copies differ, which is an error."""
ADVICE = (
    "set mesh.independent=true to let each copy draw, write to buffers and mix samples by itself, which is not one device's"
)


class SharedForward:
    """Runs the forward of a model with several copies, by `call`.

    group: the ranks with the same part of the model; used by this model only.
    on_end: called when a forward has ended or failed, for code that communicates on this group during forwards; it may raise
        RanksDiverged.
    """

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup, on_end: Callable[[str], None] = lambda how: None) -> None:
        self.mesh, self.group, self.on_end, self.has_warned = mesh, group, on_end, False
        self.mixes_samples: dict[bool, bool] = {}
        """Whether samples interact, by `training`; a mode without an entry is not known yet."""
        self.rows_each: dict[bool, list[list[int] | None]] = {}
        """By `training`, for each dim of each output, how many entries belong to a sample; None for an output without dims."""
        self.free_writes: dict[bool, frozenset[Place]] = {}
        """By `training`, the buffers that a forward writes alike on all copies, whatever their samples are."""
        self.has_run: set[bool] = set()
        """The modes in which a forward has run on rows.  Until then an error means that the model cannot run on them."""
        self.gives_sums = False
        """Whether the last forward on rows returned a result of the whole batch."""

    def call(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The output of `run(*args, **kwargs)`, the forward of `model`, for this copy's samples of the whole batch."""
        if not (model.training or torch.is_grad_enabled()):
            return run(*args, **kwargs)
        refuse_hidden(model, (args, kwargs), "is given")
        if not _samples_in(args, kwargs):
            return run(*args, **kwargs)
        plain = run.uncompiled if isinstance(run, Compiled) else run
        if model.training not in self.mixes_samples:
            self._probe(model, partial(self._run_to_end, plain, True), args, kwargs)
        is_compiled = plain is not run
        run, plain = (partial(self._run_to_end, one, False) for one in (run, plain))
        if self.mixes_samples[model.training]:
            return self._on_rows(model, plain, args, kwargs, is_slower=is_compiled)
        before = ForwardState(model)
        output = run(*args, **kwargs)
        if not before.has_changed(apart_from=self.free_writes[model.training]) or not self._on_any_rank(True):
            return output
        before.restore()
        self.mixes_samples[model.training] = True
        return self._on_rows(model, plain, args, kwargs, is_slower=is_compiled)

    def _run_to_end(self, run: Callable[..., Any], in_probe: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, then `on_end`; after an error too, so that other ranks hear of it.

        A run's watch tells them at once, wherever they wait; but in a probe they go on, and expect to be told here.
        """
        try:
            output = run(*args, **kwargs)
        except RanksDiverged:
            raise
        except Exception:
            if self.mesh.watch is None or in_probe:
                with suppress(RanksDiverged):  # the error of the forward says more
                    self.on_end("an error")
            raise
        self.on_end("the end of the forward")
        return output

    # ------------------------------------------------------------------------------------------ do samples interact?

    def _probe(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> None:
        """Find out whether samples interact, by running the model on this copy alone and on rows; then restore its state."""
        before = ForwardState(model)
        failed: Exception | None = None
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, _same):  # hide hooks around, which count saved tensors
            try:
                output = run(*args, **kwargs)
            except Exception as error:
                failed = error
            if self._on_any_rank(failed is not None):  # copies differ in how many samples they have, and so in their tiles
                raise failed or NotImplementedError("another copy of the model cannot run on its samples, and says why")
            refuse_hidden(model, output, "returns")
            numbers = numbers_of(output)
            del output  # one pass at a time holds its activations
            self.rows_each[model.training] = self._rows_each(numbers, len(_samples_in(args, kwargs)[0]))
            meets, statistics = self._on_any_rank(before.has_changed(by_value=True)), _statistics(model)
            before.restore()
            self.free_writes[model.training] = frozenset()
            if meets:
                meets = not self._writes_alike(model, run, args, kwargs, before)
            self.mixes_samples[model.training] = meets or self._mixes(model, run, args, kwargs, [*numbers, *statistics], before)
            before.restore()

    def _writes_alike(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict, before: ForwardState) -> bool:
        """Whether a forward changes nothing but buffers, which it writes alike on all copies, whatever their samples are."""
        found = None
        try:
            found = writes_without_samples(model, run, args, kwargs, _samples_in(args, kwargs), before)
        except Exception:  # it cannot run on twice the samples, so nothing is known
            before.restore()
        if self._on_any_rank(found is None):
            return False
        total = _checksum_of((found or {}).values(), 0)
        totals = torch.tensor([total, -total], device=control_device(self.group))
        dist.all_reduce(totals, dist.ReduceOp.MAX, group=self.group)
        is_equal = not totals.sum().item()
        self.free_writes[model.training] = frozenset(found or ()) if is_equal else frozenset()
        return is_equal

    def _rows_each(self, leaves: list[Any], count: int) -> list[list[int] | None]:
        """For each dim of each output, how many entries may belong to a sample, from the outputs of each copy alone.

        count: this copy's samples.  All None where copies have outputs with different numbers of dims.
        """
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
        found = [extent // count if count and extent % count == 0 else 0 for shape in shapes for extent in shape]
        many = torch.tensor([len(found), -len(found)], device=control_device(self.group))
        dist.all_reduce(many, dist.ReduceOp.MAX, group=self.group)
        if many.sum():
            return [None] * len(leaves)
        of_ranks = torch.tensor(found, device=control_device(self.group))
        dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=self.group)
        rest = iter(of_ranks.tolist())
        each = [[next(rest) for _ in shape] for shape in shapes]
        return [many if isinstance(leaf, Tensor) else None for leaf, many in zip(leaves, each, strict=True)]

    def _on_any_rank(self, holds: bool) -> bool:
        """Whether `holds` on any rank.  RuntimeError: not all ranks call this within PATIENCE_SECONDS."""
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

    def _mixes(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict, made: list[Any], before: ForwardState) -> bool:
        """Whether samples of several copies interact, on any copy: seen in operations on rows, or in their outputs.

        made: this copy's own output and statistics of BatchNorms, which show a scale that outputs hide; without history.
        before: the state in which the model made it.
        """
        watch = SampleMixingWatch(self.mesh.grid_of_rows())
        try:
            with watch:
                among_all = [*numbers_of(self._run(model, run, args, kwargs)), *_statistics(model)]
        except NotImplementedError:  # raised on every rank, before any message
            mixes = self._mix_among_themselves(model, run, args, kwargs) or bool(watch.found)
            return self._on_any_rank(mixes and not is_inactive(model))
        except RanksDiverged:
            raise
        except Exception as error:
            raise self._refusal(model, error) from error
        pairs, is_seen = list(zip(made, among_all, strict=True)), bool(watch.found) or self.gives_sums
        differences = [differ(alone, found) for alone, found in pairs]  # no short cut: comparing is collective
        if self._on_any_rank(any(differences) and not is_seen):
            rounding = self._rounding(model, run, args, kwargs, made, before)
            differences = [differ(alone, found, rounding) for alone, found in pairs]
        return self._on_any_rank((is_seen or any(differences)) and not is_inactive(model))

    def _rounding(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict, made: list, before: ForwardState) -> float:
        """What this copy makes of a change of its samples' last bits; a deep network in bfloat16 makes some per cent of it."""
        args, kwargs = changed_in_last_bit(args, kwargs, _samples_in(args, kwargs))
        before.restore()
        return rounding_of(made, [*numbers_of(run(*args, **kwargs)), *_statistics(model)])

    def _mix_among_themselves(self, model: nn.Module, run: Callable, args: tuple, kwargs: dict) -> bool:
        """Whether this copy's samples interact; NotImplementedError, on every rank: on some copy that cannot be decided."""
        mixes, failed = False, None
        try:
            mixes = mix_among_themselves(model, run, args, kwargs, _samples_in(args, kwargs), ForwardState(model))
        except Exception as error:
            failed = error
        if self._on_any_rank(failed is not None):
            raise self._refusal(model, failed or "another copy cannot, and says why") from failed
        return mixes

    def _refusal(self, model: nn.Module, why: Exception | str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(model).__qualname__} runs on one copy's samples and not on a batch that its {self.mesh.copies} copies "
            f"share, as with images in a list, so whether samples meet cannot be seen: {why}; {ADVICE}"
        )

    # ------------------------------------------------------------------------------------------ on rows

    def _on_rows(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict, *, is_slower: bool) -> Any:
        """`_run`, with the reason added to its errors.  is_slower: it replaces a compiled forward, of which it warns once."""
        if is_slower and not self.has_warned:
            self.has_warned = True
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
        except RanksDiverged:
            raise
        except Exception as error:
            if model.training in self.has_run:
                raise
            raise self._refusal(model, error) from error

    def _run(self, model: nn.Module, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the forward on tiled tensors whose batch dim is cut over copies; returns this copy's part of the output."""
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
        known[:] = [_narrowed(leaf, each, rows) for leaf, each in pairs]
        self.has_run.add(model.training)
        return tree_unflatten(
            [leave_batch(leaf, rows, count, n) if isinstance(leaf, Tensor) else leaf for leaf, n in pairs], spec
        )

    def _rows_of(self, samples: list[Tensor], count: int, others: int) -> BatchShare:
        """Which rows of the batch each copy has; one small message.

        others: a checksum of the arguments that are no samples, which must be the same on all copies.
        """
        tiles, device = self.mesh.grid.size, control_device(self.group)
        shapes = [tuple(sample.shape[1:]) for sample in samples]
        mine = torch.tensor([count, zlib.crc32(str(shapes).encode()), others], dtype=torch.int64, device=device)
        of_ranks = mine.new_empty(self.group.size(), 3)
        collectives.all_gather_single(of_ranks, mine[None], group=self.group)
        of_copies = of_ranks[::tiles].tolist()
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
    """Copies of the buffers of its BatchNorms."""
    return [b.detach().clone() for part in model.modules() if isinstance(part, BatchNorm) for b in part.buffers(recurse=False)]


def _samples_in(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that have a row for each sample: those with as many rows as the first."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def _sum_of_others(args: tuple, kwargs: dict, samples: list[Tensor]) -> int:
    """A checksum of the arguments that are no samples."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if not any(leaf is each for each in samples)]
    words = [str(leaf) for leaf in leaves if leaf is None or isinstance(leaf, bool | int | float | complex | str)]
    return _checksum_of(leaves, zlib.crc32(str(words).encode()))


def _checksum_of(leaves: Iterable[Any], start: int) -> int:
    """Of the values of plain tensors among the leaves."""
    found = start
    for leaf in leaves:
        if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_meta:
            numbers = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            found = zlib.crc32(numbers.flatten().view(torch.uint8).numpy().data, found)
    return found


def _same(tensor: Any) -> Any:
    """(An output saved with its history by its own operation would be a reference cycle; `torch.detach` packs it.)"""
    return tensor


def _is_of_all(leaf: Any, each: list[int] | None, rows: BatchShare) -> bool:
    """Whether a result with dims has none of samples, so that it is one of the whole batch."""
    return type(leaf) is TiledTensor and leaf.ndim > 0 and each is not None and not dims_of_samples(leaf, each, rows)


def _narrowed(leaf: Any, each: list[int] | None, rows: BatchShare) -> list[int] | None:
    """`each` without the dims that this batch shows to hold no samples; with another batch size a dim may match by chance."""
    dims = [] if each is None else dims_of_samples(leaf, each, rows)
    return each if each is None or len(dims) > 1 else [many if dim in dims else 0 for dim, many in enumerate(each)]
