"""What does a forward change in Python's state, and may a graph of its operations replace it?

A graph draws with torch's generators and updates buffers.  Any other effect of the forward's code would happen in the capture
only.  So a forward that draws from another generator, or that changes Python state in every call, is refused.  A forward may
change state in its first call, for example to fill a cache: the state is then left as that call leaves it, with real tensors in
place of the capture's fake ones, and a second capture must change nothing more.

A tensor that depends on the input, on weights or on random numbers cannot be made real.  Where a forward stores one
(`self.features = x`), a `Gone` is put in its place: the forward may overwrite it in every call, but using it raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from widefield.capture.fake_parameters import name_of
from widefield.capture.ir import Node, Value
from widefield.capture.objects import OBJECT
from widefield.capture.python_state import PythonState
from widefield.capture.python_watch import PythonWatch
from widefield.private_torch.modules import RNN_MEMBERS, forward_pre_hooks_of, weight_made_by
from widefield.private_torch.pytree import tree_leaves
from widefield.private_torch.tensors import cdata

GIVEN = "what it is given"
"""The path of a forward's arguments."""
_INSTEAD = (
    "count and collect outside of it, or in a buffer that is written to in place, as self.count.add_(1), and return what is to "
    "be looked at afterwards"
)
_IN_WORDS = {"input": "its input", "weight": "its weights or buffers", "draw": "random numbers"}


@dataclass(frozen=True)
class Gone:
    """In place of a tensor that a forward stored in Python's state; any use of it raises NotImplementedError."""

    path: str
    shape: tuple[int, ...]
    source: str

    def _is_used(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{self.path} is a tensor of {list(self.shape)} made from {self.source}, which a forward left there; of a "
            "module that is streamed, cut by channels or cut into stages, operations run in place of the forward and leave "
            "nothing; return it, or compute it where it is used"
        )

    __torch_function__ = classmethod(lambda kind, func, types, args=(), kwargs=None: _gone_in((args, kwargs))._is_used())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._is_used()


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg", "lt", "le",
    "gt", "ge", "getitem", "setitem", "len", "iter", "bool", "float", "int", "index",
):  # fmt: skip
    setattr(Gone, f"__{_name}__", Gone._is_used)


def _gone_in(arguments: Any) -> Gone:
    return next(leaf for leaf in tree_leaves(arguments) if type(leaf) is Gone)


class Recorded(Protocol):
    """What is needed of a Recorder."""

    nodes: list[Node]
    constants: list[tuple[Value, Tensor]]

    def value_of(self, tensor: Tensor) -> Value: ...


def seen_by(module: nn.Module, roots: Sequence[tuple[str, Any]]) -> PythonState:
    """The state that a forward of `module` can read.  roots: other objects that it reads, with paths."""
    return PythonState([(name_of(module), module), *roots], registered={id(part) for part in module.modules()})


@dataclass(frozen=True)
class LeftState:
    """State that a capture changed, as it left it.  paths: of the changes.

    values: path and value of each fake tensor in the state, by its `id`.
    """

    watch: PythonWatch
    state: PythonState
    paths: list[str]
    values: dict[int, tuple[str, Value]]
    nodes: list[Node]
    constants: list[tuple[Value, Tensor]]

    @torch.no_grad()
    def make_real(self) -> None:
        """Replace fake tensors by real ones if they depend on constants only, else by `Gone`."""
        real = {key: self._real(*found) for key, found in self.values.items()}
        for what, kind, names, children, *_ in self.state.things:
            swapped = [_swapped(child, real) for child in children]
            if kind.write is not None and any(a is not b for a, b in zip(swapped, children, strict=True)):
                kind.write(what, names, swapped)

    def _real(self, path: str, value: Value) -> Tensor | Gone:
        nodes = _operations_of(value, self.nodes)
        source = _source(value, nodes)
        if source is not None:
            return Gone(path, value.shape, source)
        found: dict[Value, Any] = dict(self.constants)
        for node in nodes:
            out = node.call(iter([found[read] for read in node.reads]))
            made = zip(node.outs, [out] if node.is_single else out, strict=True)
            found.update({value: tensor for value, tensor in made if value is not None})
        return found[value]


def state_left_by(module: nn.Module, watch: PythonWatch, recorded: Recorded, aim: str) -> LeftState | None:
    """The state that a capture changed; None if it changed nothing.

    NotImplementedError, after the state was restored: a graph cannot replace the forward.
    """
    try:
        _refuse_calls(module, watch, recorded, aim)
        _refuse_cached(module, watch, recorded, aim)
        _put_back_torchs(watch.state)
        _put_back_gone(watch.state)
        paths = list(watch.state.changes())
        if not paths:
            return None
        after = seen_by(module, [(GIVEN, watch.given), *watch.roots()])
        if after.key == watch.state.key:  # other objects with equal values
            watch.put_back()
            return None
        given = next((path for path in paths if path.startswith(GIVEN)), None)
        if given is not None:
            _refuse(module, aim, f"writes to {given}", "return what is to be looked at afterwards")
        fakes = [(path, fake) for path, fake in after.fakes if not path.startswith(GIVEN)]
        values = {id(fake): (path, recorded.value_of(fake)) for path, fake in fakes}
    except BaseException:
        watch.put_back()
        raise
    finally:
        watch.clear_caches()
    nodes = [replace(node) for node in recorded.nodes]  # copies, since `link` changes the graph's own
    return LeftState(watch, after, paths, values, nodes, recorded.constants)


