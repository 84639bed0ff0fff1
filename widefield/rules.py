"""How an operation runs on tiles: the kinds of description that a rule returns, and the registry of rules.

A rule is a function of the operation's own arguments, with a `Meta` in place of each tensor.  It returns one of the
descriptions below: integer arithmetic and a local operation.  A rule touches no tensor and sends nothing, so its result is
cached by its arguments.  `tiled/executors/` moves the pixels that a description asks for.  The rules are in `ops/`.

- `Windowed`: every output pixel reads an interval of input pixels (convolution, pooling, resize, padding, cat).
- `Additive`: every pixel of one tensor adds its own term to the outputs (the backward of a convolution).
- `Reduced`: each tile gives a part, the parts are merged, and outputs are made from the total (normalization, losses).
- `Local`: every tile by itself, once the dims that the operation needs whole are uncut (softmax over channels, views).
- `ShardedProduct`: a product of matrices whose operands are cut; the tiles' products may be parts of a sum.
- `Ring`: attention to keys that pass from rank to rank.
- `NeedsRedistribute`: the rule is asked again once some dims of its tensors are uncut.

A `composed` rule returns no description: it calls other torch operations on the tiled tensors themselves.
Operations tagged `torch.Tag.pointwise` need no rule.  An operation without a rule is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from widefield.geometry.box import Box
from widefield.geometry.layout import Cuts, Layout
from widefield.geometry.window import Reach


@dataclass(frozen=True)
class Meta:
    """A tensor argument without its pixels: the whole's shape, its dtype, and its layout (None for a plain tensor)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    number: int
    """Its index among the tensor arguments; the tensors of a list count one by one."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def cuts(self) -> Cuts:
        return (None,) * len(self.shape) if self.layout is None else self.layout.cuts

    @property
    def is_cut(self) -> bool:
        return self.layout is not None and self.layout.is_cut


@dataclass(frozen=True)
class Read:
    """A tensor that outputs read.

    On the dims of `reach` an output reads what its Reach says; on other dims the pixels at its own coordinates.  Other dims
    whose extent differs from the output's are read whole, and must be uncut.
    """

    tensor: Meta
    reach: dict[int, Reach] = field(default_factory=dict)


@dataclass(frozen=True)
class Tile:
    """A tiled output of the whole's `shape`, cut by `cuts`; None: the cuts follow from those of the first read that is cut."""

    shape: tuple[int, ...]
    cuts: Cuts | None = None
    dtype: torch.dtype | None = None
    """The output's dtype, which is needed where a rank's tile is empty and nothing runs; None: that of the first read."""


@dataclass(frozen=True)
class PartialSum:
    """An output that is a sum over all pixels, of which each rank computes its tile's part.

    is_partial_gradient: it is the gradient of a plain weight.  Each rank then keeps its part times the number of tiles, and
    nothing is sent: the mean over ranks, which DDP or FSDP takes anyway, is the sum.  Else the parts are added up at once.
    """

    is_partial_gradient: bool
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LocalBoxes:
    """What one local operation works on: the box that it gets of each read, and the box that it writes."""

    reads: tuple[Box, ...]
    write: Box
    with_own_sum: bool = False
    """For an Additive rule: the local operation also computes the `own_sum`."""


Run = Callable[..., Any]


@dataclass(frozen=True)
class Windowed:
    """Outputs with the same cuts, each pixel of which reads an interval of every tensor in `reads`.

    prepare(part): the local operation.  It takes the boxes `part.reads` of `reads`, in their order, then all other tensor
        arguments, and returns the output's box `part.write` (one tensor, or a tuple where there are several outputs).
        What a window reads outside of the given box is padding.  The box ends early only at the border of the whole; with
        `splits` also at the border of a tile.
    splits: the operation may run on the tile without its halo while the halo travels; the edges are then computed again.
    """

    reads: Sequence[Read]
    outs: Sequence[Tile]
    prepare: Callable[[LocalBoxes], Run]
    splits: bool = False


