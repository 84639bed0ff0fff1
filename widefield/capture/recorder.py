"""Dispatch modes that record the operations of a module as it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture import autograd_gaps
from widefield.capture.autograd_gaps import (
    has_grad_fn,
    reaches,
    refuse_python_gradients,
    with_gradient_of,
    with_gradient_of_gamma,
    with_zero_gradient,
)  # fmt: skip
from widefield.capture.decompositions import DECOMPOSITIONS, DRAWS, argument_of, draws_numbers
from widefield.capture.fake_parameters import tensors_of
from widefield.capture.ir import Node, Value
from widefield.capture.python_watch import PythonWatch
from widefield.geometry.strides import stride_order
from widefield.module_paths import ModulePaths
from widefield.private_torch.autograd import current_graph_task_id
from widefield.private_torch.dispatcher import OpOverload, schema_of
from widefield.private_torch.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    from_functional_tensor,
    sync,
)
from widefield.private_torch.pytree import tree_leaves, tree_map
from widefield.private_torch.tensors import base_of
from widefield.tiled.memory_format import with_kernel_strides
from widefield.tiled.redistribute import inverse, is_dense
from widefield.tiled.replicated_ops import is_in_place

aten = torch.ops.aten


class Functional(FunctionalTensorMode):
    """torch's functionalization; it passes the recorder each in-place operation before that becomes a functional one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with self.recorder.watch.paused:
            return self._dispatched(func, types, args, kwargs)

    def _dispatched(self, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
        if func is aten._linalg_check_errors.default:
            return self.recorder.check(*args, **kwargs or {})
        types = tuple(kind for kind in types if kind is not nn.Parameter)  # one that is not registered: a constant
        self.recorder.sync_gradients((args, kwargs))
        first = args[0] if args and isinstance(args[0], FunctionalTensor) else None
        if first is None or not isinstance(func, OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not is_in_place(func):
            return self._mark_views(func, first, super().__torch_dispatch__(func, types, args, kwargs))
        if getattr(first, "hidden", None) is not None:
            raise NotImplementedError(
                f"{func} writes to {list(first.shape)} px that {first.hidden} shows, and a stream cannot tell what that is to "  # type: ignore
                "the tensor it shows them of; write to that tensor's own slices, or make a new one, as torch.where does"
            )
        self.recorder.written = func, _inner(first).stride()
        try:
            with self.recorder.keeping_gradients(first):
                return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.recorder.written = None

    def _mark_views(self, func: Any, first: Any, out: Any) -> Any:
        """Mark views through which writes would be recorded wrongly: overlapping windows, and detached tensors."""
        is_hiding = func is aten.unfold.default or (func is aten.detach.default and self._has_gradient(first))
        hidden = str(func) if is_hiding else getattr(first, "hidden", None) if func.is_view else None
        if hidden is not None:
            for view in tree_leaves(out):
                view.hidden = hidden
        return out

    def _has_gradient(self, tensor: Any) -> bool:
        return self.recorder.is_on and self.recorder.value_of(tensor).wants_grad and torch.is_grad_enabled()


class Recorder(FakeTensorMode):
    """torch's fake tensor mode, which records the operations as `nodes`."""

    avoid_device_init = property(lambda self: False, lambda self, value: None)
    """Always false: else torch pretends to have CUDA, and the first backward starts threads, after which fork is unsafe."""

    def __init__(self, watch: PythonWatch, paths: ModulePaths) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watch, self.paths = watch, paths
        self.nodes: list[Node] = []
        self.sources: dict[str, list[Value]] = {"input": [], "weight": []}
        self.constants: list[tuple[Value, Tensor]] = []
        self.is_on, self.depth = False, 0
        self.leaves: list[Tensor] = []
        """Weights and inputs that require a gradient."""
        self.makers: dict[Value, Node] = {}
        self.used: set[Value] = set()
        self.decomposing: list[Any] = []
        """Operations that are being decomposed, perhaps into themselves."""
        self.written: tuple[Any, tuple[int, ...]] | None = None
        """The in-place operation that runs, and the strides of the tensor that it writes to."""

        self._values: dict[int, tuple[Tensor, Value]] = {}
        self._count = 0

    def close(self) -> None:
        """Drop the references to tensors: they refer to this mode, in cycles that the garbage collector does not see."""
        self._values.clear()
        self.leaves.clear()
        self.makers.clear()
        self.used.clear()
        del self.watch

    # ------------------------------------------------------------------------------------------ values

    def source(self, like: Any, kind: str, name: str) -> Tensor:
        """A fake tensor for a parameter, buffer or input (a tensor, or a stand-in for one)."""
        strided = callable(getattr(like, "stride", None))
        strides = like.stride() if strided else torch.empty(tuple(like.shape), device="meta").stride()
        with torch.no_grad():
            made = torch.empty_strided(tuple(like.shape), strides, dtype=like.dtype, device=like.device)
        fake = from_functional_tensor(made.elem) if isinstance(made, FunctionalTensor) else made
        functional = FunctionalTensor.to_functional(fake)
        functional.requires_grad_(getattr(like, "requires_grad", False))
        value = self._remember(_inner(functional), kind, name)
        value.wants_grad = functional.requires_grad
        if value.wants_grad:
            self.leaves.append(functional)
        self.sources[kind].append(value)
        return functional

    def _remember(self, fake: Tensor, source: str = "made", name: str = "") -> Value:
        order = stride_order(fake.stride())
        value = Value(self._count, tuple(fake.shape), fake.dtype, fake.device, order, source, name)
        self._count += 1
        self._values[id(fake)] = (fake, value)
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """The value of a tensor of the run; a real tensor becomes a constant."""
        fake = _inner(tensor)
        if id(fake) not in self._values:
            value = self._remember(fake, "constant", str(len(self.constants)))
            value.wants_grad = fake.requires_grad
            self.constants.append((value, fake))
        return self._values[id(fake)][1]

    # ------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any
        kwargs = kwargs or {}
        if self.is_on and self.depth == 0 and func in DECOMPOSITIONS and func not in self.decomposing:
            self.decomposing.append(func)
            try:
                with self:
                    out = DECOMPOSITIONS[func](*args, **kwargs)
                return self._in_kernel_order(func, args, kwargs, out) if func in _OWN_ORDER else out
            finally:
                self.decomposing.pop()
        if self.is_on and self.depth == 0:
            self._refuse_writes(func, args)
        self.depth += 1
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func in _SCATTERS and out.stride() != args[0].stride() and is_dense(args[0]):
                out = out.new_empty_strided(out.shape, args[0].stride())
            elif self.written is not None and isinstance(out, Tensor) and _is_written(args, self.written[1], out):
                out = out.new_empty_strided(out.shape, self.written[1])  # as in place
            elif not func.is_view and not schema_of(func).is_mutable:
                out = with_kernel_strides(func, args, kwargs, out)
        finally:
            self.depth -= 1
        if self.is_on and self.depth == 0 and any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            self._note(func, args, kwargs, out)
        return out

    def _in_kernel_order(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> Tensor:
        """The result of a decomposition in the memory format of the operation's own kernel."""
        self.depth += 1
        try:
            made: Any = super().__torch_dispatch__(func, (), args, kwargs)
        finally:
            self.depth -= 1
        order = stride_order(made.stride())
        if order == stride_order(out.stride()):
            return out
        with self:
            moved = aten.clone.default(aten.permute.default(out, order), memory_format=torch.contiguous_format)
            return aten.permute.default(moved, inverse(order))

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if current_graph_task_id() != -1:
            raise backward_inside(str(func))
        if func is aten.copy.default:  # functionalization makes it of a write to a whole tensor
            func, args, kwargs = _copied, args[:2], {}
        given, named = tree_map(lambda leaf: self.value_of(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        outs = [self._made(result) if isinstance(result, Tensor) else None for result in results]
        node = Node(func, given, named, outs, isinstance(out, Tensor), torch.is_grad_enabled())
        node.draws = _draws(func, args, kwargs)
        if not node.grad and getattr(func, "namespace", "aten") != "aten":  # torch runs custom operators under no_grad
            node.grad = True
        if self.written is not None and func not in _VIEWS:
            self._as_written(node, *self.written)
        with_gradient = node.grad and any(value.wants_grad for value in node.reads) and func not in _STOPS and not node.draws
        for number, value in enumerate(outs):
            if value is not None and (number == 0 or func not in _FIRST_ALONE):
                value.wants_grad = with_gradient and (value.dtype.is_floating_point or value.dtype.is_complex)
        self._add(node)

    def _add(self, node: Node) -> None:
        node.path = self.paths.running()
        self.used.update(node.reads)
        self.makers.update({out: node for out in node.outs if out is not None})
        self.nodes.append(node)

    def _as_written(self, node: Node, func: Any, strides: tuple[int, ...]) -> None:
        """An in-place draw draws in the memory order of the tensor that it writes to."""
        if node.draws and node.op not in DRAWS:
            node.op = partial(_drawn, func, strides)

    # ------------------------------------------------------------------------------------------ gradients

    def sync_gradients(self, tensors: Any) -> None:
        """Before tensors are used, update `wants_grad` of their values by what autograd says of them."""
        for tensor in tensors_of(tensors) if self.is_on and torch.is_grad_enabled() else ():
            if isinstance(tensor, FunctionalTensor):
                self._sync_gradient(tensor)

    def _sync_gradient(self, tensor: Any) -> Value:
        value = self.value_of(tensor)
        has_gradient = value.source == "made" and has_grad_fn(tensor)
        if value.source == "made" and value.wants_grad and not has_gradient:
            self._stop_gradient(tensor, value)
        elif has_gradient and not value.wants_grad:
            self._restore_gradient(tensor, value)
        return self.value_of(tensor)

    def _stop_gradient(self, tensor: Any, value: Value) -> None:
        """Record that a tensor has no gradient: torch has no derivative for it, or it was detached in place."""
        maker = self.makers[value]
        if maker.is_single and value not in self.used:
            maker.grad = value.wants_grad = False
        else:
            self._replace(tensor, aten.detach.default, [value], wants_grad=False)

    def _restore_gradient(self, tensor: Any, value: Value) -> None:
        """Record the gradient of random numbers for which torch has a derivative."""
        maker = self.makers[value]
        if maker.draws:
            reads = [read for read in maker.reads if read.wants_grad]
            self._replace(tensor, _DERIVATIVES.get(maker.op, with_zero_gradient), [value, *reads], wants_grad=True)
        elif reaches(tensor.grad_fn, self.leaves):
            refuse_python_gradients(tensor)
            raise NotImplementedError(
                f"a view of {list(value.shape)} px was looked at without gradients after its image was written to without "
                "gradients, and no operation that was written down says where its gradient goes; write to new tensors, or with "
                "gradients on"
            )

    def _replace(self, tensor: Any, op: Any, reads: list[Value], *, wants_grad: bool) -> None:
        """Let a tensor stand for the result of a new node with `op`."""
        fake = _inner(tensor)
        value = self._remember(fake, "made", "")
        value.wants_grad = wants_grad
        self._add(Node(op, tuple(reads), {}, [value], True, True))

    @contextmanager
    def keeping_gradients(self, written: Any) -> Iterator[None]:
        """Around a write under no_grad: the tensor, and the base that it is a view of, keep their gradients."""
        written_to = [] if torch.is_grad_enabled() or not self.is_on else [written, base_of(written)]
        tensors = [tensor for tensor in written_to if tensor is not None and has_grad_fn(tensor)]
        before = [self._sync_gradient(tensor) for tensor in tensors]
        yield
        for tensor, value in zip(tensors, before, strict=True):
            after = self.value_of(tensor)
            if after is not value and value.wants_grad:
                self._replace(tensor, with_gradient_of, [after, value], wants_grad=True)

    def check(self, info: Tensor, api_name: str, *, is_matrix: bool) -> None:
        """Let a linear-algebra operation check its `info` result each time that it runs."""
        value = self.value_of(info)
        if value in self.makers:
            node = self.makers[value]
            node.op = Checked(node.op, node.outs.index(value), api_name, is_matrix)

    def _made(self, result: Tensor) -> Value | None:
        """The value of a new result; None where an operation returns one of its arguments."""
        fake = _inner(result)
        return None if id(fake) in self._values else self._remember(fake)

    def _refuse_writes(self, func: Any, args: tuple) -> None:
        if func in (aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default) and args[5] and args[3] is not None:
            raise NotImplementedError(f"{func} writes to running statistics unseen; call torch.nn.functional.batch_norm")
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if is_write and isinstance(value, Tensor) and not isinstance(_inner(value), FakeTensor):
                raise NotImplementedError(
                    f"{func} writes to a tensor of {list(value.shape)} that the module holds and that is no buffer; "
                    "register_buffer it, so that a stream knows it as state"
                )


def backward_inside(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"a backward ({what}) runs inside of the forward that is to be streamed, and what autograd keeps for its own backward "
        "is not among the operations; take gradient penalties of what the stream returns apart, without a stream"
    )


_STOPS = {aten.detach.default}
"""Operations whose results have no gradient."""
_SCATTERS = {aten.slice_scatter.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default}
"""Writes through views, which keep the memory format; torch's fake implementations do not."""
_FIRST_ALONE = {
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default, aten.cudnn_batch_norm.default, aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default, aten._batch_norm_no_update.default, aten.native_layer_norm.default,
}  # fmt: skip
"""Norms whose returned statistics have no gradient."""
_VIEWS = {aten.slice.Tensor, aten.view.default, aten.permute.default, aten.expand.default, aten.alias.default}


class Checked:
    """A linear-algebra operation that raises torch's LinAlgError if its result number `place` says that it failed."""

    def __init__(self, op: Callable, place: int, api_name: str, is_matrix: bool) -> None:
        self.op, self.place, self.api_name, self.is_matrix = op, place, api_name, is_matrix
        self.__name__ = str(op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.op(*args, **kwargs)
        aten._linalg_check_errors.default(out[self.place], self.api_name, is_matrix=self.is_matrix)
        return out


_OWN_ORDER = {aten.stack.default, aten.repeat.default}
"""Decomposed operations whose kernels choose the memory format of their result."""


def _is_written(args: tuple, strides: tuple[int, ...], out: Tensor) -> bool:
    """Whether `out` is the new content of the tensor that an in-place operation writes to."""
    if not args or not isinstance(args[0], Tensor) or out.stride() == strides:
        return False
    return args[0].shape == out.shape and args[0].stride() == strides


def _drawn(op: Any, strides: tuple[int, ...], like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An in-place draw into a new tensor with the strides of the one that was written to."""
    return op(torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device), *args, **kwargs)


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation draws random numbers.  NotImplementedError: attention that applies dropout in its kernel."""
    if not draws_numbers(func, args, kwargs):
        return False
    if "_scaled_dot_product" in str(func):
        dropped = argument_of(func, args, kwargs, "dropout_p")
        raise NotImplementedError(
            f"{func} drops {dropped:.0%} of the attention inside of one kernel, whose draws cannot be had again; stream it "
            "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or without dropout"
        )
    return True


def _copied(like: Tensor, source: Tensor) -> Tensor:
    """torch's `copy`, with a derivative: the source's numbers in the shape, dtype and memory format of `like`."""
    return with_zero_gradient(torch.empty_like(like).copy_(source), like)


_DERIVATIVES: dict[Any, Callable] = {aten._standard_gamma.default: with_gradient_of_gamma}
"""The derivatives of draws that are not zero."""
POINTWISE = {_copied} | autograd_gaps.POINTWISE
"""Pointwise functions that are recorded in place of torch's operations."""


def _inner(tensor: Tensor) -> Tensor:
    """The fake tensor inside of a functional one, after all writes to it."""
    if isinstance(tensor, FunctionalTensor):
        sync(tensor)
        return from_functional_tensor(tensor.elem)
    return tensor
