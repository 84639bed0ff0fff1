"""PartialGradient: a gradient of which every rank of an image's grid has a part; its value is the mean of the parts.

The gradient of a weight is a sum over all pixels.  A rank has the sum over its own pixels, times the number of tiles.  The mean
over ranks, which DDP or FSDP2 takes anyway, is then the gradient, so nothing is sent here.

The type carries this property along:

- Operations that are affine in it, with factors that are the same on every rank, return a PartialGradient: views, sums,
  products with plain values, the backward operations of plain layers.
- Any other operation gets the value, which is reduced over the ranks first (one message), and is then an uncut tiled tensor, or
  plain if a single number.  So weights that are computed from the image, hooks and gradient penalties see one device's numbers.
- A leaf that is `managed` gets this rank's part as a plain tensor, and somebody else takes the mean.  Any other leaf gets the
  value as a plain tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from widefield.comm import halo
from widefield.geometry.layout import Grid
from widefield.private_torch.autograd import current_autograd_node, current_graph_task_id, engine_run_backward_code
from widefield.private_torch.dispatcher import ends_graphs, never_compile, schema_of
from widefield.private_torch.pytree import tree_map
from widefield.private_torch.tensors import disabled_torch_function_impl, make_wrapper_subclass
from widefield.rooms import is_of_engine
from widefield.tiled.in_place import each
from widefield.tiled.redistribute import space_group, whole_of
from widefield.tiled.replicated_ops import has_internal_overlap, is_in_place, mapped, tensors_in
from widefield.tiled.schemas import targets_of
from widefield.tiled.tensor import OTHER_KINDS, TiledTensor, wrap_uncut
from widefield.tiled.view_writeback import version_of

aten = torch.ops.aten
LEAF_NODE = "torch::autograd::AccumulateGrad"

_MANAGED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Leaves whose gradients somebody averages over the grid's ranks, each with the number of calls of `manage`."""


class PartialGradient(Tensor):
    """A gradient whose value is the mean over the ranks of `grid` of their plain tensors `part`."""

    part: Tensor
    grid: Grid
    writes: list[int]
    """[the number of in-place writes to `part`]; a list that its views share."""
    cached: Any = None
    """(the number of writes, the value) of the last time that the value was computed; else None."""

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_partial(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["part"], self.grid

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], grid: Grid, size: Any, stride: Any) -> Tensor:
        return partial_of(inner["part"], grid)

    def __coerce_same_metadata_as_tangent__(self, expected: Any, kind: type | None = None) -> Any:
        """Its value, as a compiled backward expects it: cut like the forward's output."""
        value = full_value(self)
        return value.__coerce_same_metadata_as_tangent__(expected, kind) if type(value) is TiledTensor else None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialGradient(rank {self.grid.index} of {self.grid.size}, part={self.part!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a gradient of shape {list(self.shape)} of which each of {self.grid.size} ranks has a part cannot be pickled or "
            "saved; save widefield.whole(it), on every rank"
        )


@ends_graphs
def partial_of(part: Tensor, grid: Grid) -> Tensor:
    """The PartialGradient whose part on this rank is `part`; on a grid of one rank `part` itself."""
    if grid.size == 1:
        return part
    made = make_wrapper_subclass(PartialGradient, part.shape, strides=part.stride(), dtype=part.dtype, device=part.device)
    made.part, made.grid, made.writes = part, grid, [0]
    return made


def full_value(tensor: Any) -> Any:
    """The value of a partial gradient, as an uncut tiled tensor, or plain if a single number; other values as they are.

    Every rank of the grid must call it.  Cost: one all-reduce, of one number along expanded dims; the value is cached.
    """
    if type(tensor) is not PartialGradient:
        return tensor
    if tensor.cached is None or tensor.cached[0] != tensor.writes[0]:
        tensor.cached = tensor.writes[0], wrap_uncut(_mean(tensor.part, tensor.grid), tensor.grid)
    return tensor.cached[1]


def full_value_with_grad(tensor: Any) -> Any:
    """`full_value`, differentiable."""
    return _FullValue.apply(tensor) if type(tensor) is PartialGradient else tensor


class _FullValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PartialGradient) -> Tensor:
        value = full_value(tensor)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _mean(part: Tensor, grid: Grid) -> Tensor:
    """The mean over ranks; of expanded dims one element is sent."""
    shape = part.shape
    for dim, (extent, step) in enumerate(zip(shape, part.stride(), strict=True)):
        if step == 0 and extent > 1:
            part = part.narrow(dim, 0, 1)
    return (halo.add_sums(part, space_group(grid)) / grid.size).expand(shape)


