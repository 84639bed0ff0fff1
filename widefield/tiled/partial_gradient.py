"""PartialGradient: a gradient of which every rank of an image's grid has a part; its value is the mean of the parts.

The gradient of a weight is a sum over all pixels, and a rank has its own pixels' share of it, times the number of tiles.  The
mean over ranks, which a reducer or FSDP2 takes anyway, is then the whole's gradient, so nothing needs to be sent here.

That it is a part travels with the value, by its type:

- operations that are affine in it, with factors that every rank has alike, give a part again: views, sums, products with plain
  values, the backward operations of plain layers that a weight went through;
- whatever else looks at it gets the value: it is added up over the ranks first (one message), and is tiled without cuts from
  then on, or plain where it is one number.  So a weight that was computed from the image, a hook, a penalty on gradients see
  one device's numbers;
- a leaf takes it: a `managed` one as its rank's plain part, for whoever promised the mean, any other as the plain value.
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
from widefield.private_torch.dispatcher import schema_of
from widefield.private_torch.pytree import tree_flatten, tree_map
from widefield.private_torch.tensors import disabled_torch_function_impl, make_wrapper_subclass
from widefield.rooms import is_of_engine
from widefield.tiled.in_place import each
from widefield.tiled.redistribute import space_group, whole_of
from widefield.tiled.replicated_ops import is_in_place, repeats_places
from widefield.tiled.schemas import targets_of
from widefield.tiled.tensor import OTHER_KINDS, TiledTensor, wrap_uncut
from widefield.tiled.view_writeback import version_of

aten = torch.ops.aten
LEAF_NODE = "torch::autograd::AccumulateGrad"

_MANAGED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Leaves whose gradients somebody averages over the ranks of the grid, with how many there are that do."""


class PartialGradient(Tensor):
    """`part` is this rank's plain part, `grid` the ranks whose parts' mean is the value."""

    part: Tensor
    grid: Grid
    writes: list[int]
    """How many operations wrote to the part, or to what shows the same memory."""
    known: Any = None
    """The value, once it was asked for, and how many writes there were by then."""

    __torch_function__ = disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_partial(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["part"], self.grid

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], grid: Grid, size: Any, stride: Any) -> Tensor:
        return partial_of(inner["part"], grid)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialGradient(rank {self.grid.index} of {self.grid.size}, part={self.part!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a gradient of shape {list(self.shape)} of which each of {self.grid.size} ranks has a part cannot be pickled or "
            "saved; save widefield.whole(it), on every rank"
        )


def partial_of(part: Tensor, grid: Grid) -> Tensor:
    """The gradient of which this rank has `part`; plain, and the part itself, on a grid of one rank."""
    if grid.size == 1:
        return part
    made = make_wrapper_subclass(PartialGradient, part.shape, strides=part.stride(), dtype=part.dtype, device=part.device)
    made.part, made.grid, made.writes = part, grid, [0]
    return made


def full_value(tensor: Any) -> Any:
    """The value of a partial gradient: tiled without cuts, or plain where it is one number; anything else as it is.

    Cost: one sum over the grid of as many numbers as differ; once per tensor.  Every rank of the grid calls it.
    """
    if type(tensor) is not PartialGradient:
        return tensor
    if tensor.known is None or tensor.known[0] != tensor.writes[0]:
        tensor.known = tensor.writes[0], wrap_uncut(_mean(tensor.part, tensor.grid), tensor.grid)
    return tensor.known[1]


def full_value_with_grad(tensor: Any) -> Any:
    """`full_value`, through which gradients of gradients go."""
    return _Settle.apply(tensor) if type(tensor) is PartialGradient else tensor


class _Settle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PartialGradient) -> Tensor:
        value = full_value(tensor)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _mean(part: Tensor, grid: Grid) -> Tensor:
    """The mean over ranks; of dims that repeat one value, that alone is sent."""
    shape = part.shape
    for dim, (extent, step) in enumerate(zip(shape, part.stride(), strict=True)):
        if step == 0 and extent > 1:
            part = part.narrow(dim, 0, 1)
    return (halo.add_sums(part, space_group(grid)) / grid.size).expand(shape)


# ---------------------------------------------------------------------------------------------- leaves


def manage(parameters: Iterable[Tensor]) -> None:
    """Promise that the gradients of these leaves are averaged over ranks before anybody reads them."""
    for parameter in parameters:
        _MANAGED[parameter] = _MANAGED.get(parameter, 0) + 1


def release(parameters: Iterable[Tensor]) -> None:
    """Take one promise of `manage` back."""
    for parameter in parameters:
        if _MANAGED.get(parameter, 0) > 1:
            _MANAGED[parameter] -= 1
        else:
            _MANAGED.pop(parameter, None)


def part_of_mean(gradient: Tensor) -> Tensor:
    """What this rank gives so that the mean over the ranks of the grid is the gradient: plain, and nothing is sent."""
    if type(gradient) is PartialGradient:
        return gradient.part
    if type(gradient) is not TiledTensor:
        return gradient
    own, layout = _own(gradient), gradient.tile_layout
    if not layout.is_cut:
        return own
    whole = own.new_zeros(layout.shape)
    whole[tuple(slice(i.start, i.stop) for i in layout.box)] = own * layout.num_shards
    return whole


INTO_LEAF = {
    aten.detach.default, aten.clone.default, aten.new_empty_strided.default, aten.copy_.default, aten.add_.Tensor,
}  # fmt: skip
"""What autograd does with a gradient that has reached a leaf."""


