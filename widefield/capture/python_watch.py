"""Finds the Python state that a forward reads while it is captured, besides the module's own attributes.

A profile function (sys.setprofile) sees every call.  For functions outside of torch, NumPy, the standard library and widefield,
it notes the names that their code reads: globals, closures, default arguments.  Each name enters the PythonState before the
function first runs, so that changes by the forward are seen.

It also notes calls that seed a generator, ask the system for random bytes, or take a tensor's numbers into Python.
"""

from __future__ import annotations

import dis
import gc
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from widefield.capture.objects import Name, is_foreign
from widefield.capture.python_state import PythonState
from widefield.private_torch.fake_tensors import is_captured
from widefield.rooms import ENGINE_PATHS

_FOREIGN_FOLDERS = (
    *ENGINE_PATHS,
    str(Path(torch.__file__).parent),
    str(Path(np.__file__).parent),
    "<frozen",
    "<__array_function__",
)
_STANDARD = sysconfig.get_paths()["stdlib"]
_SEEDS = {"manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"}
_READS = {"tolist", "numpy"}


def _is_of_the_collector(code: types.CodeType) -> bool:
    """Whether it is a callback of the garbage collector, which may run at any time."""
    return any(getattr(callback, "__code__", None) is code for callback in gc.callbacks)


@dataclass
class Guards:
    """What a captured graph depends on besides its module and arguments: `places`, names and functions that its code reads.

    is_stable: whether the capture left the Python state unchanged; else the state is what the module's first call leaves.
    """

    places: dict[Any, None] = field(default_factory=dict)
    is_stable: bool = True


class _Paused:
    """Inside, the profile function is off: torch's dispatch makes a hundred times as many calls as the forward."""

    def __init__(self, watch: PythonWatch) -> None:
        self.watch, self.depth = watch, 0

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1 and self.watch.is_on:
            sys.setprofile(None)

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.watch.is_on:
            sys.setprofile(self.watch.look)