@dataclass(frozen=True)
class Additive:
    """Outputs to which every pixel of `read.tensor` adds its own term, so that received pieces need not be joined first.

    read: its `reach` maps the pixels of `over` to the pixels of `read.tensor` that they meet.
    over: the tensor whose tiles stay where they are; `outs[0]`, if a Tile, has its layout.
    prepare(part): the local operation.  It takes a piece of `read.tensor` (box part.reads[0]), this rank's pixels of `over` in
        the box part.write, then all other tensor arguments.  It returns one term per output: what to add to `outs[0]` in
        part.write, and what to add to each PartialSum; None for an output that is not wanted.
    """

    read: Read
    over: Meta
    outs: Sequence[Tile | PartialSum | None]
    prepare: Callable[[LocalBoxes], Run]
    own_sum: tuple[Meta, tuple[int, Run]] | None = None
    """An output that is a sum over one tensor's own tile, as a bias's gradient is: the tensor, the output's index, the sum."""


@dataclass(frozen=True)
class Reduced:
    """A reduction over the pixels of `dims`, and outputs made from its total.

    reads: tensors that are redistributed to the layout of the first one that is cut; plain ones are cut where they do not
        broadcast.
    local(*tiles): this tile's part of the total, one tensor.  A tile may be empty.
    merge(parts): the total, from the (num_shards, ...) parts of all tiles; None: their sum.
    finish(total, *tiles): the outputs; None: the total itself.  `tiles` are all tensor arguments, reads as tiles.  It writes
        to none of them, for it may run several times and on any tile.
    update_buffers(total, *tiles): writes running statistics, once for the whole, before `finish`.
    attach_grad(part, *tiles): a saved part as an output of `local`, with its gradient but without computing it again; None: a
        backward runs `local` again.
    by_parts: whether the total may come from other tiles than those of `finish`, and differentiating local, merge and finish
        gives the whole's gradient.  False for extremes: equal ones share the gradient, and a part does not say how many it
        has.  Tiles in time then need the whole.
    outs: a Tile for an output with pixels; PartialSum for one of which `finish` gives this tile's part; None for one that is
        the same on every rank.
    layouts: for each read the layout that it needs, None: as it is.  The first is the layout whose `dims` are reduced.
    """

    reads: Sequence[Meta]
    dims: Sequence[int]
    local: Run
    outs: Sequence[Tile | PartialSum | None]
    merge: Callable[[Tensor], Tensor] | None = None
    finish: Run | None = None
    layouts: Sequence[Layout | None] | None = None
    update_buffers: Run | None = None
    attach_grad: Run | None = None
    by_parts: bool = True


@dataclass(frozen=True)
class Local:
    """An operation that every tile runs by itself.

    reads: tensors that are redistributed to the layout of the first one that is cut, with the dims of `whole` uncut: such a
        cut moves to another dim, or is gathered where none is long enough.  Other tensor arguments are passed as they are.
    outs(layout): the shape and the cuts of each output, given the layout that the first read then has; None for the cuts: the
        output is the same on every rank.
    run(layout, *tensors): the output tile or a tuple of them, from all tensor arguments, reads as tiles.
    layouts: as for `Reduced`, in place of `whole`; the first is what `outs` and `run` get.
    is_view: the outputs share the memory of the one read.  Where pixels had to move, the outputs are copies, and what is
        written to them in place is written back.
    reach: for dims of the output that show other pixels than those at their own coordinates of the first read: which.
    by_position: what `run` gives depends on where in the whole the tile lies, as of `tril`: on a set of indices that is no
        interval, as ranks hold of channels, it is not the operation itself.
    """

    reads: Sequence[Meta]
    outs: Callable[[Layout], Sequence[tuple[tuple[int, ...], Cuts | None]]]
    run: Run
    whole: Sequence[int] = ()
    layouts: Sequence[Layout | None] | None = None
    is_view: bool = False
    reach: dict[int, Reach] = field(default_factory=dict)
    by_position: bool = False


@dataclass(frozen=True)
class ShardedProduct:
    """A local operation on tensors that each have a layout of their own, and a sum of its results along some axes.

    reads, layouts: the tensors that are redistributed, and the layout of each.  Other tensor arguments are passed as they are.
    run(*tensors): this rank's part of the output, from all tensor arguments, reads as tiles.
    out: the output's layout.
    partial_axes: the axes of the grid along which ranks have parts of a sum.
    is_partial_gradient: the output is the gradient of a plain weight; see `PartialSum`.
    """

    reads: Sequence[Meta]
    layouts: Sequence[Layout]
    run: Run
    out: Layout
    partial_axes: tuple[int, ...] = ()
    is_partial_gradient: bool = False


