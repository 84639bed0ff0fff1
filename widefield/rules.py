"""What each operation means on tiles.  A file here is a family of operations; each defines its rules and CASES.

A rule is a function of the operation's own arguments, with a `Meta` in place of each tensor, that returns one of the
descriptions below: integer arithmetic and a local operation.  It holds no tensor and sends nothing, so what it returns is
kept and used again for equal arguments; the engine moves the pixels that it asks for.

- `Windowed`: every output pixel reads a run of input pixels (pooling, resize, padding, convolution).
- `Additive`: every pixel of one tensor adds to the outputs by itself (the backward of a convolution).
- `Reduced`: sums over pixels that are merged over tiles, and an end made from the total (normalization, losses).
- `Local`: every tile by itself, once the dims that must be whole are (softmax over channels, matmul, cat, views).
- `NeedsRedistribute`: first uncut some dims of a tensor, whose cuts move elsewhere.
- a `composed` rule is not kept: it is made of other torch operations, called on tiled tensors.

Operations tagged `torch.Tag.pointwise` need no rule.  What no file has a rule for is refused by name.
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
    """A tensor argument without its pixels: the whole's shape, its dtype, and its layout (None: a plain tensor)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    number: int
    """Its place among the tensor arguments, in order; lists count their tensors one by one."""

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
    """A tensor that outputs read: on the dims of `reach` through windows, on its other dims the same pixels as the output
    (dims whose extent differs from the output's must be uncut, and are read whole)."""

    tensor: Meta
    reach: dict[int, Reach] = field(default_factory=dict)


@dataclass(frozen=True)
class Tile:
    """An output of this shape, laid out by `cuts`; None: as follows from the first tiled read's cuts through its reach."""

    shape: tuple[int, ...]
    cuts: Cuts | None = None
    dtype: torch.dtype | None = None
    """Of a tile without pixels; None: that of the first read."""


@dataclass(frozen=True)
class PartialSum:
    """An output that is a sum over all pixels: every rank's part is added up.

    is_partial_gradient: the gradient of a plain weight, which DDP or FSDP will average over ranks: each rank then gives its
    part times the number of tiles, so that the mean is the whole sum, and nothing is sent here.
    """

    is_partial_gradient: bool
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LocalBoxes:
    """What one local operation works on: the boxes it is given of each read, and the box of the output it makes."""

    reads: tuple[Box, ...]
    write: Box
    alone: bool = False
    """Of an Additive rule: also give what `alone` would."""


Run = Callable[..., Any]


@dataclass(frozen=True)
class Windowed:
    """Outputs of the same cuts, each pixel reading through `reads`.

    prepare(part): the local operation: from the tiles of `reads`, in their order, then all other tensor arguments, to the
        output tiles (one tensor, or a tuple where there are several).  What a window reads outside of the box that `part` has
        is padding, at the border of the whole; `part.reads` may be smaller than that only where `splits`.
    splits: the engine may run it on the tile alone while the halo travels, and run the edges again on strips.
    """

    reads: Sequence[Read]
    outs: Sequence[Tile]
    prepare: Callable[[LocalBoxes], Run]
    splits: bool = False


@dataclass(frozen=True)
class Additive:
    """Outputs to which every pixel of one tensor adds by itself, so pieces are used as they come.

    read: `reach` maps the pixels of `over` to the pixels of `read.tensor` that meet them.
    over: the tensor whose tile stays at home; `outs[0]`, if a Tile, has its layout.
    prepare(part): from a piece of `read.tensor` (box part.reads[0]) and this rank's pixels of `over` in the box part.write,
        then all other tensor arguments, to a tuple: what is to be added to `outs[0]` in part.write, and to each PartialSum;
        None for an output that is not wanted.
    """

    read: Read
    over: Meta
    outs: Sequence[Tile | PartialSum | None]
    prepare: Callable[[LocalBoxes], Run]
    alone: tuple[Meta, tuple[int, Run]] | None = None
    """An output that is a sum over the tile of one tensor by itself: the tensor, the output's number, the sum."""


@dataclass(frozen=True)
class Reduced:
    """Sums over the pixels of `dims`, then an end.

    reads: tensors that are brought to the layout of the first before (plain ones are cut where they are not broadcast).
    local(*tiles): this tile's part, one tensor; a tile may be empty.
    merge(parts): parts (ways, ...) of all tiles to the total; None: they are added.
    finish(total, *tiles): the outputs; None: the total itself.  Here `tiles` holds all tensor arguments, reads as tiles.
        It writes to none of them, so that it may be run for any tile, and often.
    update_buffers(total, *tiles): what is written once for the whole, before `finish`: running statistics.  It gives nothing.
    known(part, *tiles): the part, which is what `local` gives, with its gradient, where that needs less than `local` does.
    by_parts: False where `total` is bound to one way to cut, or where differentiating local, merge and finish is not the
        gradient of the whole, as equal extremes in two tiles share theirs.  Who works tile after tile then needs the whole.
    outs: a Tile for an output with pixels, PartialSum for one that `finish` gives as the part of this tile, None for one that
        is equal on every rank already.
    at: for each read the layout it is wanted in, None: as it is; for reads of fewer dims, and for cuts that have to move.  The
        first is that of `dims`.
    """

    reads: Sequence[Meta]
    dims: Sequence[int]
    local: Run
    outs: Sequence[Tile | PartialSum | None]
    merge: Callable[[Tensor], Tensor] | None = None
    finish: Run | None = None
    at: Sequence[Layout | None] | None = None
    update_buffers: Run | None = None
    known: Run | None = None
    by_parts: bool = True


