"""Finds what runs an operation on tiled tensors: a rule, a composed rule, a pointwise operation, or a refusal."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from widefield.geometry.layout import Layout, layout_of
from widefield.naming import load, names_in
from widefield.private_torch.dispatcher import (
    OpOverload,
    disable_current_modes,
    dispatch_has_kernel_for_dispatch_key,
    op_of,
    schema_of,
)
from widefield.private_torch.pytree import tree_map
from widefield.rooms import ENGINE_PATHS
from widefield.rules import COMPOSED, RULES, UNCUT_TOO, Additive, Description, Local, Meta, NeedsRedistribute, Windowed
from widefield.tiled.executors import build
from widefield.tiled.in_place import (
    each,
    into_buckets,
    into_outs,
    pointwise_in_place,
    pointwise_out,
    through_new,
    without_pixels,
)
from widefield.tiled.memory_format import ordered
from widefield.tiled.overrides import install_overrides
from widefield.tiled.partial_gradient import INTO_LEAF, into_leaf, is_for_leaf
from widefield.tiled.pointwise import is_pointwise
from widefield.tiled.redistribute import local_of, move_cuts, redistribute, to_layout, whole_of
from widefield.tiled.replicated_ops import broadcast_shape, is_in_place, on_every_rank, on_uncut, tensors_in
from widefield.tiled.schemas import NUMBERS, new_of, outs_of, written_by
from widefield.tiled.tensor import TiledTensor, wrap
from widefield.tiled.view_writeback import counted, version_of

aten = torch.ops.aten
OPS = "widefield.ops"
"""The room of rules, which imports this one and is therefore known by name alone."""


@cache
def load_rules() -> None:
    """Import every file of ops/, which registers its rules."""
    for name in names_in(OPS):
        load(OPS, name)


def prepare() -> None:
    """Import the rules and install the overrides; to be called before the first tiled tensor and the first capture."""
    load_rules()
    install_overrides()


def handler_of(func: Any) -> Callable:
    """The function that runs `func`, called as handler(func, args, kwargs), where at least one argument is tiled."""
    prepare()
    found = _handler_of(func)
    if written_by(func):
        found = partial(counted, found)
    if _gives_new(func):
        found = ordered(func, found)
    return partial(_unless_for_leaf, found) if func in INTO_LEAF else found


def _gives_new(func: Any) -> bool:
    """Whether all results are new tensors.  The operation may still write into an argument."""
    returns = schema_of(func).returns
    return bool(returns) and not func.is_view and all(each.alias_info is None for each in returns)


def _unless_for_leaf(run: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    return into_leaf(func, args, kwargs) if is_for_leaf() else run(func, args, kwargs)


def _handler_of(func: Any) -> Callable:
    if func in COMPOSED or func in RULES:
        run = partial(_composed, COMPOSED[func]) if func in COMPOSED else partial(by_rule, RULES[func])
        return partial(_backward, run) if "_backward" in schema_of(func).name else run
    if func in (aten.detach.default, aten.alias.default):
        return alias
    if func.namespace == "fsdp":
        return into_buckets
    if schema_of(func).name.startswith("aten::_foreach_"):
        return each
    if outs_of(func) and new_of(func) is not None:
        return pointwise_out if is_pointwise(func) else into_outs
    if is_pointwise(func):
        return pointwise_in_place if is_in_place(func) else _pointwise
    return _other


# ---------------------------------------------------------------------------------------------- pointwise


def _pointwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs on tiles, after operands are redistributed to one layout."""
    layout, simple = None, True
    for arg in args:
        if type(arg) is TiledTensor:
            if arg.writeback is not None:
                arg.writeback.refresh(version_of(arg))
            if layout is None:
                layout = arg.tile_layout
            elif arg.tile_layout is not layout:
                simple = False
        elif isinstance(arg, Tensor) and arg.ndim:
            simple = False
    if layout is None or not simple:
        return _mixed(func, args, kwargs)
    if not layout.is_cut:
        return on_uncut(func, args, kwargs)
    tiles = [arg.local if type(arg) is TiledTensor else arg for arg in args]
    out = func(*tiles, **kwargs) if not layout.is_empty else without_pixels(func, tiles, kwargs, layout)
    if type(out) is tuple:
        return tuple(wrap(part, layout) for part in out)
    return wrap(out, layout)


def alias(func: Any, args: tuple, kwargs: dict) -> Any:
    """detach and alias: the same memory, and so the same write-back."""
    made = _pointwise(func, args, kwargs)
    made.writeback, made.may_alias_data = args[0].writeback, True
    return made


