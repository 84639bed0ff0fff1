"""Finds what an operation means on tiled tensors: a rule, a pointwise operation, a composition, or a refusal."""

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
from widefield.tiled.redistribute import local_of, moved, redistribute, to_layout, whole_of
from widefield.tiled.replicated_ops import is_in_place, on_every_rank, on_uncut, tensors_in
from widefield.tiled.schemas import new_of, outs_of, written_by
from widefield.tiled.tensor import TiledTensor, wrap
from widefield.tiled.view_writeback import counted, version_of

aten = torch.ops.aten
OPS = "widefield.ops"
"""The room of rules, which stands above this one: it is known by name alone."""


@cache
def load_rules() -> None:
    """Import every file of ops/, which registers what it has."""
    for name in names_in(OPS):
        load(OPS, name)


def prepare() -> None:
    """Before the first tiled tensor, and the first capture: import the rules, and put our kernels before some of torch's."""
    load_rules()
    install_overrides()


def handler_of(func: Any) -> Callable:
    """What runs `func(*args, **kwargs)` where at least one argument is tiled."""
    prepare()
    found = _handler_of(func)
    if written_by(func):
        found = partial(counted, found)
    if _gives_new(func):
        found = partial(ordered, found)
    return partial(_unless_for_leaf, found) if func in INTO_LEAF else found


def _gives_new(func: Any) -> bool:
    """Whether all that it gives is new; some operations write to what they are given besides."""
    given = schema_of(func).returns
    return bool(given) and not func.is_view and all(each.alias_info is None for each in given)


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
    """Every tile by itself, once all operands have the layout of the first tiled one; wraps what comes."""
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
    """The same memory, whose home is the same."""
    made = _pointwise(func, args, kwargs)
    made.writeback, made.may_alias_data = args[0].writeback, True
    return made


def _mixed(func: Any, args: tuple, kwargs: dict) -> Any:
    """Operands of several layouts, plain ones among them."""
    flat = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    shape = torch.broadcast_shapes(*(a.shape for a in flat))
    layout = _common_layout([a for a in flat if type(a) is TiledTensor], tuple(shape))
    if not layout.is_cut and not any_cut(flat):  # one pixel that is cut and meets many is brought to all ranks
        return on_uncut(func, args, kwargs)
    call = partial(_brought_to, layout=layout)
    tiles, named = [call(arg) for arg in args], {name: call(value) for name, value in kwargs.items()}
    out = func(*tiles, **named) if not layout.is_empty else without_pixels(func, tiles, named, layout)
    return tuple(wrap(part, layout) for part in out) if type(out) is tuple else wrap(out, layout)


def _brought_to(value: Any, layout: Layout) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return local_of(value)
    return to_layout(value, layout)


def _common_layout(tensors: Sequence[TiledTensor], shape: tuple[int, ...]) -> Layout:
    """The layout of an output of `shape`: the cuts of the first operand that is cut and large enough to tell."""
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
    """The backward of an operation on plain tensors, whose result met a tiled one later, runs on the whole gradient."""
    gradient, *others = tensors_in(args, kwargs)
    if others and type(gradient) is TiledTensor and not any(type(other) is TiledTensor for other in others):
        return func(whole_of(gradient), *args[1:], **kwargs)
    return run(func, args, kwargs)


def by_rule(function: Callable[..., Description], func: Any, args: tuple, kwargs: dict) -> Any:
    tensors: list[Tensor] = []
    is_cut = False
    key: list = [func]
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
            key.append(_key_of_list(arg, tensors))
        elif isinstance(arg, Tensor):
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
    execute = _KNOWN.get(named)
    if execute is None:
        if len(_KNOWN) >= KNOWN_MOST:
            _KNOWN.clear()
        execute = _KNOWN[named] = _execute_of(function, func, args, kwargs, tensors)
    return execute(tensors)