# ---------------------------------------------------------------------------------------------- leaves


def manage(parameters: Iterable[Tensor]) -> None:
    """Promise to average the gradients of these leaves over the grid's ranks before anybody reads them."""
    for parameter in parameters:
        _MANAGED[parameter] = _MANAGED.get(parameter, 0) + 1


def release(parameters: Iterable[Tensor]) -> None:
    """Undo one call of `manage`."""
    for parameter in parameters:
        if _MANAGED.get(parameter, 0) > 1:
            _MANAGED[parameter] -= 1
        else:
            _MANAGED.pop(parameter, None)


def part_of_mean(gradient: Tensor) -> Tensor:
    """A plain tensor per rank whose mean over the grid's ranks is the gradient; nothing is sent."""
    if type(gradient) is PartialGradient:
        return gradient.part
    if type(gradient) is not TiledTensor:
        return gradient
    tile, layout = _local(gradient), gradient.tile_layout
    if not layout.is_cut:
        return tile
    whole = tile.new_zeros(layout.shape)
    whole[tuple(slice(i.start, i.stop) for i in layout.box)] = tile * layout.num_shards
    return whole


INTO_LEAF = {
    aten.detach.default, aten.clone.default, aten.new_empty_strided.default, aten.copy_.default, aten.add_.Tensor,
}  # fmt: skip
"""The operations by which autograd puts a gradient into a leaf's `.grad`."""


