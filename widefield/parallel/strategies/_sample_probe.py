"""Does a model mix the samples of a batch?  Compares two halves of a batch, each alone, with both together.

For models with an operation that has no rule for rows of a batch, so that the copies cannot run on a shared batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widefield.parallel.strategies._forward_state import ForwardState, Place
from widefield.private_torch.dispatcher import OpOverload, TorchDispatchMode
from widefield.private_torch.modules import BatchNorm
from widefield.private_torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from widefield.tiled.dispatch import is_unknown
from widefield.tiled.pointwise import is_pointwise
from widefield.tiled.redistribute import local_of, to_layout
from widefield.tiled.tensor import TiledTensor

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
"""The relative difference that rounding may make, 0.01 for other dtypes; mixed samples differ by more."""
AMPLIFIED = 10.0
"""So many times what a change of the last bit of samples makes is still rounding, which happens in every layer."""


def mix_among_themselves(
    model: nn.Module, run: Callable, args: tuple, kwargs: dict, samples: Sequence[Tensor], before: ForwardState
) -> bool:
    """Whether the model gives another result for `samples` and as many others together than for each half alone.

    The results of operations without a rule are also compared one by one, on random numbers too, since later operations may
    hide a difference; so are the operations behind them, except those that only move elements.  BatchNorms use their running
    statistics meanwhile, since they are synchronized anyway.  before: of the model; each run begins with it.
    """
    found, called = [], [_Unknown(), _Unknown(), _Unknown()]
    for (own_args, own_kwargs), calls in zip(_halves_and_both(args, kwargs, samples), called, strict=True):
        with _from(before, model), calls:
            found.append(numbers_of(run(*own_args, **own_kwargs)))
    mixed = [_is_mixed(*leaves) for leaves in zip(*found, strict=True)]  # no short cut: comparing is collective
    return any(mixed) or any(_call_mixes(*calls) for calls in zip(*_matched([each.calls for each in called]), strict=False))


def writes_without_samples(
    model: nn.Module, run: Callable, args: tuple, kwargs: dict, samples: Sequence[Tensor], before: ForwardState
) -> dict[Place, Tensor | None] | None:
    """What a forward writes to buffers, where that is the same for `samples`, for others and for both together; else None.

    As the vectors of a spectral norm.  None also where the forward draws random numbers.  before: of the model, which has that
    state again afterwards.
    """
    found, draws = [], False
    for own_args, own_kwargs in _halves_and_both(args, kwargs, samples):
        with _from(before, model):
            run(*own_args, **own_kwargs)
        found.append(before.written())
        draws = draws or before.has_drawn()
    before.restore()
    return None if draws or not _are_equal(found[0], found[1]) or not _are_equal(found[0], found[2]) else found[0]


def _are_equal(some: Mapping[Place, Tensor | None], others: Mapping[Place, Tensor | None]) -> bool:
    pairs = [(value, others[place]) for place, value in some.items() if place in others]
    are_there = len(pairs) == len(some) == len(others)
    return are_there and all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


@contextmanager
def _from(before: ForwardState, model: nn.Module) -> Iterator[None]:
    """Inside, the model begins with that state, and BatchNorms use their running statistics."""
    before.restore()
    norms = [part for part in model.modules() if isinstance(part, BatchNorm) and part.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def _halves_and_both(args: tuple, kwargs: dict, samples: Sequence[Tensor]) -> list[tuple[tuple, dict]]:
    """The arguments with `samples`, with as many others, and with both in one batch."""

    def others(leaf: Any, *, with_first: bool) -> Any:
        if not any(leaf is sample for sample in samples):
            return leaf
        more = leaf.flip(0) * 0.5 if leaf.is_floating_point() else leaf.flip(0)
        return torch.cat([leaf, more]) if with_first else more

    changes = (_as_it_is, partial(others, with_first=False), partial(others, with_first=True))
    return [(tree_map(change, args), tree_map(change, kwargs)) for change in changes]


def _matched(called: list[list[_Call]]) -> list[list[_Call]]:
    """The calls of each half and of both.  Where both have more, the model loops over samples, and indexing is left out."""
    if len({len(calls) for calls in called}) == 1:
        return called
    return [[call for call in calls if _name_of(call[0]) not in _PICKS] for calls in called]


def _as_it_is(leaf: Any) -> Any:
    return leaf


def numbers_of(output: Any) -> list[Any]:
    """The leaves of an output, detached."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