@dataclass(frozen=True)
class Ring:
    """Some tensors' tiles pass around the ranks; in each step a rank computes with one rank's tiles of them (ring attention).

    reads, layouts: as for ShardedProduct.
    rotating: the numbers of the tensors whose tiles pass around; all are cut along `axes`, on `dim`.
    step(state, tensors, rotated, at): one step of the ring.  It takes the state that the last step returned (None at first),
        all tensor arguments, reads as this rank's tiles, the rotating tiles that are here now, and the interval of `dim` that
        these are.  It returns the new state and, for each rotating tile, a part of a sum that belongs to its owner, or ().
    finish(state, tensors, sums): the outputs; sums: this rank's tiles of the sums of those parts.
    outs: the layout of each output; None for what is the same on every rank, or no tensor.
    sum_axes: axes along which the rotating tensors are replicated but the parts differ: the sums are added up over them.
    Cost: n - 1 messages per rank among n ranks, and as many again for parts; memory for two tiles of each rotating tensor.
    """

    reads: Sequence[Meta]
    layouts: Sequence[Layout]
    rotating: Sequence[int]
    dim: int
    axes: tuple[int, ...]
    step: Run
    finish: Run
    outs: Sequence[Layout | None]
    sum_axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NeedsRedistribute:
    """Redistribute tensors, then ask the rule again: (tensor, dims that must be uncut) pairs."""

    whole: Sequence[tuple[Meta, Sequence[int]]]


Description = Windowed | Additive | Reduced | Local | ShardedProduct | Ring | NeedsRedistribute

RULES: dict[Any, Callable[..., Description]] = {}
COMPOSED: dict[Any, Callable[..., Any]] = {}
UNCUT_TOO: set[Any] = set()
"""Composed rules that also run where no argument is cut; other operations run there as they are."""
PLAIN_OUTPUTS: dict[Any, tuple[int, ...]] = {}
"""The outputs of an operation that stay plain tensors where no argument is cut, as the gradients of plain weights."""


def rule(*operations: Any, plain_outputs: tuple[int, ...] = ()) -> Callable:
    """Register the decorated function as the rule of these aten operations.

    plain_outputs: see PLAIN_OUTPUTS.  AssertionError: one of the operations has a rule already.
    """

    def register(function: Callable) -> Callable:
        for operation in operations:
            assert operation not in RULES and operation not in COMPOSED, f"{operation} has two rules"
            RULES[operation] = function
            if plain_outputs:
                PLAIN_OUTPUTS[operation] = plain_outputs
        return function

    return register


def composed(*operations: Any, uncut_too: bool = False) -> Callable:
    """Register the decorated function, which calls other torch operations, as the rule of these aten operations.

    It takes the operation's own arguments, tiled tensors among them.
    uncut_too: also call it where every tiled argument is uncut, and so the same on every rank.
    AssertionError: one of the operations has a rule already.
    """

    def register(function: Callable) -> Callable:
        for operation in operations:
            assert operation not in RULES and operation not in COMPOSED, f"{operation} has two rules"
            COMPOSED[operation] = function
        if uncut_too:
            UNCUT_TOO.add(function)
        return function

    return register


@dataclass(frozen=True)
class RuleCase:
    """A test case: an operation to run on whole tensors and on tiles, forward and backward, in float64.

    run(*inputs): inputs are tensors of `shapes`; those whose numbers are in `tiled` are tiled, the others plain.
    """

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    tiled: tuple[int, ...] = (0,)
    refuses: str | None = None
    """A regular expression that the error's message must match; None: the operation runs."""


def case(
    name: str, run: Callable[..., Any], *shapes: tuple[int, ...], tiled: tuple[int, ...] = (0,), refuses: str | None = None
) -> RuleCase:
    """A RuleCase."""
    return RuleCase(name, run, shapes, tiled, refuses)