def is_for_leaf() -> bool:
    """Whether the running operation is autograd's own accumulation of a gradient into a plain leaf, and not a hook's."""
    if current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    node = current_autograd_node()
    if node is None or node.name() != LEAF_NODE or type(node.variable) is TiledTensor:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and is_of_engine(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame is None or frame.f_code is engine_run_backward_code


def into_leaf(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run autograd's operation on what the leaf gets: this rank's part if it is managed, else the value; plain."""
    is_managed = current_autograd_node().variable in _MANAGED
    take: Callable[[Any], Any] = part_of_mean if is_managed else plain_value
    if func is aten.new_empty_strided.default:  # only dtype and device of the gradient matter
        take = _local
    for target in targets_of(func, args, kwargs):
        if type(target) is PartialGradient:
            target.writes[0] += 1
    grids = [value.grid for value in args if type(value) is PartialGradient]
    given, named = mapped(lambda value: take(value) if isinstance(value, Tensor) else value, args, kwargs)
    out = func(*given, **named)
    return partial_of(out, grids[0]) if is_managed and grids and func is aten.detach.default else out


def plain_value(tensor: Tensor) -> Tensor:
    """The value of a plain, tiled or partial gradient, as a plain tensor on every rank."""
    value = full_value(tensor)
    return whole_of(value) if type(value) is TiledTensor else value


# ---------------------------------------------------------------------------------------------- operations


def run_partial(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `func`, one of whose tensor arguments is a partial gradient."""
    if func in INTO_LEAF and is_for_leaf():
        return into_leaf(func, args, kwargs)
    if schema_of(func).name.startswith("aten::_foreach_"):
        return each(func, args, kwargs)
    check = _affine_if(func)
    tensors = tensors_in(args, kwargs)
    is_affine = check is not None and check(args, kwargs) and all(map(_is_replicated, tensors))
    if any(type(target) is PartialGradient for target in targets_of(func, args, kwargs)):
        return _in_place(func, args, kwargs, is_affine=is_affine and is_in_place(func))
    grid = next(tensor.grid for tensor in tensors if type(tensor) is PartialGradient)
    if is_affine:
        parts, named = mapped(_local, args, kwargs)
        out = func(*parts, **named)
        return tree_map(lambda leaf: _made(leaf, grid, args[0] if func.is_view else None), out)
    if func in _SUMS and _have_one_shape(tensors):
        return partial_of(func(*map(_part, args), **kwargs), grid)
    values, named = mapped(full_value, args, kwargs)
    return func(*values, **named)


def _affine_if(func: Any) -> Callable[[tuple, dict], bool] | None:
    """The condition on its arguments under which an operation is affine in partial ones; None if it never is.

    Every view is, except one that reinterprets bits.
    """
    if func in _AFFINE:
        return _AFFINE[func]
    if _is_backward(func) or (func.is_view and func is not aten.view.dtype):
        return _only_first
    return None


def _made(leaf: Any, grid: Grid, source: Any) -> Any:
    """A result of an affine operation on parts.  source: the tensor of which it is a view, or None."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = partial_of(leaf, grid)
    if source is not None:
        made.writes = source.writes  # type: ignore[attr-defined]
    return made


def _in_place(func: Any, args: tuple, kwargs: dict, *, is_affine: bool) -> Any:
    """An in-place operation: on the parts if it is affine in them; else on the values, which then become every rank's part."""
    targets = [target for target in targets_of(func, args, kwargs) if type(target) is PartialGradient]
    tensors = tensors_in(args, kwargs)
    for target in targets:
        if has_internal_overlap(target.part):
            target.part, target.writes, target.cached = target.part.contiguous(), [0], None
    take: Callable[[Any], Any] = _local
    if func in _SUMS_IN_PLACE and _have_one_shape(tensors):
        take = _part
    elif not is_affine:
        for target in targets:
            target.part.copy_(plain_value(target))
        take = lambda value: plain_value(value) if isinstance(value, Tensor) else value  # noqa: E731
    target_ids = {id(target) for target in targets}
    args, kwargs = tree_map(lambda value: value.part if id(value) in target_ids else take(value), (args, kwargs))
    out = func(*args, **kwargs)
    for target in targets:
        target.writes[0] += 1
    of_parts = {id(target.part): target for target in targets}
    return tree_map(lambda leaf: of_parts.get(id(leaf), leaf), out)


def _have_one_shape(tensors: list[Tensor]) -> bool:
    return len(tensors) == 2 and tensors[0].shape == tensors[1].shape


def _part(value: Any) -> Any:
    return part_of_mean(value) if isinstance(value, Tensor) else value


def _local(value: Any) -> Any:
    if type(value) is PartialGradient:
        return value.part
    if type(value) is not TiledTensor:
        return value
    if value.writeback is not None:
        value.writeback.refresh(version_of(value))
    return value.local


def _is_replicated(tensor: Tensor) -> bool:
    """Whether a tensor is plain, partial or uncut: all but cut ones."""
    return type(tensor) is not TiledTensor or not tensor.tile_layout.is_cut


def _count(values: Any) -> int:
    return sum(type(tensor) is PartialGradient for tensor in tensors_in(values))


def _is_backward(func: Any) -> bool:
    name = schema_of(func).name
    return "_backward" in name and not schema_of(func).is_mutable


def _only_first(args: tuple, kwargs: dict) -> bool:
    """Whether only the first argument is partial: the source of a view, or the gradient of a backward operation."""
    return type(args[0]) is PartialGradient and _count((args[1:], kwargs)) == 0


def _one_factor(args: tuple, kwargs: dict) -> bool:
    """Whether one of two factors is partial."""
    return _count((args, kwargs)) == 1


def _into_part(args: tuple, kwargs: dict) -> bool:
    """Whether the target is partial."""
    return type(args[0]) is PartialGradient


def _any_number(args: tuple, kwargs: dict) -> bool:
    return True


_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_SUMS_IN_PLACE = {aten.add_.Tensor, aten.sub_.Tensor}
_AFFINE: dict[Any, Callable[[tuple, dict], bool]] = {
    **dict.fromkeys([
        aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.contiguous.default,
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
        aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.default,
        aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
        aten.split_with_sizes.default, aten.unbind.int, aten.flip.default, aten.roll.default,
        aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
        aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.as_strided.default,
        aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.neg_.default, aten.zero_.default,
        aten.fill_.Scalar,
    ], _only_first),
    **dict.fromkeys([
        aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default,
    ], _one_factor),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default], _any_number),
    **dict.fromkeys([aten.copy_.default, aten.add_.Tensor, aten.sub_.Tensor], _into_part),
}  # fmt: skip
"""Operations that may be affine in their partial arguments, if the others are the same on every rank, and when they are."""

OTHER_KINDS[PartialGradient] = run_partial