def _mixed(func: Any, args: tuple, kwargs: dict) -> Any:
    """A pointwise operation on operands of several layouts, or plain ones among them."""
    flat = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    shape = broadcast_shape(*[a.shape for a in flat])
    layout = _common_layout([a for a in flat if type(a) is TiledTensor], shape)
    if not layout.is_cut and not any_cut(flat):  # a cut dim of one pixel that broadcasts is gathered
        return on_uncut(func, args, kwargs)
    call = partial(_operand, layout=layout)
    tiles, named = [call(arg) for arg in args], {name: call(value) for name, value in kwargs.items()}
    out = func(*tiles, **named) if not layout.is_empty else without_pixels(func, tiles, named, layout)
    return tuple(wrap(part, layout) for part in out) if type(out) is tuple else wrap(out, layout)


def _operand(value: Any, layout: Layout) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return local_of(value)
    return to_layout(value, layout)


def _common_layout(tensors: Sequence[TiledTensor], shape: tuple[int, ...]) -> Layout:
    """The layout of an output of `shape`: each dim is cut like the first operand that is cut there and does not broadcast."""
    grid = tensors[0].tile_layout.grid
    cuts: list = [None] * len(shape)
    taken: set[int] = set()
    for tensor in tensors:
        missing = len(shape) - tensor.ndim
        for dim, cut in enumerate(tensor.tile_layout.cuts):
            at = dim + missing
            if cut is not None and tensor.shape[dim] == shape[at] and cuts[at] is None and not taken & set(cut.axes):
                cuts[at] = cut
                taken |= set(cut.axes)
    return layout_of(shape, tuple(cuts), grid)


# ---------------------------------------------------------------------------------------------- rules


