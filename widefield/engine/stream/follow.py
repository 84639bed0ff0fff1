"""Follows a module once on tensors without pixels, and writes down every operation that torch's dispatcher sees.

The tensors are torch's fake ones: shapes, dtypes, devices and memory formats as in the whole run, no memory, any size.
Operations in place are turned into plain ones on the way (torch calls it functionalization), and what they do to buffers
becomes an update at the end.  Whatever depends on pixels' values cannot be followed, and is refused.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from widefield.engine.alike import is_in_place
from widefield.engine.stream.apart import APART, DRAWS, with_linears
from widefield.engine.stream.graph import Graph, Node, Value, link
from widefield.engine.stream.left_behind import GIVEN, Left, left_by, seen_by, settle
from widefield.engine.stream.stand_ins import name_of, named_tensors, refusing_hooks, with_weights
from widefield.engine.stream.watch import Guards, Watch
from widefield.engine.tiled import TiledTensor

aten = torch.ops.aten


def follow(
    module: nn.Module,
    forward: Callable,
    args: tuple,
    kwargs: dict,
    *,
    likes: Mapping[str, Any] = MappingProxyType({}),
    aim: str = "streamed",
    guards: Guards | None = None,
) -> Graph:
    """What `forward(*args, **kwargs)`, which runs `module`, does.

    args, kwargs: the module's, with anything that has shape, dtype, device and requires_grad in place of a tensor.
    likes: such things for weights by name, where the module holds parts of them alone.  aim: what for, in refusals.
    guards: gets to know on what else the graph depends; None: it is only looked at, and leaves nothing behind.
    NotImplementedError, in words, where what it does depends on pixels, has a gradient that only Python knows, or is done in
    Python alone.
    """
    found = Guards() if guards is None else guards
    captured = partial(_captured, module, forward, args, kwargs, likes, aim, found)
    graph, left = captured()
    if left is not None:
        found.is_settled = False
        settle(module, left, lambda: captured()[1], aim=aim, keeps=guards is not None)
    return graph


def _captured(
    module: nn.Module, forward: Callable, args: tuple, kwargs: dict, likes: Mapping[str, Any], aim: str, guards: Guards
) -> tuple[Graph, Left | None]:
    """The graph, and what the forward left behind in Python's state."""
    watch = Watch(seen_by(module, []))
    try:
        graph, left = _recorded(_Recorder(watch), module, forward, args, kwargs, likes, aim)
    except BaseException:
        watch.put_back()
        raise
    guards.places |= watch.places
    return link(with_linears(link(graph))), left


def _recorded(
    recorder: _Recorder, module: nn.Module, forward: Callable, args: tuple, kwargs: dict, likes: Mapping[str, Any], aim: str
) -> tuple[Graph, Left | None]:
    weights = named_tensors(module)
    with torch.backends.cudnn.flags(enabled=False), recorder, _Functional(recorder):  # cuDNN's norms write to statistics unseen
        fakes = {name: recorder.source(likes.get(name, tensor), "weight", name) for name, tensor in weights.items()}
        given = [recorder.source(leaf, "input", str(n)) for n, leaf in enumerate(tensors_of((args, kwargs)))]
        images = iter(given)
        fake_args, fake_kwargs = tree_map(lambda leaf: next(images) if is_tensor(leaf) else leaf, (args, kwargs))
        recorder.watch.given = fake_args, fake_kwargs
        recorder.watch.state.add(GIVEN, recorder.watch.given)
        recorder.is_on = True
        stand_ins = {weights[name]: fake for name, fake in fakes.items()}
        out = _called(module, forward, stand_ins, fake_args, fake_kwargs, recorder.watch, aim)
        recorder.settle(out)
        _refuse_python_gradients(out)
        outputs = tree_map(lambda leaf: recorder.value_of(leaf) if isinstance(leaf, Tensor) else leaf, out)
        after = {name: recorder.value_of(fake) for name, fake in fakes.items()}
        inputs_after = [recorder.value_of(fake) for fake in given]
        left = left_by(module, recorder.watch, recorder, aim)
    made = {value.name: value for value in recorder.sources["weight"]}
    updates = {name: value for name, value in after.items() if value is not made[name]}
    _refuse_updates(module, updates, inputs_after, recorder.sources["input"], aim)
    return Graph(recorder.sources["input"], made, recorder.constants, recorder.nodes, outputs, updates), left


