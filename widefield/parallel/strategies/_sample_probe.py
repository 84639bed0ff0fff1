"""Do samples of one batch meet in a model, as far as it tells on two halves of a batch, each alone and both together?

For models with an operation that has no rule for rows of a batch, so that copies of the model cannot ask each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widefield.private_torch.dispatcher import OpOverload, TorchDispatchMode
from widefield.private_torch.modules import BatchNorm
from widefield.private_torch.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from widefield.tiled.dispatch import is_unknown
from widefield.tiled.pointwise import is_pointwise
from widefield.tiled.redistribute import local_of, to_layout
from widefield.tiled.tensor import TiledTensor

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
"""Up to which share outputs may differ by rounding alone, 0.01 for other dtypes; samples that meet make more difference."""


def mix_among_themselves(model: nn.Module, run: Callable, args: tuple, kwargs: dict, samples: Sequence[Tensor]) -> bool:
    """Whether samples, and as many others behind them, give something else than each half alone.

    What operations without a rule give is looked at by itself, on numbers by chance too, for what follows may hide it; behind
    them also what others give, but for those that only move numbers.  BatchNorms, whose statistics are of all copies anyway,
    take their running ones meanwhile.
    """
    norms = [part for part in model.modules() if isinstance(part, BatchNorm) and part.training]

    def others(leaf: Any, *, with_first: bool) -> Any:
        if not any(leaf is sample for sample in samples):
            return leaf
        more = leaf.flip(0) * 0.5 if leaf.is_floating_point() else leaf.flip(0)
        return torch.cat([leaf, more]) if with_first else more

    changes = (_as_it_is, partial(others, with_first=False), partial(others, with_first=True))
    found, called = [], [_Unknown(), _Unknown(), _Unknown()]
    for norm in norms:
        norm.training = False
    try:
        for change, calls in zip(changes, called, strict=True):
            with calls:
                found.append(_numbers_of(run(*tree_map(change, args), **tree_map(change, kwargs))))
    finally:
        for norm in norms:
            norm.training = True
    mixed = [_is_mixed(*leaves) for leaves in zip(*found, strict=True)]  # each, for ranks look at them together
    return any(mixed) or any(_call_mixes(*calls) for calls in zip(*_matched([each.calls for each in called]), strict=False))


def _matched(called: list[list[_Call]]) -> list[list[_Call]]:
    """Calls of each half and of both; where both have more, a model takes samples one by one, and picks each of them."""
    if len({len(calls) for calls in called}) == 1:
        return called
    return [[call for call in calls if _name_of(call[0]) not in _PICKS] for calls in called]


def _as_it_is(leaf: Any) -> Any:
    return leaf


def _numbers_of(output: Any) -> list[Any]:
    """The leaves of an output, without what a backward would want."""
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


def _is_mixed(first: Any, second: Any, both: Any) -> bool:
    """Whether what both halves of a batch give together is not theirs behind each other, nor what either gives alone.

    A mean of all samples counts: what is made of it later is another of each copy's mean than of all.
    """
    if not isinstance(first, Tensor):
        return False
    return _apart(first, second, both, 0 if first.ndim and len(both) == 2 * len(first) else None)


def _apart(first: Tensor, second: Tensor, both: Tensor, dim: int | None) -> bool:
    """Whether `both` is not the halves behind each other along `dim`, or, where there is none, not what either is."""
    count = 0 if dim is None else first.shape[dim]
    found = (both, both) if dim is None else (both.narrow(dim, 0, count), both.narrow(dim, count, count))
    apart = [differ(half, some) for half, some in zip((first, second), found, strict=True)]
    return any(apart)  # of both, for ranks look at them together


def differ(alone: Any, among_all: Any) -> bool:
    """Whether two outputs are farther apart than rounding goes."""
    if not isinstance(alone, Tensor) or not alone.is_floating_point():
        return False
    if alone.shape != among_all.shape:
        return True
    if type(alone) is TiledTensor:
        alone, among_all = alone.local, to_layout(among_all, alone.tile_layout)
    if not alone.numel():
        return False
    alone = alone.detach()
    apart = (alone - among_all).abs().masked_fill((alone == among_all) | alone.isnan() & among_all.isnan(), 0)
    return not bool(apart.max() <= TOLERANCE.get(alone.dtype, 0.01) * alone.nan_to_num(0, 0, 0).abs().max())


# ---------------------------------------------------------------------------------------------- operations without a rule

_Call = tuple[Any, tuple, dict]
"""An operation and what it is given; of one that has a rule, the shapes of what it is given alone."""

_MOVES = {"cat", "flip", "roll", "index", "index_select", "gather", "new_empty", "new_empty_strided"}
"""Operations that are no views and give what they are given, or nothing: end to end it shows whether samples meet."""


_PICKS = {"slice", "select"}
"""Views that may leave samples out."""
_NUMBERS = {Tensor, nn.Parameter, TiledTensor}
"""Kinds of tensors that are none of a capture."""


class _Unknown(TorchDispatchMode):
    """Inside, `calls` gets the operations that have no rule, with copies of what they are given, and others behind them.

    Messages are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._is_behind = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kinds = {type(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if is_unknown(func) and "c10d" not in func.namespace and kinds and kinds <= _NUMBERS:
            self.calls.append((func, tree_map(_copied, args), tree_map(_copied, kwargs or {})))
            self._is_behind = True
        elif self._is_behind and kinds and kinds <= _NUMBERS and _may_mix(func):
            self.calls.append((func, tree_map(_shape_of, args), tree_map(_shape_of, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _copied(value: Any) -> Any:
    return local_of(value).detach().clone() if isinstance(value, Tensor) else value


def _shape_of(value: Any) -> Any:
    """Zeros of a tensor's shape that take no memory; of integers, which may be indices, a copy."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return _copied(value)
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(local_of(value).shape)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point() and not any(value.stride())


def _may_mix(func: Any) -> bool:
    """Whether an operation does more than to go through numbers one by one, or to move them."""
    if not isinstance(func, OpOverload) or is_pointwise(func):
        return False
    name = _name_of(func)
    return "c10d" not in func.namespace and name not in _MOVES and (name in _PICKS or not func.is_view)


def _name_of(func: Any) -> str:
    return getattr(func, "overloadpacket", func).__name__


def _call_mixes(first: _Call, second: _Call, both: _Call) -> bool:
    """Whether an operation gives something else for both halves than for each, where it is given them behind each other."""
    func, calls = first[0], [call[1:] for call in (first, second, both)]
    if not func is second[0] is both[0]:
        return False
    dims = [_halved(*leaves) for leaves in zip(*map(tree_leaves, calls), strict=False)]
    if "met" in dims:
        return True
    if "neither" in dims or dims.count("equal") == len(dims):  # they do not lie so
        return False
    return any(_gives_other(func, given) for given in ((calls,) if is_unknown(func) else ()) + (_by_chance(calls, dims),))


def _halved(first: Any, second: Any, both: Any) -> int | str:
    """Along which dim both halves lie behind each other, "equal" where there is one thing alone, or "neither"; "met": it was
    made of samples and has no place for each."""
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
    """The dim of which `both` has twice as many, by shapes."""
    if first.shape != second.shape or first.ndim != both.ndim:
        return "neither"
    more = [dim for dim in range(first.ndim) if first.shape[dim] != both.shape[dim]]
    if not more:
        return "equal"
    return more[0] if len(more) == 1 and both.shape[more[0]] == 2 * first.shape[more[0]] else "neither"


def _by_chance(calls: Sequence[Any], dims: Sequence[int | str]) -> list[Any]:
    """The same calls on other numbers."""
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
    except (RuntimeError, IndexError):  # chance gives what it cannot take
        return False
    for first, second, both in zip(*found, strict=False):
        dim = _doubled(first, second, both) if isinstance(first, Tensor) else "neither"
        if dim != "neither" and _apart(first, second, both, dim if isinstance(dim, int) else None):
            return True
    return False