@dataclass(frozen=True)
class Local:
    """Every tile by itself.

    reads: tensors brought to the layout of the first, less the cuts of `whole`: those dims the operation must see whole, so
        a cut there moves to another dim that keeps it, or is gathered.  Tensors that are not read come as they are.
    outs(layout): shape and cuts of each output, given the layout that the first read has by then; None for the cuts: equal on
        every rank.
    run(layout, *tensors): all tensor arguments, reads as tiles, to the output tile or a tuple of them.
    keep: dims that may not take over a cut that has to move (they would change meaning).
    at: as of `Reduced`, in place of `whole` and `keep`; the first is what `outs` and `run` get.
    is_view: the outputs show the memory of the one read, so what is written to them in place is written to it, too; where
        pixels had to move, the engine brings it there.
    reach: of dims of the output that do not show the same pixels of the first read's dim, which they show.
    by_position: what `run` gives depends on where in the whole the tile lies, so it is not the operation itself on the tile.
    """

    reads: Sequence[Meta]
    outs: Callable[[Layout], Sequence[tuple[tuple[int, ...], Cuts | None]]]
    run: Run
    whole: Sequence[int] = ()
    keep: Sequence[int] = ()
    at: Sequence[Layout | None] | None = None
    is_view: bool = False
    reach: dict[int, Reach] = field(default_factory=dict)
    by_position: bool = False


@dataclass(frozen=True)
class ShardedProduct:
    """Tensors each brought to a layout of its own, then one local operation; what the tiles give is added up where it must be.

    reads: tensors, and `layouts` for each, of its own shape; tensors that are not read come as they are.
    run(*tensors): all tensor arguments, reads as tiles, to this rank's part of the output.
    out: the output's layout.  over: the axes of the grid along which ranks hold parts of a sum.
    is_partial_gradient: the output is the gradient of a plain weight (see `PartialSum`): plain, of the whole's shape, and
        nothing is sent.
    """

    reads: Sequence[Meta]
    layouts: Sequence[Layout]
    run: Run
    out: Layout
    over: tuple[int, ...] = ()
    is_partial_gradient: bool = False


@dataclass(frozen=True)
class Ring:
    """Tiles that go round: in each turn a rank works on what it stays with and on one peer's tiles of what travels.

    reads, layouts: as for ShardedProduct.
    travel: which of the reads go round, all of them cut along the same `axes`, on `dim`.
    turn(state, stay, held, at): one turn, from the state that the last gave (None at first), the other reads, the tiles that
        are held now and the interval of `dim` that they are; gives the new state and, of each travelling tensor, the part to
        add up at its home, or ().
    finish(state, stay, homes): the outputs; homes: each travelling tensor's sum of parts, at home.
    outs: the layout of each output; None for what is equal on every rank or no tensor.
    Cost: n ranks, n - 1 messages to the next rank, and as many home where there are parts; two tiles of what travels in memory.
    """

    reads: Sequence[Meta]
    layouts: Sequence[Layout]
    travel: Sequence[int]
    dim: int
    axes: tuple[int, ...]
    turn: Run
    finish: Run
    outs: Sequence[Layout | None]
    together: tuple[int, ...] = ()
    """Axes along which nothing travels though the ranks work on different tiles: parts for home are added up over them."""


@dataclass(frozen=True)
class NeedsRedistribute:
    """Bring tensors to other layouts and ask once more: (tensor, dims) where those dims of the tensor must be uncut."""

    whole: Sequence[tuple[Meta, Sequence[int]]]


Description = Windowed | Additive | Reduced | Local | ShardedProduct | Ring | NeedsRedistribute

RULES: dict[Any, Callable[..., Description]] = {}
COMPOSED: dict[Any, Callable[..., Any]] = {}
UNCUT_TOO: set[Any] = set()
"""Compositions that are asked where nothing is cut, too; other operations run there as they are."""
PLAIN_OUTPUTS: dict[Any, tuple[int, ...]] = {}
"""Outputs of an operation that are gradients of plain weights, and so plain even where nothing is cut."""


def rule(*operations: Any, plain_outputs: tuple[int, ...] = ()) -> Callable:
    """Register what aten operations mean on tiles.  AssertionError: one of them has a rule already."""

    def register(function: Callable) -> Callable:
        for operation in operations:
            assert operation not in RULES and operation not in COMPOSED, f"{operation} has two rules"
            RULES[operation] = function
            if plain_outputs:
                PLAIN_OUTPUTS[operation] = plain_outputs
        return function

    return register


def composed(*operations: Any, uncut_too: bool = False) -> Callable:
    """Register a function of the operation's own arguments, tiled tensors among them, made of other torch operations.

    uncut_too: also call it where every tiled argument is uncut, and so alike on all ranks.
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
    """One operation to run whole and on tiles, forward and backward, in float64.

    run(*inputs): inputs are tensors of `shapes`; those numbered in `tiled` are tiled, the others plain.
    """

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    tiled: tuple[int, ...] = (0,)
    refuses: str | None = None
    """A pattern that the refusal's words must match."""


def case(
    name: str, run: Callable[..., Any], *shapes: tuple[int, ...], tiled: tuple[int, ...] = (0,), refuses: str | None = None
) -> RuleCase:
    """A Case; every input with more than one dim gets a gradient."""
    return RuleCase(name, run, shapes, tiled, refuses)
