"""Follows a module once on tensors without pixels, and writes down every operation that torch's dispatcher sees.

The tensors are torch's fake ones: shapes, dtypes, devices and memory formats as in the whole run, no memory, any size.
Operations in place are turned into plain ones on the way (torch calls it functionalization), and what they do to buffers
becomes an update at the end.  Whatever depends on pixels' values cannot be followed, and is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from widefield.capture.autograd_gaps import refuse_python_gradients
from widefield.capture.containers import refuse_hidden
from widefield.capture.decompositions import with_linears
from widefield.capture.fake_parameters import (
    is_tensor,
    name_of,
    named_tensors,
    refuse_scripts,
    refusing_hooks,
    tensors_of,
    with_weights,
    without_weights_cache,
)
from widefield.capture.ir import Graph, Value, link
from widefield.capture.python_watch import Guards, PythonWatch
from widefield.capture.recorder import Functional, Recorder, backward_inside
from widefield.capture.side_effects import GIVEN, Left, left_by, seen_by, settle
from widefield.module_paths import ModulePaths
from widefield.private_torch.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from widefield.private_torch.pytree import tree_map
from widefield.tiled.dispatch import prepare
from widefield.tiled.memory_format import quiet

aten = torch.ops.aten
NO_MEMORY = "its data is not allocated yet"
"""What torch says where its own code looks at the memory of a tensor without any."""


def trace(
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
    prepare()
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
    refuse_scripts(module, aim)
    watch = PythonWatch(seen_by(module, []))
    recorder = Recorder(watch, ModulePaths(module))
    try:
        graph, left = _recorded(recorder, module, forward, args, kwargs, likes, aim)
    except BaseException:
        watch.put_back()
        raise
    finally:
        recorder.close()
    guards.places |= watch.places
    return link(with_linears(link(graph))), left


def _recorded(
    recorder: Recorder, module: nn.Module, forward: Callable, args: tuple, kwargs: dict, likes: Mapping[str, Any], aim: str
) -> tuple[Graph, Left | None]:
    weights = named_tensors(module)
    with _without_cudnn(), _without_draws_on_gpus(), recorder, Functional(recorder):
        fakes = {name: recorder.source(likes.get(name, tensor), "weight", name) for name, tensor in weights.items()}
        given = [recorder.source(leaf, "input", str(n)) for n, leaf in enumerate(tensors_of((args, kwargs)))]
        images = iter(given)
        fake_args, fake_kwargs = tree_map(lambda leaf: next(images) if is_tensor(leaf) else leaf, (args, kwargs))
        recorder.watch.given = fake_args, fake_kwargs
        recorder.watch.state.add(GIVEN, recorder.watch.given)
        recorder.is_on = True
        stand_ins = {weights[name]: fake for name, fake in fakes.items()}
        out = _called(module, forward, stand_ins, fake_args, fake_kwargs, recorder.watch, aim)
        refuse_hidden(module, out, "returns")
        recorder.settle(out)
        refuse_python_gradients(out)
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


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Inside, norms are torch's own: cuDNN's write to running statistics unseen.  Its other switches stay as they are."""
    was, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = was


@contextmanager
def _without_draws_on_gpus() -> Iterator[None]:
    """Inside, nothing is drawn on this process's GPU: of an operation whose shapes torch does not know, as binomial, it asks a
    run on zeros, which moves a GPU's generator."""
    state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if state is not None:
            torch.cuda.set_rng_state(state)


def without_autocast() -> ExitStack:
    """Inside, autocast is off: its casts are operations of the graph already."""
    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _called(
    module: nn.Module,
    forward: Callable,
    fakes: Mapping[Tensor, Tensor],
    args: tuple,
    kwargs: dict,
    watch: PythonWatch,
    aim: str,
) -> Any:
    saved = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_backward)  # not those around, as checkpoint's
    try:
        with quiet(), with_weights(module, fakes), without_weights_cache(), refusing_hooks(), saved, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # one that the module holds
            with watch:
                return forward(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _asks_for_values(module, str(error.func), aim) from error
    except RuntimeError as error:
        if "does not require grad" in str(error):  # what it asks gradients of wants none in this call
            raise backward_inside("of what it has computed so far") from error
        if NO_MEMORY not in str(error):
            raise
        # torch's own code, which looks at a tensor's memory
        raise _asks_for_values(module, what="an operation", aim=aim) from error


def _refuse_backward(_: Any) -> Tensor:
    """Nothing is saved: an operation that saved its own result would be held by it, for ever."""
    raise backward_inside("of what it has computed so far")


def _asks_for_values(module: nn.Module, what: str, aim: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name_of(module)} cannot be {aim}: {what} in it asks for values of a tensor, on which shapes, branches or numbers of "
        f"its forward depend (so does BatchNorm with momentum=None), and what is to be {aim} is laid out before there are any; "
        "take the parts before and after it alone"
    )