def require_stable(module: nn.Module, left: LeftState, again: Callable[[], LeftState | None], *, aim: str, keeps: bool) -> None:
    """NotImplementedError, after the state was restored, if a second capture changes the state once more.

    again: captures once more.  keeps: leave the state as the module's first call does, else restore it.
    """
    try:
        left.make_real()
        more = again()
        if more is not None:
            more.watch.put_back()
            _refuse(module, aim, f"changes {more.paths[0]} in every call", _INSTEAD)
        hidden = next((path for path, _ in seen_by(module, left.watch.roots()).fakes), None)
        if hidden is not None:
            _refuse(module, aim, f"leaves a tensor in {hidden}, which cannot be written to", _INSTEAD)
    except BaseException:
        left.watch.put_back()
        raise
    if not keeps:
        left.watch.put_back()


def _refuse(module: nn.Module, aim: str, does: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"{name_of(module)} cannot be {aim}: its forward {does}, and a graph of its operations, which runs in place of its "
        f"code, would not; {instead}"
    )


def _refuse_calls(module: nn.Module, watch: PythonWatch, recorded: Recorded, aim: str) -> None:
    torchs = "draw with torch (torch.rand, torch.randint, nn.Dropout), whose draws are operations"
    drawn = watch.drawn()
    if drawn:
        _refuse(module, aim, f"draws from {drawn[0]}", torchs)
    if watch.seeds:
        _refuse(module, aim, f"seeds a generator ({watch.seeds[0]})", "seed before the call, or hold what is drawn")
    if watch.reads:
        _refuse(
            module, aim, f"takes the numbers of a tensor of {list(watch.reads[0].shape)} into Python",
            "hold them as Python numbers, or compute with the tensor",
        )  # fmt: skip
    known = {cdata(generator) for _, generator in watch.state.generators if isinstance(generator, torch.Generator)}
    for node in recorded.nodes:
        generator = node.generator if node.draws else None
        if generator is not None and cdata(generator) not in known:  # torch makes other objects for the same generator
            _refuse(module, aim, "draws from a torch.Generator that it makes itself", "let the module hold it")


def _refuse_cached(module: nn.Module, watch: PythonWatch, recorded: Recorded, aim: str) -> None:
    """Tensors in functools caches may depend on constants only."""
    for path, fake in watch.cached():
        value = recorded.value_of(fake)
        source = _source(value, _operations_of(value, recorded.nodes))
        if source is not None:
            _refuse(module, aim, f"keeps a tensor of {list(value.shape)} made from {source} in {path}", "compute it anew")


def _source(value: Value, nodes: Sequence[Node]) -> str | None:
    """What a value depends on besides constants, in words, or None.  nodes: the operations that compute it."""
    sources = ["draw" for node in nodes if node.draws]
    sources += [read.source for read in (value, *(read for node in nodes for read in node.reads))]
    return next((_IN_WORDS[source] for source in sources if source in _IN_WORDS), None)


def _operations_of(value: Value, nodes: Sequence[Node]) -> list[Node]:
    """The operations that compute a value, in order."""
    needed, found = {value}, []
    for node in reversed(nodes):
        if any(out in needed for out in node.outs):
            needed.update(node.reads)
            found.append(node)
    return found[::-1]


def _swapped(child: Any, real: Mapping[int, Any]) -> Any:
    if type(child) is tuple:
        swapped = tuple(_swapped(entry, real) for entry in child)
        return child if all(a is b for a, b in zip(child, swapped, strict=True)) else swapped
    return real.get(id(child), child)


def _put_back_gone(state: PythonState) -> None:
    """Restore each `Gone` that the forward has overwritten with a tensor once more."""
    for what, kind, names, children, *_ in state.things:
        if kind.write is not None and any(type(child) is Gone for child in children):
            now, found = kind.read(what)
            if len(now) == len(names) and len(found) == len(children):
                pairs = zip(children, found, strict=True)
                is_again = [type(then) is Gone and isinstance(here, Tensor) for then, here in pairs]
                three = zip(is_again, children, found, strict=True)
                kind.write(what, now, [then if again else here for again, then, here in three])


def _put_back_torchs(state: PythonState) -> None:
    """Restore attributes that torch's layers and hooks compute from their weights in every forward."""
    for thing in state.things:
        if thing.kind is OBJECT and isinstance(thing.what, nn.Module):
            before = dict(zip(thing.names, thing.children, strict=True))
            names = list(RNN_MEMBERS) if isinstance(thing.what, nn.RNNBase) else []
            for hook in forward_pre_hooks_of(thing.what).values():
                if type(hook).__module__.startswith("torch.nn.utils."):
                    names.append(weight_made_by(hook))
            thing.what.__dict__.update({name: before[name] for name in names if name in before})