def is_for_leaf() -> bool:
    """Whether the operation that is dispatched now is autograd's own, which hands a gradient to a plain leaf.

    It detaches or copies the gradient, or adds it to what is there.  What a hook does, which it calls, is not.
    """
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
    """The leaf gets what is its own: a managed one what this rank's part is, any other the value."""
    is_managed = current_autograd_node().variable in _MANAGED
    take: Callable[[Any], Any] = part_of_mean if is_managed else plain_value
    if func is aten.new_empty_strided.default:  # which asks for a dtype and a device alone
        take = _own
    for target in targets_of(func, args, kwargs):
        if type(target) is PartialGradient:
            target.writes[0] += 1
    grids = [value.grid for value in args if type(value) is PartialGradient]
    args, kwargs = tree_map(lambda value: take(value) if isinstance(value, Tensor) else value, (args, kwargs))
    out = func(*args, **kwargs)
    return partial_of(out, grids[0]) if is_managed and grids and func is aten.detach.default else out


def plain_value(tensor: Tensor) -> Tensor:
    """What a gradient is, as a plain tensor that every rank has."""
    value = full_value(tensor)
    return whole_of(value) if type(value) is TiledTensor else value


# ---------------------------------------------------------------------------------------------- operations


def run_partial(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func`, one of whose tensor arguments is a partial gradient."""
    if func in INTO_LEAF and is_for_leaf():
        return into_leaf(func, args, kwargs)
    if schema_of(func).name.startswith("aten::_foreach_"):
        return each(func, args, kwargs)
    check = _affine_if(func)
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    is_affine = check is not None and check(args, kwargs) and all(map(_is_alike, tensors))
    if any(type(target) is PartialGradient for target in targets_of(func, args, kwargs)):
        return _in_place(func, args, kwargs, is_affine=is_affine and is_in_place(func))
    grid = next(tensor.grid for tensor in tensors if type(tensor) is PartialGradient)
    if is_affine:
        out = func(*tree_map(_own, args), **tree_map(_own, kwargs))
        return tree_map(lambda leaf: _made(leaf, grid, args[0] if func.is_view else None), out)
    if func in _SUMS and _have_one_shape(tensors):
        return partial_of(func(*tree_map(_part, args), **kwargs), grid)
    return func(*tree_map(full_value, args), **tree_map(full_value, kwargs))


def _affine_if(func: Any) -> Callable[[tuple, dict], bool] | None:
    """When an operation is affine in its partial arguments; None where it never is.  Every view but of bits is."""
    if func in _AFFINE:
        return _AFFINE[func]
    if _is_backward(func) or (func.is_view and func is not aten.view.dtype):
        return _first_alone
    return None


def _made(leaf: Any, grid: Grid, shown: Any) -> Any:
    """What an affine operation gave of parts.  shown: whose memory it shows, if it does."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = partial_of(leaf, grid)
    if shown is not None:
        made.writes = shown.writes  # type: ignore[attr-defined]
    return made


def _in_place(func: Any, args: tuple, kwargs: dict, *, is_affine: bool) -> Any:
    """Write to parts; unless that is affine in them, to the values, which every rank then has as its part."""
    targets = [target for target in targets_of(func, args, kwargs) if type(target) is PartialGradient]
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    for target in targets:
        if repeats_places(target.part):
            target.part, target.writes, target.known = target.part.contiguous(), [0], None
    take: Callable[[Any], Any] = _own
    if func in _SUMS_IN_PLACE and _have_one_shape(tensors):
        take = _part
    elif not is_affine:
        for target in targets:
            target.part.copy_(plain_value(target))
        take = lambda value: plain_value(value) if isinstance(value, Tensor) else value  # noqa: E731
    kept = {id(target): target for target in targets}
    args, kwargs = tree_map(lambda value: value.part if id(value) in kept else take(value), (args, kwargs))
    out = func(*args, **kwargs)
    for target in targets:
        target.writes[0] += 1
    of_parts = {id(target.part): target for target in targets}
    return tree_map(lambda leaf: of_parts.get(id(leaf), leaf), out)


def _have_one_shape(tensors: list[Tensor]) -> bool:
    return len(tensors) == 2 and tensors[0].shape == tensors[1].shape


def _part(value: Any) -> Any:
    return part_of_mean(value) if isinstance(value, Tensor) else value


def _own(value: Any) -> Any:
    if type(value) is PartialGradient:
        return value.part
    if type(value) is not TiledTensor:
        return value
    if value.writeback is not None:
        value.writeback.refresh(version_of(value))
    return value.local


def _is_alike(tensor: Tensor) -> bool:
    """Whether a tensor is a partial gradient, or the same on every rank."""
    return type(tensor) is not TiledTensor or not tensor.tile_layout.is_cut


def _count(values: Any) -> int:
    return sum(type(leaf) is PartialGradient for leaf in tree_flatten(values)[0])


def _is_backward(func: Any) -> bool:
    name = schema_of(func).name
    return "_backward" in name and not schema_of(func).is_mutable


def _first_alone(args: tuple, kwargs: dict) -> bool:
    """Of the arguments the first alone is partial: what a view shows, or the gradient that a backward operation is given."""
    return type(args[0]) is PartialGradient and _count((args[1:], kwargs)) == 0


def _one_factor(args: tuple, kwargs: dict) -> bool:
    """Of two factors one is partial."""
    return _count((args, kwargs)) == 1


def _into_part(args: tuple, kwargs: dict) -> bool:
    """What is written to is partial."""
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
    ], _first_alone),
    **dict.fromkeys([
        aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default,
    ], _one_factor),
    **dict.fromkeys([aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default], _any_number),
    **dict.fromkeys([aten.copy_.default, aten.add_.Tensor, aten.sub_.Tensor], _into_part),
}  # fmt: skip
"""Operations that are affine in their partial arguments, where the others are alike on every rank, and when they are."""

OTHER_KINDS[PartialGradient] = run_partial
