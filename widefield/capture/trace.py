"""Captures a module: runs it once on fake tensors and records every operation that torch's dispatcher sees.

torch's fake tensors have shapes, dtypes, devices and memory formats as in a real run, but no memory, so any size can be
captured.  In-place operations become functional ones (torch's functionalization), and writes to buffers become updates at the
end of the graph.  A forward that depends on the values of tensors cannot be captured and is refused.
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
from widefield.capture.side_effects import GIVEN, LeftState, require_stable, seen_by, state_left_by
from widefield.module_paths import ModulePaths
from widefield.private_torch.dispatcher import disable_current_modes
from widefield.private_torch.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from widefield.private_torch.pytree import tree_map
from widefield.tiled.dispatch import prepare
from widefield.tiled.memory_format import quiet

aten = torch.ops.aten
NO_MEMORY = "its data is not allocated yet"
"""Text of torch's error where its own code reads the memory of a fake tensor."""


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
    """The graph of `forward(*args, **kwargs)`, which runs `module`.

    args, kwargs: the module's; objects with shape, dtype, device and requires_grad may stand in for tensors (see `Like`).
    likes: such stand-ins for weights by name, where the module has only shards of them.
    aim: why the module is captured, for error texts ("streamed").
    guards: filled with what else the graph depends on; None: the Python state is restored after the capture.
    NotImplementedError: the forward depends on values of tensors, has a torch.autograd.Function, or has effects in Python that
    a graph cannot repeat.
    """
    prepare()
    found = Guards() if guards is None else guards
    captured = partial(_captured, module, forward, args, kwargs, likes, aim, found)
    with disable_current_modes():  # a mode of the caller, as one that counts, would see the capture as a run
        graph, left = captured()
        if left is not None:
            found.is_stable = False
            require_stable(module, left, lambda: captured()[1], aim=aim, keeps=guards is not None)
    return graph


def _captured(
    module: nn.Module, forward: Callable, args: tuple, kwargs: dict, likes: Mapping[str, Any], aim: str, guards: Guards
) -> tuple[Graph, LeftState | None]:
    """The graph, and the Python state that the forward has changed."""
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
) -> tuple[Graph, LeftState | None]:
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
        recorder.sync_gradients(out)
        refuse_python_gradients(out)
        outputs = tree_map(lambda leaf: recorder.value_of(leaf) if isinstance(leaf, Tensor) else leaf, out)
        after = {name: recorder.value_of(fake) for name, fake in fakes.items()}
        inputs_after = [recorder.value_of(fake) for fake in given]
        left = state_left_by(module, recorder.watch, recorder, aim)
    made = {value.name: value for value in recorder.sources["weight"]}
    updates = {name: value for name, value in after.items() if value is not made[name]}
    _refuse_updates(module, updates, inputs_after, recorder.sources["input"], aim)
    return Graph(recorder.sources["input"], made, recorder.constants, recorder.nodes, outputs, updates), left


def _refuse_updates(module: nn.Module, updates: Collection[str], after: list[Value], inputs: list[Value], aim: str) -> None:
    """NotImplementedError if the forward writes to parameters or inputs; it may write to buffers."""
    weights = [name for name, _ in module.named_parameters() if name in updates]
    if weights:
        raise NotImplementedError(
            f"{name_of(module)} cannot be {aim}: its forward writes to the parameter {weights[0]}; write to it after the "
            "optimizer's step, or make it a buffer"
        )
    if after != inputs:
        raise NotImplementedError(
            f"{name_of(module)} cannot be {aim}: it writes in place to the tensor it is given, as ReLU(inplace=True) at its "
            "start does; give it a copy, or leave inplace out there"
        )


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Inside, cuDNN is off: its batch norm writes to running statistics without an operation for it."""
    was, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = was


@contextmanager
def _without_draws_on_gpus() -> Iterator[None]:
    """Restores the GPU's generator afterwards: to find the shapes of some operations, such as binomial, torch runs them on
    zeros, which draws."""
    state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if state is not None:
            torch.cuda.set_rng_state(state)


def without_autocast() -> ExitStack:
    """A context in which autocast is off, for running a graph: its casts are operations of the graph already."""
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
    # These hooks replace the caller's, such as checkpoint's, and save nothing: an operation that saves its own result would
    # be in a reference cycle that is never freed.
    saved = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_backward)
    try:
        with quiet(), with_weights(module, fakes), without_weights_cache(), refusing_hooks(), saved, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            with watch:
                return forward(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _asks_for_values(module, str(error.func), aim) from error
    except RuntimeError as error:
        if "does not require grad" in str(error):  # the forward calls backward on something without a gradient in this call
            raise backward_inside("of what it has computed so far") from error
        if NO_MEMORY not in str(error):
            raise
        raise _asks_for_values(module, what="an operation", aim=aim) from error


def _refuse_backward(_: Any) -> Tensor:
    raise backward_inside("of what it has computed so far")


def _asks_for_values(module: nn.Module, what: str, aim: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name_of(module)} cannot be {aim}: {what} in it asks for values of a tensor, on which shapes, branches or numbers of "
        f"its forward depend (so does BatchNorm with momentum=None), and what is to be {aim} is captured before there are any; "
        "take the parts before and after it alone"
    )