def _refuse_updates(module: nn.Module, updates: Collection[str], after: list[Value], inputs: list[Value], aim: str) -> None:
    """Buffers may change in a forward; what the caller holds, or an optimizer, may not."""
    weights = [name for name, _ in module.named_parameters() if name in updates]
    if weights:
        raise NotImplementedError(
            f"{name_of(module)} cannot be {aim}: its forward writes to the parameter {weights[0]}; write to "
            f"it after the "
            "optimizer's step, or make it a buffer"
        )
    if after != inputs:
        raise NotImplementedError(
            f"{name_of(module)} cannot be {aim}: it writes in place to the tensor it is given, as "
            f"ReLU(inplace=True) at its "
            "start does; give it a copy, or leave inplace out there"
        )


def is_tensor(leaf: Any) -> bool:
    """Whether an argument is a tensor or stands for one, as a Reader does."""
    return isinstance(leaf, Tensor) or (hasattr(leaf, "shape") and hasattr(leaf, "read"))


def tensors_of(arguments: Any) -> list[Any]:
    """The tensors among a module's arguments, in order."""
    return [leaf for leaf in tree_leaves(arguments) if is_tensor(leaf)]


def without_autocast() -> ExitStack:
    """Inside, autocast is off: its casts are operations of the graph already."""
    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _called(
    module: nn.Module, forward: Callable, fakes: Mapping[Tensor, Tensor], args: tuple, kwargs: dict, watch: Watch, aim: str
) -> Any:
    plain = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor
    )  # not those around, as checkpoint's
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the errors that are raised, too
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with with_weights(module, fakes), refusing_hooks(), plain, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # one that the module holds
            with watch:
                return forward(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NotImplementedError(
            f"{name_of(module)} cannot be {aim}: {error.func} in it asks for values of a tensor, on which "
            f"shapes, branches "
            "or numbers of its forward depend (so does BatchNorm with momentum=None), and what is to be "
            f"{aim} is laid out before there are any; take the parts before and after it alone"
        ) from error
    finally:
        log.setLevel(level)


def _refuse_python_gradients(out: Any) -> None:
    """A torch.autograd.Function's backward is not among the operations, so it would be lost."""
    stack = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        is_known = type(node).__name__.startswith("GeneratedBackwardFor_")  # of a custom op, which knows its own backward
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not is_known:
            name = type(node).__name__.removesuffix("Backward")
            raise NotImplementedError(
                f"{name} is a torch.autograd.Function, whose backward a stream does not see; write it with torch's operations, "
                "or as a torch.library.custom_op with register_autograd, or stream the parts before and after it"
            )
        following = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(following)
        stack += following


class _Functional(FunctionalTensorMode):
    """Torch's functionalization, which tells the recorder what an operation was before it was turned into a plain one."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with self.recorder.watch.paused:
            return self._dispatched(func, types, args, kwargs)

    def _dispatched(self, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
        types = tuple(kind for kind in types if kind is not nn.Parameter)  # one that the module does not know: a constant
        self.recorder.settle(args)
        first = args[0] if args and isinstance(args[0], FunctionalTensor) else None
        if first is None or not isinstance(func, torch._ops.OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not is_in_place(func):
            return self._marked(func, first, super().__torch_dispatch__(func, types, args, kwargs))
        if getattr(first, "hidden", None) is not None:
            raise NotImplementedError(
                f"{func} writes to {list(first.shape)} px that {first.hidden} shows, and a stream cannot tell what that is to "  # type: ignore
                "the tensor it shows them of; write to that tensor's own slices, or make a new one, as torch.where does"
            )
        self.recorder.written = func, _inner(first).stride(), first.requires_grad and not torch.is_grad_enabled()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.recorder.written = None

    def _marked(self, func: Any, first: Any, out: Any) -> Any:
        """Views whose writes torch would turn into something else: of windows, and of what autograd no longer knows."""
        is_hiding = func is aten.unfold.default or (func is aten.detach.default and self._is_pulled(first))
        hidden = str(func) if is_hiding else getattr(first, "hidden", None) if func.is_view else None
        if hidden is not None:
            for view in tree_leaves(out):
                view.hidden = hidden
        return out

    def _is_pulled(self, tensor: Any) -> bool:
        return self.recorder.is_on and self.recorder.value_of(tensor).wants_grad and torch.is_grad_enabled()


class _Recorder(FakeTensorMode):
    """Torch's fake tensors, and a list of the operations on them."""

    avoid_device_init = property(lambda self: False, lambda self, value: None)
    """Else torch feigns a CUDA where there is none, and the first backward starts threads that no fork outlives."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watch = watch
        self.nodes: list[Node] = []
        self.sources: dict[str, list[Value]] = {"input": [], "weight": []}
        self.constants: list[tuple[Value, Tensor]] = []
        self.is_on, self.depth = False, 0
        self.unsure: dict[Value, Node] = {}
        self.busy: list[Any] = []
        """Operations that are being taken apart, perhaps into themselves."""
        self.written: tuple[Any, tuple[int, ...], bool] | None = None
        """Of an operation in place: what it was, the strides of what it writes to, and whether autograd was not to see it."""

        self._values: dict[int, tuple[Tensor, Value]] = {}
        self._count = 0

    # ------------------------------------------------------------------------------------------ values

    def source(self, like: Any, kind: str, name: str) -> Tensor:
        """A fake tensor for a parameter, buffer or input."""
        strided = callable(getattr(like, "stride", None)) and type(like) is not TiledTensor
        strides = like.stride() if strided else torch.empty(tuple(like.shape), device="meta").stride()
        with torch.no_grad():
            made = torch.empty_strided(tuple(like.shape), strides, dtype=like.dtype, device=like.device)
        fake = torch._from_functional_tensor(made.elem) if isinstance(made, FunctionalTensor) else made
        functional = FunctionalTensor.to_functional(fake)
        functional.requires_grad_(getattr(like, "requires_grad", False))
        value = self._remember(_inner(functional), kind, name)
        value.wants_grad = functional.requires_grad
        self.sources[kind].append(value)
        return functional

    def _remember(self, fake: Tensor, source: str = "made", name: str = "") -> Value:
        order = tuple(sorted(range(fake.ndim), key=lambda dim: (-fake.stride(dim), dim)))
        value = Value(self._count, tuple(fake.shape), fake.dtype, fake.device, order, source, name)
        self._count += 1
        self._values[id(fake)] = (fake, value)
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor of the run stands for; a real tensor is a constant of the module."""
        fake = _inner(tensor)
        if id(fake) not in self._values:
            value = self._remember(fake, "constant", str(len(self.constants)))
            value.wants_grad = fake.requires_grad
            self.constants.append((value, fake))
        return self._values[id(fake)][1]

    # ------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.is_on and self.depth == 0 and func in APART and func not in self.busy:
            self.busy.append(func)
            try:
                with self:
                    return APART[func](*args, **kwargs)
            finally:
                self.busy.pop()
        if self.is_on and self.depth == 0:
            self._refuse_writes(func, args)
        self.depth += 1
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.depth -= 1
        if self.is_on and self.depth == 0 and any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise NotImplementedError(
                f"a backward ({func}) runs inside of the forward that is to be streamed, and what autograd keeps for "
                f"its own backward "
                "is not among the operations; take gradient penalties of what the stream returns apart, without a stream"
            )
        if func is aten.copy.default:  # all that is left of a write once the tensor written to is a new one
            func, args, kwargs = _copied, args[:2], {}
        named = tree_map(lambda leaf: self.value_of(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        outs = [self._made(result) if isinstance(result, Tensor) else None for result in results]
        node = Node(func, *named, outs, isinstance(out, Tensor), torch.is_grad_enabled())
        node.draws = _draws(func, args, kwargs)
        if not node.grad and getattr(func, "namespace", "aten") != "aten":  # torch calls custom operations without, either way
            node.grad = True
            self.unsure.update({out: node for out in outs if out is not None})
        if self.written is not None and func not in _VIEWS:
            self._as_written(node, *self.written)
        pulled = node.grad and any(value.wants_grad for value in node.reads) and func not in _STOPS and not node.draws
        for number, value in enumerate(outs):
            if value is not None and (number == 0 or func not in _FIRST_ALONE):
                value.wants_grad = pulled and (value.dtype.is_floating_point or value.dtype.is_complex)
        self.nodes.append(node)

    def settle(self, tensors: Any) -> None:
        """Whether a custom operation was called with gradients on shows in what it gave, once that is used."""
        for tensor in tensors_of(tensors) if self.unsure else ():
            value = self.value_of(tensor)
            node = self.unsure.pop(value, None)
            if node is not None and not tensor.requires_grad and value.wants_grad:
                node.grad = value.wants_grad = False

    def _as_written(self, node: Node, func: Any, strides: tuple[int, ...], unseen: bool) -> None:
        """Numbers are drawn in place in the order in which they lie in memory; what autograd does not see keeps its
        gradient."""
        if node.draws and node.op not in DRAWS:
            node.op = partial(_drawn, func, strides)
        elif unseen and node.outs[0] is not None and node.reads[0].shape == node.outs[0].shape:
            node.op, node.grad = _Unseen(node.op), True

    def _made(self, result: Tensor) -> Value | None:
        """The value that an operation makes; None where it gives back what it was given."""
        fake = _inner(result)
        return None if id(fake) in self._values else self._remember(fake)

    def _refuse_writes(self, func: Any, args: tuple) -> None:
        if func in (aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default) and args[5] and args[3] is not None:
            raise NotImplementedError(f"{func} writes to running statistics unseen; call torch.nn.functional.batch_norm")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if is_write and isinstance(value, Tensor) and not isinstance(_inner(value), FakeTensor):
                raise NotImplementedError(
                    f"{func} writes to a tensor of {list(value.shape)} that the module holds and that is no buffer; "
                    "register_buffer it, so that a stream knows it as state"
                )


_STOPS = {aten.detach.default}
"""Operations whose results have no gradient."""
_FIRST_ALONE = {
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default, aten.cudnn_batch_norm.default, aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default, aten._batch_norm_no_update.default, aten.native_layer_norm.default,
}  # fmt: skip
"""Norms of which torch gives no gradient to the statistics that they return."""
_VIEWS = {aten.slice.Tensor, aten.view.default, aten.permute.default, aten.expand.default, aten.alias.default}


class _Unseen:
    """A pointwise operation written into its first argument while gradients were off: that one's gradient stays as it was."""

    def __init__(self, op: Callable) -> None:
        self.op = op

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            written = self.op(x, *args, **kwargs)
        return x + (written - x).detach() if x.requires_grad else written


def _drawn(op: Any, strides: tuple[int, ...], like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A draw in place on new memory with the strides of what was written to."""
    return op(torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device), *args, **kwargs)


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation draws random numbers; NotImplementedError where it also computes something with a gradient."""
    if func in DRAWS:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if not func._schema.name.startswith("aten::_scaled_dot_product"):
        return True
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if named.get("dropout_p"):
        raise NotImplementedError(
            f"{func} drops {named['dropout_p']:.0%} of the attention inside of one kernel, whose draws cannot be had "
            f"again; stream it "
            "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or without dropout"
        )
    return False


def _copied(like: Tensor, source: Tensor) -> Tensor:
    """torch's `copy`, which has no derivative: the source's pixels in the shape and dtype of another tensor."""
    return source.to(like.dtype).expand(like.shape).clone()


POINTWISE = {_copied}
"""What is written down in place of torch's own operations, and gives each output pixel from the same pixel of its inputs."""


def _inner(tensor: Tensor) -> Tensor:
    """The fake tensor inside of a functional one, with all that was written to it."""
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor.elem)
    return tensor
