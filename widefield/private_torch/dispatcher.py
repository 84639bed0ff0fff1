"""Operators, dispatch keys and modes: what happens between a call and its kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch._library.effects as effects
import torch.library
import torch.utils._mode_utils as mode_utils
import torch.utils._python_dispatch as python_dispatch

if TYPE_CHECKING:
    Function = TypeVar("Function", bound=Callable)

DispatchKey = torch._C.DispatchKey
"""The layers of the dispatcher by name."""

OpOverload = torch._ops.OpOverload
"""The type of an operator as dispatch hands it out; what is of another type is a Python function or a higher-order one."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""An operator's name, arguments and results, and which arguments it writes to."""

op_of: Callable[[Any], Callable] = attrgetter("_op")
"""What an operator's `__call__` calls, without the Python around it: on a grid of one rank that is a part of each operation."""

op_dk_of: Callable[[Any], Callable] = attrgetter("_op_dk")
"""An operator's kernel of one dispatch key, as a function of the key and the arguments: the loop of a `_foreach_` operator."""

dispatch_keyset_full_after: Callable[[Any], Any] = torch._C._dispatch_keyset_full_after
"""All layers below one, to which a kernel of ours hands on what it does not take."""

dispatch_tls_is_dispatch_key_included: Callable[[str], bool] = torch._C._dispatch_tls_is_dispatch_key_included  # type: ignore
"""Whether this thread runs in a layer: "PythonDispatcher" tells that a compiler traces."""

dispatch_has_kernel_for_dispatch_key: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key  # type: ignore
"""Whether an operator, by its name, has a kernel of its own in a layer: a composite one is made of others by torch itself."""

SetExcludeDispatchKeyGuard: Callable[[Any, bool], AbstractContextManager] = torch._C._SetExcludeDispatchKeyGuard  # type: ignore
"""Inside, a layer is left out or not: an alias made below autograd shares the count of writes only with it."""

AutoDispatchBelowAutograd: Callable[[], AbstractContextManager] = torch._C._AutoDispatchBelowAutograd  # type: ignore[assignment]
"""Inside, operations go straight to kernels below autograd, where some are not taken apart."""

TorchDispatchMode = python_dispatch.TorchDispatchMode
"""A context in which every operation of a thread is handed to a method: how operations are looked at and kept."""

disable_current_modes: Callable[[], AbstractContextManager] = python_dispatch._disable_current_modes
"""Inside, no mode sees operations: those that only ask torch for strides are nobody's."""

no_dispatch: Callable[[], AbstractContextManager] = mode_utils.no_dispatch
"""Inside, neither modes nor subclasses see operations, which must be on plain tensors: ten times as quick to enter."""

EffectType = effects.EffectType
"""Kinds of operators that a compiler may neither drop nor reorder."""

register_effectful_op: Callable[[str, Any], None] = torch.library._register_effectful_op
"""Tells compilers that an operator sends messages, which each rank must send and in the same order."""


def destroy_library(library: torch.library.Library) -> None:
    """Take the kernels of a library away again, so that the dispatcher's table is what it was before."""
    library._destroy()


def never_compile(function: Function) -> Function:
    """Keep torch.compile from looking at a function, and at those that it calls, where it runs outside of a graph.

    It would compile them one by one between two graphs.  Those that run a tiled tensor's operations have nothing to gain from
    it, and hold tensors that are not complete yet.  `torch.compiler.disable` imports the compiler, which takes a second.
    """
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    return function


def ends_graphs(function: Function) -> Function:
    """`never_compile`, and a graph in which the function is called ends before it, and another begins behind it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return never_compile(function)