def _is_mixed(first: Any, second: Any, both: Any) -> bool:
    """Whether the result for both halves is neither their results concatenated nor the result of each half.

    A mean over all samples counts as mixed.
    """
    if not isinstance(first, Tensor):
        return False
    return _apart(first, second, both, 0 if first.ndim and len(both) == 2 * len(first) else None)


def _apart(first: Tensor, second: Tensor, both: Tensor, dim: int | None) -> bool:
    """Whether `both` differs from the halves concatenated along `dim`, or, with `dim` None, from either half."""
    count = 0 if dim is None else first.shape[dim]
    found = (both, both) if dim is None else (both.narrow(dim, 0, count), both.narrow(dim, count, count))
    apart = [differ(half, some) for half, some in zip((first, second), found, strict=True)]
    return any(apart)  # no short cut: comparing is collective


def differ(alone: Any, among_all: Any, rounding: float = 0.0) -> bool:
    """Whether two outputs differ by more than rounding.  rounding: of this model, as `rounding_of` finds it."""
    if not isinstance(alone, Tensor) or not alone.is_floating_point():
        return False
    if alone.shape != among_all.shape:
        return True
    apart, largest = _largest(alone, among_all)
    return not bool(apart <= max(TOLERANCE.get(alone.dtype, 0.01), rounding) * largest)


def _largest(alone: Any, among_all: Any) -> tuple[Tensor, Tensor]:
    """The largest difference of two outputs of one shape, and the largest number of the first; both 0-d."""
    if type(alone) is TiledTensor:
        alone, among_all = alone.local, to_layout(among_all, alone.tile_layout)
    alone = alone.detach()
    if not alone.numel():
        return alone.new_zeros(()), alone.new_zeros(())
    apart = (alone - among_all).abs().masked_fill((alone == among_all) | alone.isnan() & among_all.isnan(), 0)
    return apart.max(), alone.nan_to_num(0, 0, 0).abs().max()


def changed_in_last_bit(args: tuple, kwargs: dict, samples: Sequence[Tensor]) -> tuple[tuple, dict]:
    """The arguments with samples of which every other number, by chance, is nearer to zero by its precision, or by autocast's.

    None is larger, as a model may want numbers up to 1.  Samples of integers stay as they are.
    """

    def changed(leaf: Any) -> Any:
        if not any(leaf is sample for sample in samples) or not leaf.is_floating_point():
            return leaf
        chosen = torch.randint(2, leaf.shape, generator=torch.Generator(leaf.device).manual_seed(0), device=leaf.device)
        return leaf - leaf.detach() * chosen * torch.finfo(_dtype_of(leaf)).eps

    return tree_map(changed, args), tree_map(changed, kwargs)