def _backward(run: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    """A backward operation; where only the gradient is tiled, the forward was plain, and it runs on the gathered gradient."""
    if type(args[0]) is type(args[1]) is TiledTensor:
        return run(func, args, kwargs)
    gradient, *others = tensors_in(args, kwargs)
    if others and type(gradient) is TiledTensor and not any(type(other) is TiledTensor for other in others):
        return func(whole_of(gradient), *args[1:], **kwargs)
    return run(func, args, kwargs)


def by_rule(function: Callable[..., Description], func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `func` by the rule `function`.  What executes the rule's description is cached by the arguments' metadata."""
    tensors: list[Tensor] = []
    is_cut = False
    key: list = [op_of(func)]  # which has a hash in C; that of `func` is a function in Python
    for arg in args if not kwargs else (*args, *kwargs.items()):
        kind = type(arg)
        if kind is TiledTensor:
            if arg.writeback is not None:
                arg.writeback.refresh(version_of(arg))
            tensors.append(arg)
            key.append(arg.tile_layout)
            key.append(arg.dtype)
            is_cut = is_cut or arg.tile_layout.is_cut
        elif kind is list:
            key.append(tuple(arg) if arg and type(arg[0]) in NUMBERS else _key_of_list(arg, tensors))
        elif kind not in NUMBERS and isinstance(arg, Tensor):
            tensors.append(arg)
            key.append(arg.shape)
            key.append(arg.dtype)
        else:
            if kind is tuple:  # a keyword and its value
                arg = (arg[0], _key_of_list([arg[1]], tensors))
            key.append(arg)
    if not is_cut and not any(type(t) is TiledTensor and t.tile_layout.is_cut for t in tensors):
        return on_every_rank(func, args, kwargs)
    named = tuple(key)
    execute = _CACHE.get(named)
    if execute is None:
        if len(_CACHE) >= CACHE_SIZE:
            _CACHE.clear()
        execute = _CACHE[named] = _execute_of(function, func, args, kwargs, tensors)
    return execute(tensors)


_CACHE: dict[tuple, Callable] = {}
CACHE_SIZE = 16384
"""Most entries of the cache; arguments may be new in every step, as a momentum of 1 / steps is."""


def _key_of_list(values: Iterable[Any], tensors: list[Tensor]) -> tuple:
    key: list = []
    for value in values:
        if type(value) is TiledTensor:
            if value.writeback is not None:
                value.writeback.refresh(version_of(value))
            tensors.append(value)
            key += [value.tile_layout, value.dtype]
        elif isinstance(value, Tensor):
            tensors.append(value)
            key += [value.shape, value.dtype]
        elif isinstance(value, list):
            key.append(_key_of_list(value, tensors))
        else:
            key.append(value)
    return tuple(key)


def _execute_of(function: Callable, func: Any, args: tuple, kwargs: dict, tensors: Sequence[Tensor]) -> Callable:
    """Ask the rule, check that its description reads every cut tensor, and build the function that executes it."""
    count = iter(range(len(tensors)))
    metas: list[Meta] = []

    def described(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        layout = value.tile_layout if type(value) is TiledTensor else None
        metas.append(Meta(tuple(value.shape), value.dtype, layout, next(count)))
        return metas[-1]

    described_args, described_kwargs = tree_map(described, args), tree_map(described, kwargs)
    description = function(*described_args, **described_kwargs)
    if isinstance(description, NeedsRedistribute):
        return partial(_after_redistribute, description, function, func, described_args, described_kwargs)
    unread = [meta for meta in metas if meta.is_cut and meta.number not in _numbers_read(description)]
    if unread:
        _refuse(func, f"argument {unread[0].number} is cut into tiles, and there it must be whole")
    is_view = isinstance(description, Local) and description.is_view
    view = partial(_strides_of_views, func, described_args, described_kwargs) if is_view else None
    return build(description, next(m.layout for m in metas if m.layout is not None).grid, view)


def _strides_of_views(func: Any, args: tuple, kwargs: dict, strides: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """The strides of the views by `func` of a whole with `strides`; None where torch would have to copy."""
    whole, *others = args
    with disable_current_modes():
        meta = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device="meta")
        try:
            views = func(meta, *others, **kwargs)
        except RuntimeError:
            views = func(torch.empty(whole.shape, dtype=whole.dtype, device="meta"), *others, **kwargs)
            return [None for _ in tensors_in(views)]
        return [view.stride() for view in tensors_in(views)]


def _after_redistribute(
    description: NeedsRedistribute, function: Callable, func: Any, args: tuple, kwargs: dict, tensors: Sequence[Tensor]
) -> Any:
    """Run an operation again, by its rule, on tensors redistributed as the rule asked."""
    tensors = list(tensors)
    for meta, whole in description.whole:
        tensor = tensors[meta.number]
        assert isinstance(tensor, TiledTensor), f"argument {meta.number} is plain, and is to be uncut"
        layout = move_cuts(tensor.tile_layout, whole)
        tensors[meta.number] = wrap(redistribute(tensor, layout), layout)

    def filled(value: Any) -> Any:
        return tensors[value.number] if isinstance(value, Meta) else value

    return by_rule(function, func, tree_map(filled, args), tree_map(filled, kwargs))


def _numbers_read(description: Description) -> set[int]:
    if isinstance(description, Additive):
        return {description.read.tensor.number, description.over.number}
    if isinstance(description, Windowed):
        return {read.tensor.number for read in description.reads}
    assert not isinstance(description, NeedsRedistribute), "a rule asked twice for a redistribution"
    return {meta.number for meta in description.reads}


def _composed(function: Callable, func: Any, args: tuple, kwargs: dict) -> Any:
    if not any_cut(args, kwargs) and function not in UNCUT_TOO:
        return on_every_rank(func, args, kwargs)
    return function(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- nothing is cut


def any_cut(*values: Any) -> bool:
    """Whether a tensor among the arguments is cut."""
    return any(type(t) is TiledTensor and t.tile_layout.is_cut for t in tensors_in(*values))


def _other(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation without a rule: runs as it is where nothing is cut; else by torch's decomposition, or it is refused."""
    if not any_cut(args, kwargs):
        return on_every_rank(func, args, kwargs)
    if is_in_place(func) and not _is_composite(func) and new_of(func) is not None:
        return through_new(func, args, kwargs)
    decomposition = _decomposition_of(func)
    if decomposition is None:
        _refuse(func, "no file in ops/ has a rule for it")
    return decomposition(*args, **kwargs)


@cache
def is_unknown(func: Any) -> bool:
    """Whether an operation has no rule and no decomposition, and so cannot run on cut tensors."""
    load_rules()
    if not isinstance(func, OpOverload) or func.namespace == "prim" or _handler_of(func) not in (_other, into_outs):
        return False
    new = new_of(func) if written_by(func) else None
    return is_unknown(new) if new is not None else _decomposition_of(func) is None


@cache
def _decomposition_of(func: Any) -> Callable | None:
    """Torch's decomposition of an operation; None where there is none."""
    from widefield.private_torch.decompositions import decomposition_table

    if func.namespace == "prims":  # some decompositions are made of these
        return getattr(func, "impl_aten", None)
    return func.decompose if _is_composite(func) else decomposition_table.get(func)


def _is_composite(func: Any) -> bool:
    """Whether torch decomposes it itself; in inference mode it arrives here first."""
    return dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# ---------------------------------------------------------------------------------------------- refusal


def _refuse(func: Any, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{func} cannot run on an image cut into tiles: {why}. {_call_site()}"
        "Write it with operations that have a rule, take widefield.whole(x) before it, "
        "or plan this model without mesh.space"
    )


def _call_site() -> str:
    """The line of the user's code that called the operation."""
    for frame in reversed(traceback.extract_stack()):
        inside = "/torch/" in frame.filename or frame.filename.startswith((*ENGINE_PATHS, "<"))
        if not inside:
            return f"It was called in {frame.filename}, line {frame.lineno}: {frame.line}. "
    return ""