_KNOWN: dict[tuple, Callable] = {}
KNOWN_MOST = 16384
"""How many are kept: arguments that are new in every step, as a momentum of 1 / steps is, must not fill the memory."""


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
    """Ask the rule, see that it covers every cut tensor, and build what carries it out."""
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
        return partial(_again, description, function, func, described_args, described_kwargs)
    unread = [meta for meta in metas if meta.is_cut and meta.number not in _numbers_read(description)]
    if unread:
        _refuse(func, f"argument {unread[0].number} is cut into tiles, and there it must be whole")
    is_view = isinstance(description, Local) and description.is_view
    view = partial(_strides_of_views, func, described_args, described_kwargs) if is_view else None
    return build(description, next(m.layout for m in metas if m.layout is not None).grid, view)


def _strides_of_views(func: Any, args: tuple, kwargs: dict, strides: tuple[int, ...]) -> list[tuple[int, ...] | None]:
    """The strides of views, by `func`, of a whole that has `strides`; None where memory is not shown so."""
    whole, *others = args
    with disable_current_modes():
        meta = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device="meta")
        try:
            shown = func(meta, *others, **kwargs)
        except RuntimeError:
            shown = func(torch.empty(whole.shape, dtype=whole.dtype, device="meta"), *others, **kwargs)
            return [None for _ in tensors_in(shown)]
        return [view.stride() for view in tensors_in(shown)]


def _again(
    description: NeedsRedistribute, function: Callable, func: Any, args: tuple, kwargs: dict, tensors: Sequence[Tensor]
) -> Any:
    """The operation on tensors that were brought to the layouts which its rule asked for."""
    tensors = list(tensors)
    for meta, whole in description.whole:
        tensor = tensors[meta.number]
        assert isinstance(tensor, TiledTensor), f"argument {meta.number} is plain, and is to be uncut"
        layout = moved(tensor.tile_layout, whole)
        tensors[meta.number] = wrap(redistribute(tensor, layout), layout)

    def filled(value: Any) -> Any:
        return tensors[value.number] if isinstance(value, Meta) else value

    return by_rule(function, func, tree_map(filled, args), tree_map(filled, kwargs))


def _numbers_read(description: Description) -> set[int]:
    if isinstance(description, Additive):
        return {description.read.tensor.number, description.over.number}
    if isinstance(description, Windowed):
        return {read.tensor.number for read in description.reads}
    assert not isinstance(description, NeedsRedistribute), "a rule asked for other layouts once more"
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
    """No rule: fine where nothing is cut; else torch's own decomposition, or a refusal."""
    if not any_cut(args, kwargs):
        return on_every_rank(func, args, kwargs)
    if is_in_place(func) and not _is_composite(func) and new_of(func) is not None:
        return through_new(func, args, kwargs)
    decomposition = _decomposition_of(func)
    if decomposition is None:
        _refuse(func, "no file in ops/ says what it means on tiles")
    return decomposition(*args, **kwargs)


@cache
def is_unknown(func: Any) -> bool:
    """Whether no rule, and no definition in terms of others, says what an operation means on tiles."""
    load_rules()
    if not isinstance(func, OpOverload) or func.namespace == "prim" or _handler_of(func) not in (_other, into_outs):
        return False
    new = new_of(func) if written_by(func) else None
    return is_unknown(new) if new is not None else _decomposition_of(func) is None


@cache
def _decomposition_of(func: Any) -> Callable | None:
    """Torch's own definition of an operation in terms of others."""
    from widefield.private_torch.decompositions import decomposition_table

    if func.namespace == "prims":  # what some of these definitions are made of
        return getattr(func, "impl_aten", None)
    return func.decompose if _is_composite(func) else decomposition_table.get(func)


def _is_composite(func: Any) -> bool:
    """Whether torch makes it of others itself; in the inference mode it asks us first."""
    return dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# ---------------------------------------------------------------------------------------------- refusal


def _refuse(func: Any, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{func} cannot run on an image cut into tiles: {why}. {_call_site()}"
        "Write it with operations that have a rule, take widefield.whole(x) before it, "
        "or plan this model without mesh.space"
    )


def _call_site() -> str:
    """The line of the user's own code that asked for it."""
    for frame in reversed(traceback.extract_stack()):
        inside = "/torch/" in frame.filename or frame.filename.startswith((*ENGINE_PATHS, "<"))
        if not inside:
            return f"It was called in {frame.filename}, line {frame.lineno}: {frame.line}. "
    return ""