class PythonWatch:
    """Watches a forward that runs in `with watch:`.

    state: the state that the forward can read; names are added when they are found.  given: the forward's arguments.
    """

    def __init__(self, state: PythonState) -> None:
        self.state = state
        self.given: Any = None
        self.places: dict[Any, None] = {}
        """Names and functions that the forward depends on, in the order in which they were found."""
        self.seeds: list[str] = []
        """Calls that seed generators."""
        self.reads: list[Tensor] = []
        """Tensors whose numbers were taken into Python."""
        self.generators: list[tuple[str, Any, Any]] = []
        """Generators of Python and NumPy, with their states before; draws from torch's are operations of the graph."""
        self._seen: set[Any] = set()
        self._within: set[types.CodeType] = set()
        """Code of functions that are defined inside of functions that ran."""
        self.paused, self.is_on = _Paused(self), False
        self._other: Any = None
        self._error: BaseException | None = None
        for path, generator in (("Python's random", random._inst), ("numpy.random", np.random.mtrand._rand)):  # type: ignore
            self.generators.append((path, generator, _state_of(generator)))
        self._cached: dict[int, tuple[str, Any, int]] = {}
        self._find_generators()

    # ------------------------------------------------------------------------------------------ on and off

    def __enter__(self) -> PythonWatch:
        self._other, self.is_on = sys.getprofile(), True
        if self._other is not None and not callable(self._other):  # cProfile's profiler cannot be called from `look`
            self._other.disable()
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        self.is_on = False
        if self._other is not None and not callable(self._other):
            self._other.enable()
        elif self._other is not None:
            sys.setprofile(self._other)
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------------------------------ the profile function

    def look(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """The profile function of sys.setprofile."""
        try:
            if event == "call":
                code = frame.f_code
                if code not in self._seen or code.co_freevars:
                    self._called(code, frame)
            elif event == "c_call":
                self._called_c(argument)
        except Exception as error:  # raised after the forward, which might catch it
            self._error = self._error or error
        if callable(self._other):
            self._other(frame, event, argument)

    def _called(self, code: types.CodeType, frame: types.FrameType) -> None:
        if code is random.Random.seed.__code__ and frame.f_locals["a"] is None:
            self.seeds.append("random.Random().seed()")
        if _is_foreign_file(code.co_filename) or _is_of_the_collector(code):
            self._seen.add(code)
            return
        closure = tuple(id(frame.f_locals.get(name)) for name in code.co_freevars if name != "__class__")
        if (code, closure) in self._seen:
            return
        if code not in self._seen:
            self._within.update(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
            for name in _names(code, frame.f_globals):
                self._note(str(name), name)
        self._seen.update((code, (code, closure)))
        if code not in self._within:
            for function in self._functions(code, frame):
                self._note(function.__qualname__, function)

    def _note(self, path: str, place: Any) -> None:
        if place not in self.places:
            self.places[place] = None
            self.state.add(path, place)
            self._find_generators()

    def _find_generators(self) -> None:
        """Note the generators and functools caches that are newly in the state, before the forward uses them."""
        for path, function in self.state.caches:
            self._cached.setdefault(id(function), (path, function, function.cache_info().misses))
        known = {id(generator) for _, generator, _ in self.generators}
        for path, generator in self.state.generators:
            if id(generator) not in known and not isinstance(generator, torch.Generator):
                self.generators.append((path, generator, _state_of(generator)))

    def _functions(self, code: types.CodeType, frame: types.FrameType) -> list[Any]:
        """The functions with this code, and the frame's closure, that are not in the state yet."""
        known = [function for function in self.state.functions.get(code, ()) if _encloses(function, frame)]
        if known:
            return []  # it is in the state already
        named = _by_name(code, frame.f_globals)
        if named is not None:
            return [named]
        functions = [thing for thing in gc.get_referrers(code) if isinstance(thing, types.FunctionType)]
        return [function for function in functions if _encloses(function, frame)] or functions

    def _called_c(self, function: Any) -> None:
        name = getattr(function, "__name__", "")
        if name in _SEEDS and isinstance(getattr(function, "__self__", None), torch.Generator):
            self.seeds.append(f"torch.Generator.{name}()")
        elif name in _READS:
            tensor = getattr(function, "__self__", None)
            if isinstance(tensor, Tensor) and not is_captured(tensor):
                self.reads.append(tensor)
        elif name == "urandom":
            self.seeds.append("os.urandom()")

    # ------------------------------------------------------------------------------------------ after the forward

    def drawn(self) -> list[str]:
        """The generators of Python and NumPy that were drawn from."""
        return [path for path, generator, state in self.generators if not _same(_state_of(generator), state)]

    def cached(self) -> list[tuple[str, Tensor]]:
        """Fake tensors of the capture in functools caches, with their paths."""
        return [pair for path, function in self._filled() for pair in _results(path, function).fakes]

    def clear_caches(self) -> None:
        """Clear the functools caches that contain fake tensors."""
        for path, function in self._filled():
            if _results(path, function).fakes:
                function.cache_clear()

    def _filled(self) -> list[tuple[str, Any]]:
        return [(path, function) for path, function, misses in self._cached.values() if function.cache_info().misses != misses]

    def roots(self) -> list[tuple[str, Any]]:
        """The names and functions that were found, with paths."""
        return roots_of(self.places)

    def put_back(self) -> None:
        """Restore the Python state and the generators as they were before the forward."""
        self.state.restore()
        for _, generator, state in self.generators:
            if not _same(_state_of(generator), state):
                _set_state(generator, state)


def roots_of(places: Iterable[Any]) -> list[tuple[str, Any]]:
    """Names and functions, with paths."""
    return [(str(place) if isinstance(place, Name) else place.__qualname__, place) for place in places]


def _results(path: str, function: Any) -> PythonState:
    """The state of a function's functools cache."""
    results = [thing for thing in gc.get_referents(function) if not callable(thing)]
    return PythonState([(f"the cache of {path}", results)])


@cache
def _is_foreign_file(filename: str) -> bool:
    if any(filename.startswith(folder) for folder in _FOREIGN_FOLDERS):
        return True
    return filename.startswith(_STANDARD) and "site-packages" not in filename and "dist-packages" not in filename


def _encloses(function: Any, frame: types.FrameType) -> bool:
    """Whether a function has the closure of a frame."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if name != "__class__" and frame.f_locals.get(name) is not content:
            return False
    return True


def _by_name(code: types.CodeType, space: dict[str, Any]) -> Any:
    """The function or method of this code that a namespace has under the code's qualified name; None if there is none."""
    found: Any = None
    for part in code.co_qualname.split("."):
        found = space.get(part) if found is None else vars(found).get(part) if isinstance(found, type) else None
        if found is None:
            return None
    found = getattr(found, "__func__", found)
    return found if getattr(found, "__code__", None) is code else None


# ---------------------------------------------------------------------------------------------- names in code


def _names(code: types.CodeType, space: dict[str, Any]) -> Iterator[Name]:
    """The globals that code reads, and the names that it may read in Python modules among these or imported by it."""
    names, imported = _globals_of(code)
    found = [Name(space, name) for name in names if name in space]
    yield from found
    modules = [space[place.name] for place in found] + [sys.modules.get(_full_name(*how, space)) for how in imported]
    looked_at = set()
    while modules:
        module = modules.pop()
        if not isinstance(module, types.ModuleType) or is_foreign(module.__name__) or module in looked_at:
            continue
        looked_at.add(module)
        read = [name for name in code.co_names if name in vars(module)]
        yield from (Name(vars(module), name) for name in read)
        modules += [vars(module)[name] for name in read]


def _full_name(name: str, level: int, space: dict[str, Any]) -> str:
    if not level:
        return name
    package = (space.get("__package__") or "").split(".")
    return ".".join([*package[: len(package) - level + 1], *([name] if name else [])])


@cache
def _globals_of(code: types.CodeType) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The global names in code, and the (name, level) of the imports in it."""
    names: dict[str, None] = {}
    imported, numbers = [], [0]
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
            names[step.argval] = None
        elif step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and type(step.argval) is int:
            numbers.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.append((step.argval, numbers[-1]))
    return tuple(names), tuple(imported)


# ---------------------------------------------------------------------------------------------- generators


def _state_of(generator: Any) -> Any:
    """A copy of the state of a generator of Python or NumPy; None for the system's, which has no state."""
    if isinstance(generator, random.SystemRandom):
        return None
    return deepcopy(generator.getstate() if isinstance(generator, random.Random) else _source(generator).state)


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal; NumPy's are dicts with arrays."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _source(generator).state = state


def _source(generator: Any) -> Any:
    """The object with the state of a NumPy generator."""
    return getattr(generator, "bit_generator", getattr(generator, "_bit_generator", generator))
