"""Modules whose forward depends on Python state, and what they give from call to call: `CASES`.

Each case is run by a plain module and by one that is read from a capture, with the same changes between calls; the second must
give the first's numbers at every call, or refuse in words.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CALLS = 3
SCALE = 1.0
OPTIONS = {"power": [1.0, 2.0]}
COUNT = 0
TENSOR = torch.ones(1, dtype=torch.float64)
TABLES: dict[int, Tensor] = {}
CHOSEN: ContextVar[float] = ContextVar("CHOSEN", default=1.0)
settings = types.ModuleType("hidden_settings")
settings.scale = 1.0  # type: ignore[attr-defined]
sys.modules["hidden_settings"] = settings


@dataclass
class Schedule:
    """A number that a loop moves."""

    step: int = 0
    history: list[float] = field(default_factory=lambda: [0.5])

    def value(self) -> float:
        return self.history[-1] + self.step


class Slotted:
    __slots__ = ("inner", "scale")

    def __init__(self) -> None:
        self.scale, self.inner = 1.0, Schedule()


class Net(nn.Module):
    """Two convolutions with `does(self, y)` between them."""

    factor = 1.0

    def __init__(self, does: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.does = does
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.does(self, self.first(x)).tanh())


class Counting(Net):
    """Its own class, so that what changes in it changes in no other test."""

    factor = 1.0
    calls = 0


class WithDefault(Net):
    def forward(self, x: Tensor, options: Schedule = Schedule()) -> Tensor:  # noqa: B008
        return self.second(self.does(self, self.first(x)) * options.value())


class Remembering(Net):
    def forward(self, x: Tensor, seen: list = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return self.second(self.first(x) * len(seen))


@dataclass(frozen=True)
class Case:
    """change(module, call): before each call but the first.  refuses: a pattern of the words, where it is refused by all, and
    `refuses_stages` where stages alone refuse."""

    name: str
    make: Callable[[], nn.Module]
    change: Callable[[Any, int], Any] = lambda module, call: None
    refuses: str = ""
    refuses_stages: str = ""


def reset() -> None:
    """Globals and generators as at the start."""
    global SCALE, COUNT, TENSOR
    SCALE, COUNT, TENSOR = 1.0, 0, torch.ones(1, dtype=torch.float64)
    OPTIONS["power"] = [1.0, 2.0]
    TABLES.clear()
    CHOSEN.set(1.0)
    settings.scale = 1.0  # type: ignore[attr-defined]
    Counting.factor, Counting.calls = 1.0, 0
    WithDefault.forward.__defaults__[0].step = 0  # type: ignore[index]
    Remembering.forward.__defaults__[0].clear()  # type: ignore[index]
    _table.cache_clear()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)


# ---------------------------------------------------------------------------------------------- what a forward reads


def _one(number: float) -> Tensor:
    return torch.full((1,), float(number), dtype=torch.float64)


def _set_global(_: Any, call: int) -> None:
    global SCALE
    SCALE = 1.0 + call


def _set_tensor(_: Any, call: int) -> None:
    global TENSOR
    TENSOR = _one(call)


def _by_name(self: Any, y: Tensor) -> Tensor:
    from hidden_settings import scale  # type: ignore[import-not-found]

    return y * scale


def _closed_over() -> nn.Module:
    scale = 1.0

    def does(self: Any, y: Tensor) -> Tensor:
        return y * scale

    def move(to: float) -> None:
        nonlocal scale
        scale = to

    net = Net(does)
    vars(net)["_widefield_test_move"] = move  # out of sight, as anything that is no part of the forward
    return net


def _moved(module: Any, call: int) -> None:
    vars(module)["_widefield_test_move"](1.0 + call)


def _hooked() -> nn.Module:
    net, held = Net(lambda self, y: y), [1.0]
    net.first.register_forward_hook(lambda module, inputs, output: output * held[0])
    vars(net)["_widefield_test_move"] = functools.partial(held.__setitem__, 0)
    return net


def _tied() -> nn.Module:
    held = _one(2)
    return Net(lambda self, y: y * self.a + self.b, a=held, b=held)


def _untie(module: Any, call: int) -> None:
    module.b = _one(call)


def _one_weight_twice() -> nn.Module:
    net = Net(lambda self, y: self.other(y), other=nn.Conv2d(8, 8, 3, padding=1))
    net.other.bias = net.first.bias
    return net


def _untie_weight(module: Any, call: int) -> None:
    if call == 1 and not module.first.bias.is_meta:
        module.other.bias = nn.Parameter(torch.ones_like(module.first.bias))


class _Pair(list):
    """A list with an attribute."""

    scale = 1.0


OUTSIDE = [
    Case("a number", lambda: Net(lambda self, y: y * self.a, a=1.0), lambda m, n: setattr(m, "a", 1.0 + n)),
    Case(
        "a number's kind",
        lambda: Net(lambda self, y: y * (2 if type(self.a) is int else 3), a=1),
        lambda m, n: setattr(m, "a", 1.0),
    ),
    Case(
        "a list in a list", lambda: Net(lambda self, y: y * self.a[0][1], a=[[1, 2.0]]), lambda m, n: m.a[0].__setitem__(1, n)
    ),
    Case("a list's attribute", lambda: Net(lambda self, y: y * self.a.scale, a=_Pair()), lambda m, n: setattr(m.a, "scale", n)),
    Case(
        "a dict in a dict",
        lambda: Net(lambda self, y: y * self.a["b"]["c"], a={"b": {"c": 1}}),
        lambda m, n: m.a["b"].update(c=n),
    ),
    Case(
        "an order",
        lambda: Net(lambda self, y: y * [*self.a.values()][0], a={1: 2, 2: 3}),
        lambda m, n: m.a.update({1: m.a.pop(1)}),
    ),
    Case("a set", lambda: Net(lambda self, y: y * len(self.a), a={7}), lambda m, n: m.a.add(n)),
    Case("a schedule", lambda: Net(lambda self, y: y * self.a.value(), a=Schedule()), lambda m, n: setattr(m.a, "step", n)),
    Case(
        "a schedule's list", lambda: Net(lambda self, y: y * self.a.value(), a=Schedule()), lambda m, n: m.a.history.append(n)
    ),
    Case("slots", lambda: Net(lambda self, y: y * self.a.scale, a=Slotted()), lambda m, n: setattr(m.a, "scale", n)),
    Case(
        "deep down",
        lambda: Net(lambda self, y: y * self.a[0]["s"].inner.step, a=[{"s": Slotted()}]),
        lambda m, n: setattr(m.a[0]["s"].inner, "step", n),
    ),
    Case(
        "another class",
        lambda: Net(lambda self, y: y * self.a.factor, a=types.SimpleNamespace(factor=3.0)),
        lambda m, n: setattr(m, "a", Counting),
    ),
    Case(
        "a partial's argument",
        lambda: Net(functools.partial(lambda self, y, by: y * by.step, by=Schedule(1))),
        lambda m, n: setattr(m.does.keywords["by"], "step", n),
    ),
    Case(
        "a method's object",
        lambda: Net(lambda self, y: y * self.a(), a=Schedule().value),
        lambda m, n: setattr(m.a.__self__, "step", n),
    ),
    Case("a closure", _closed_over, _moved),
    Case("a hook's closure", _hooked, _moved),
    Case("a global", lambda: Net(lambda self, y: y * SCALE), _set_global),
    Case("a global's list", lambda: Net(lambda self, y: y ** OPTIONS["power"][-1]), lambda m, n: OPTIONS["power"].append(n)),
    Case("a global tensor", lambda: Net(lambda self, y: y * TENSOR), _set_tensor),
    Case("another file's global", lambda: Net(lambda self, y: y * settings.scale), lambda m, n: setattr(settings, "scale", n)),
    Case("an imported name", lambda: Net(_by_name), lambda m, n: setattr(settings, "scale", n)),
    Case("a context variable", lambda: Net(lambda self, y: y * CHOSEN.get()), lambda m, n: CHOSEN.set(1.0 + n)),
    Case("a class attribute", lambda: Counting(lambda self, y: y * self.factor), lambda m, n: setattr(Counting, "factor", n)),
    Case(
        "a default argument",
        lambda: WithDefault(lambda self, y: y),
        lambda m, n: setattr(WithDefault.forward.__defaults__[0], "step", n),
    ),
    Case("an array", lambda: Net(lambda self, y: y * float(self.a[1]), a=np.ones(3)), lambda m, n: m.a.__setitem__(1, n)),
    Case(
        "NumPy's number",
        lambda: Net(lambda self, y: y * float(self.a), a=np.float32(1)),
        lambda m, n: setattr(m, "a", np.float32(n)),
    ),
    Case(
        "an iterator",
        lambda: Net(lambda self, y: y * (2 if "2" in repr(self.a) else 3), a=itertools.count()),
        lambda m, n: next(m.a),
    ),
    Case(
        "a tensor in a list", lambda: Net(lambda self, y: y * self.a[0], a=[_one(1)]), lambda m, n: m.a.__setitem__(0, _one(n))
    ),
    Case(
        "a tensor in a tuple",
        lambda: Net(lambda self, y: y * self.a[0], a=(_one(1),)),
        lambda m, n: setattr(m, "a", (_one(n),)),
    ),
    Case(
        "a tensor in an object",
        lambda: Net(lambda self, y: y * self.a.t, a=types.SimpleNamespace(t=_one(1))),
        lambda m, n: setattr(m.a, "t", _one(n)),
    ),
    Case(
        "a tensor in a dict, written to",
        lambda: Net(lambda self, y: y * self.a["t"], a={"t": _one(1)}),
        lambda m, n: m.a["t"].fill_(n),
    ),
    Case("an attribute's tensor", lambda: Net(lambda self, y: y * self.a, a=_one(1)), lambda m, n: setattr(m, "a", _one(n))),
    Case("one tensor twice", _tied, _untie),
    Case("one weight twice", _one_weight_twice, _untie_weight),
    Case("a buffer", lambda: Net(lambda self, y: y * self.a, a=nn.Buffer(_one(1))), lambda m, n: m.a.fill_(n)),
]
"""State that is changed between calls: each call sees it as it stands."""


# ---------------------------------------------------------------------------------------------- what a forward changes


def _counting(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y * self.count


def _counting_globally(self: Any, y: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return y * COUNT


def _counting_in_the_class(self: Any, y: Tensor) -> Tensor:
    type(self).calls += 1
    return y * type(self).calls


def _collecting(self: Any, y: Tensor) -> Tensor:
    self.seen.append(len(self.seen))
    return y * len(self.seen)


def _counting_in_a_closure() -> nn.Module:
    count = 0

    def does(self: Any, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return y * count

    return Net(does)


def _hook_that_collects() -> nn.Module:
    net, seen = Net(lambda self, y: y), []
    net.first.register_forward_hook(lambda module, inputs, output: seen.append(output))
    return net


def _generated() -> Iterator[float]:
    yield from itertools.count(1.0)


def _self_made(self: Any, y: Tensor) -> Tensor:
    return y + torch.rand(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))


def _unseeded(self: Any, y: Tensor) -> Tensor:
    return y + torch.rand(y.shape, dtype=y.dtype, generator=torch.Generator())


def _forked(self: Any, y: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return y + torch.rand_like(y)


def _swapping(self: Any, y: Tensor) -> Tensor:
    self.a, self.b = self.b, self.a
    return y * self.a


_EVERY = "its forward changes {} in every call, and a graph of its operations"
INSIDE = [
    Case("a count", lambda: Net(_counting, count=0), refuses=_EVERY.format("Net.count")),
    Case("a global count", lambda: Net(_counting_globally), refuses=_EVERY.format("the global COUNT of .*hidden")),
    Case("a class's count", lambda: Counting(_counting_in_the_class), refuses=_EVERY.format("(Streamed)?Counting.calls")),
    Case("a list that grows", lambda: Net(_collecting, seen=[]), refuses=_EVERY.format("Net.seen")),
    Case(
        "a default that grows",
        lambda: Remembering(lambda self, y: y),
        refuses=_EVERY.format("Remembering.forward's default arguments.0."),
    ),
    Case(
        "a count in a closure",
        _counting_in_a_closure,
        refuses=_EVERY.format("_counting_in_a_closure.<locals>.does's closure over count"),
    ),
    Case("a hook that collects", _hook_that_collects, refuses="its forward changes .*'s closure over seen in every call"),
    Case("two that change places", lambda: Net(_swapping, a=2.0, b=3.0), refuses=_EVERY.format("Net.(a|b)")),
    Case(
        "an iterator's next",
        lambda: Net(lambda self, y: y * next(self.a), a=itertools.count(1)),
        refuses=_EVERY.format("Net.a"),
    ),
    Case("a generator's next", lambda: Net(lambda self, y: y * next(self.a), a=_generated()), refuses=_EVERY.format("Net.a")),
    Case("a buffer's count", lambda: Net(lambda self, y: y * self.count.add_(1), count=nn.Buffer(_one(0)))),
    Case("Python's random", lambda: Net(lambda self, y: y * random.random()), refuses="its forward draws from Python's random"),
    Case(
        "a choice", lambda: Net(lambda self, y: y * random.choice([1, 2, 3])), refuses="its forward draws from Python's random"
    ),
    Case("NumPy's random", lambda: Net(lambda self, y: y * np.random.rand()), refuses="its forward draws from numpy.random"),
    Case(
        "NumPy's generator",
        lambda: Net(lambda self, y: y * self.a.random(), a=np.random.default_rng(1)),
        refuses="its forward draws from Net.a",
    ),
    Case(
        "a generator of Python's",
        lambda: Net(lambda self, y: y * self.a[0].random(), a=[random.Random(1)]),
        refuses=r"its forward draws from Net.a\[0\]",
    ),
    Case(
        "a generator without seed",
        lambda: Net(lambda self, y: y * np.random.default_rng().random()),
        refuses="seeds a generator .os.urandom",
    ),
    Case(
        "Python's without seed",
        lambda: Net(lambda self, y: y * random.Random().random()),
        refuses="seeds a generator .random.Random",
    ),
    Case("bytes of the system's", lambda: Net(lambda self, y: y * os.urandom(1)[0]), refuses="seeds a generator .os.urandom"),
    Case(
        "torch's seed",
        lambda: Net(lambda self, y: (torch.manual_seed(1), y + torch.rand_like(y))[1]),
        refuses="seeds a generator .torch.Gen",
    ),
    Case("torch's seed for a while", lambda: Net(_forked), refuses="seeds a generator .torch.Generator"),
    Case(
        "a generator that is made and seeded", lambda: Net(_self_made), refuses="seeds a generator .torch.Generator.manual_seed"
    ),
    Case("a generator that is made", lambda: Net(_unseeded), refuses="draws from a torch.Generator that it makes itself"),
    Case(
        "a tensor's numbers",
        lambda: Net(lambda self, y: y * self.a.tolist()[0], a=_one(2)),
        refuses=r"takes the numbers of a tensor of \[1\]",
    ),
    Case(
        "a tensor's array",
        lambda: Net(lambda self, y: y * float(np.asarray(self.a)[0]), a=_one(2)),
        refuses=r"takes the numbers of a tensor of \[1\]",
    ),
]
"""What a forward changes or draws itself."""


# ---------------------------------------------------------------------------------------------- what a first call leaves


@functools.lru_cache(maxsize=8)
def _table(extent: int) -> Tensor:
    return torch.linspace(0, 1, extent, dtype=torch.float64)


def _cached(self: Any, y: Tensor) -> Tensor:
    if self.grid is None:
        self.grid = torch.linspace(0, 1, y.shape[-1], dtype=y.dtype)
    return y * self.grid


def _cached_by_size(self: Any, y: Tensor) -> Tensor:
    extent = y.shape[-1]
    if extent not in TABLES:
        TABLES[extent] = torch.arange(extent, dtype=y.dtype).sin()
    return y * TABLES[extent]


def _cached_in_an_object(self: Any, y: Tensor) -> Tensor:
    if not hasattr(self, "held"):
        self.held = types.SimpleNamespace(pair=(torch.ones(1, dtype=y.dtype), [torch.eye(2, dtype=y.dtype)]))
    return y * self.held.pair[0] + self.held.pair[1][0].sum()


def _first_apart(self: Any, y: Tensor) -> Tensor:
    first, self.is_first = self.is_first, False
    return y * (3 if first else 2)


def _leaves_features(self: Any, y: Tensor) -> Tensor:
    self.features = y * 2
    return y + self.features


def _reads_features(self: Any, y: Tensor) -> Tensor:
    before, self.features = self.features, y.mean()
    return y if before is None else y + before


def _hook_that_notes() -> nn.Module:
    net, found = Net(lambda self, y: y), {}
    net.first.register_forward_hook(lambda module, inputs, output: found.update(first=output))
    return net


def _keeps_noise(self: Any, y: Tensor) -> Tensor:
    if self.noise is None:
        self.noise = torch.rand(1, dtype=y.dtype)
    return y * self.noise


FIRST = [
    Case("a cache", lambda: Net(_cached, grid=None)),
    Case("a cache that is emptied", lambda: Net(_cached, grid=None), lambda m, n: setattr(m, "grid", None)),
    Case("a cache by size", lambda: Net(_cached_by_size)),
    Case("a cache in an object", lambda: Net(_cached_in_an_object)),
    Case("functools' cache", lambda: Net(lambda self, y: y * _table(y.shape[-1]))),
    Case("a first call of its own", lambda: Net(_first_apart, is_first=True)),
    Case("what size it was", lambda: Net(lambda self, y: setattr(self, "size", tuple(y.shape)) or y * self.size[-1])),
    Case("features", lambda: Net(_leaves_features)),
    Case("features by name", _hook_that_notes),
    Case(
        "features that the next call reads",
        lambda: Net(_reads_features, features=None),
        refuses="Net.features is a tensor of .* made from its input",
    ),
    Case(
        "noise that is kept",
        lambda: Net(_keeps_noise, noise=None),
        refuses="Net.noise is a tensor of .* made from random numbers",
    ),
]
"""What a forward leaves for the calls that follow."""


# ---------------------------------------------------------------------------------------------- torch's own draws


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


DRAWS = [
    Case("dropout", lambda: Net(lambda self, y: nn.functional.dropout(y, 0.5))),
    Case("noise", lambda: Net(lambda self, y: y + torch.rand_like(y))),
    Case(
        "a generator that is held",
        lambda: Net(lambda self, y: y + torch.rand(y.shape, dtype=y.dtype, generator=self.a), a=_generator()),
        refuses_stages="draws from a torch.Generator of its own",
    ),
    Case(
        "a generator that is held deep down",
        lambda: Net(lambda self, y: y + torch.empty_like(y).normal_(generator=self.a["g"][0]), a={"g": [_generator()]}),
        refuses_stages="draws from a torch.Generator of its own",
    ),
    Case(
        "a generator that is replaced",
        lambda: Net(lambda self, y: y + torch.rand(y.shape, dtype=y.dtype, generator=self.a), a=_generator()),
        lambda m, n: setattr(m, "a", torch.Generator().manual_seed(n)),
        refuses_stages="draws from a torch.Generator of its own",
    ),
]

CASES = [*OUTSIDE, *INSIDE, *FIRST, *DRAWS]


# ---------------------------------------------------------------------------------------------- running them


def made(case: Case) -> nn.Module:
    """The same float64 module at each call, with globals and generators as at the start."""
    reset()
    module = case.make().double()
    torch.manual_seed(1)
    return module


def image() -> Tensor:
    return torch.randn(2, 3, 11, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def given_by(module: nn.Module, case: Case) -> list[Tensor]:
    """What a module gives, call by call."""
    given = []
    for call in range(CALLS):
        if call:
            case.change(module, call)
        with torch.no_grad():
            given.append(module(image()))
    return given