def rounding_of(output: Sequence[Any], changed: Sequence[Any]) -> float:
    """The relative difference that rounding may make of a model's output, from that for samples changed in their last bit.

    At most the root of the precision: larger ones hide too much, so that samples are taken as mixed.
    """
    found = 0.0
    for leaf, other in zip(output, changed, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape == other.shape:
            apart, largest = (value.item() for value in _largest(leaf, other))
            most = torch.finfo(_dtype_of(leaf)).eps ** 0.5
            found = max(found, min(AMPLIFIED * apart, most * largest) / largest if largest else 0.0)
    return found


def _dtype_of(tensor: Tensor) -> torch.dtype:
    """That of a tensor's computations: autocast's, if it is on."""
    kind = tensor.device.type
    if tensor.dtype is not torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


# ---------------------------------------------------------------------------------------------- operations without a rule

_Call = tuple[Any, tuple, dict]
"""An operation and its arguments; for an operation with a rule, only the shapes of its tensor arguments."""

_MOVES = {"cat", "flip", "roll", "index", "index_select", "gather", "new_empty", "new_empty_strided"}
"""Operations, not views, that only move elements, or make none: comparing the outputs shows what they mix."""


_PICKS = {"slice", "select"}
"""Views that may leave samples out."""
_NUMBERS = {Tensor, nn.Parameter, TiledTensor}
"""Tensor types that hold values, unlike the fake tensors of a capture."""


class _Unknown(TorchDispatchMode):
    """Inside, records in `calls` the operations without a rule, with copies of their arguments, and those behind them.

    Collectives are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._is_behind = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kinds = {type(leaf) for leaf in tensors}
        if any(leaf.is_meta for leaf in tensors):  # a capture's shapes, which have no numbers
            return func(*args, **(kwargs or {}))
        if is_unknown(func) and "c10d" not in func.namespace and kinds and kinds <= _NUMBERS:
            self.calls.append((func, tree_map(_copied, args), tree_map(_copied, kwargs or {})))
            self._is_behind = True
        elif self._is_behind and kinds and kinds <= _NUMBERS and _may_mix(func):
            self.calls.append((func, tree_map(_shape_of, args), tree_map(_shape_of, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    return local_of(value).detach().clone() if isinstance(value, Tensor) else value


def _shape_of(value: Any) -> Any:
    """Expanded zeros of a tensor's shape, without memory; of integers, which may be indices, a copy."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return _copied(value)
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(local_of(value).shape)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point() and not any(value.stride())


def _may_mix(func: Any) -> bool:
    """Whether an operation is neither pointwise nor one that only moves elements."""
    if not isinstance(func, OpOverload) or is_pointwise(func):
        return False
    name = _name_of(func)
    return "c10d" not in func.namespace and name not in _MOVES and (name in _PICKS or not func.is_view)


def _name_of(func: Any) -> str:
    return getattr(func, "overloadpacket", func).__name__


def _call_mixes(first: _Call, second: _Call, both: _Call) -> bool:
    """Whether an operation's result for both halves differs from those for each, where its arguments are concatenated."""
    func, calls = first[0], [call[1:] for call in (first, second, both)]
    if not func is second[0] is both[0]:
        return False
    dims = [_halved(*leaves) for leaves in zip(*map(tree_leaves, calls), strict=False)]
    if "met" in dims:
        return True
    if "neither" in dims or dims.count("equal") == len(dims):  # no argument is the two halves concatenated
        return False
    return any(_gives_other(func, given) for given in ((calls,) if is_unknown(func) else ()) + (_by_chance(calls, dims),))


def _halved(first: Any, second: Any, both: Any) -> int | str:
    """The dim along which `both` is the halves concatenated; "equal" where all three are the same, else "neither".

    "met": of equal shapes with different values, so it was computed from samples and has no entry for each.
    """
    if not isinstance(first, Tensor):
        plain = isinstance(first, (bool, int, float, str))
        return "equal" if first is second is both or plain and first == second == both else "neither"
    dim = _doubled(first, second, both)
    if dim == "equal":
        near = torch.equal if not first.is_floating_point() else lambda some, other: not differ(some, other)
        return "equal" if near(first, second) and near(first, both) else "met"
    if isinstance(dim, str):
        return dim
    return "neither" if _apart(first, second, both, dim) else dim


def _doubled(first: Tensor, second: Tensor, both: Tensor) -> int | str:
    """The dim in which `both` is twice as long, by shapes; "equal" where the shapes are, else "neither"."""
    if first.shape != second.shape or first.ndim != both.ndim:
        return "neither"
    more = [dim for dim in range(first.ndim) if first.shape[dim] != both.shape[dim]]
    if not more:
        return "equal"
    return more[0] if len(more) == 1 and both.shape[more[0]] == 2 * first.shape[more[0]] else "neither"


def _by_chance(calls: Sequence[Any], dims: Sequence[int | str]) -> list[Any]:
    """The same calls on random numbers."""
    chance, made = None, []
    flat = [tree_flatten(call) for call in calls]
    for first, second, both, dim in zip(*(leaves for leaves, _ in flat), dims, strict=True):
        if isinstance(dim, int) and first.is_floating_point() or _is_shape(first):
            chance = chance or torch.Generator(first.device).manual_seed(0)
            both = torch.empty(both.shape, dtype=both.dtype, device=both.device).normal_(generator=chance)
            first, second = both.split(first.shape[dim], dim) if isinstance(dim, int) else (both, both)
        made.append((first, second, both))
    return [tree_unflatten([leaves[n] for leaves in made], spec) for n, (_, spec) in enumerate(flat)]


def _gives_other(func: Any, calls: Sequence[Any]) -> bool:
    try:
        with torch.no_grad():
            found = [tree_leaves(func(*tree_map(_copied, args), **tree_map(_copied, kwargs))) for args, kwargs in calls]
    except (RuntimeError, IndexError):  # the operation does not accept random arguments
        return False
    for first, second, both in zip(*found, strict=False):
        dim = _doubled(first, second, both) if isinstance(first, Tensor) else "neither"
        if dim != "neither" and _apart(first, second, both, dim if isinstance(dim, int) else None):
            return True
    return False
