"""Where a program is made: each line is run on real tensors as it is drawn, and lines that torch does not take are dropped."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .program import Habit, Program, defined, new_scope

LARGEST, NUMBERS_MOST, DIMS_MOST = 1e3, 6000, 6
Draw = Callable[["Workbench"], "str | None"]
"""Gives a statement, or an expression that becomes a new value; None where nothing here fits it."""


class Unfit(Exception):
    """A line that does not fit here."""


class Workbench:
    def __init__(self, rng: random.Random, shape: tuple[int, ...]) -> None:
        self.rng, self.shape = rng, shape
        self.members: dict[str, str] = {}
        self.lines: list[str] = []
        self.module = nn.Module()
        self.scope = new_scope() | {"self": self.module, "x": torch.randn(shape, dtype=torch.float64)}
        self.names = ["x"]
        self.count = 0

    # ------------------------------------------------------------------------------------------ what a line is made of

    def tensor(self, name: str) -> Tensor:
        return self.scope[name]

    def value(self, fits: Callable[[Tensor], bool] = lambda t: t.ndim > 0, *, floats: bool = True) -> str:
        """A value so far, mostly a late one."""
        names = [name for name in self.names if self.tensor(name).is_floating_point() == floats and fits(self.tensor(name))]
        if not names:
            raise Unfit
        late = len(names) - 1 - min(len(names) - 1, int(self.rng.expovariate(1.2)))
        return names[late]

    def image(self, dims: Sequence[int] = (3, 4, 5)) -> str:
        """A value (B, C, ...) with pixels."""
        return self.value(lambda t: t.ndim in dims and t.numel() > 0 and min(t.shape[2:]) > 0)

    def dim(self, name: str) -> int:
        ndim = self.tensor(name).ndim
        return self.rng.randrange(-ndim, ndim) if ndim else 0

    def dims(self, name: str) -> list[int]:
        """Some dims, each once, some of them counted from the end."""
        ndim = self.tensor(name).ndim
        chosen = self.rng.sample(range(ndim), self.rng.randint(1, ndim))
        return [dim - ndim if self.rng.random() < 0.5 else dim for dim in chosen]

    def parameter(self, *shape: int) -> str:
        return self.member("p", f"nn.Parameter(torch.randn({', '.join(map(str, shape))}{',' * (not shape)}))")

    def buffer(self, words: str) -> str:
        return self.member("b", words)

    def layer(self, words: str) -> str:
        return self.member("m", words)

    def member(self, kind: str, words: str) -> str:
        """`self.name` of something new; sometimes of what is there already."""
        same = [name for name, before in self.members.items() if before == words]
        if same and self.rng.random() < 0.3:
            return f"self.{self.rng.choice(same)}"
        name = f"{kind}{len(self.members)}"
        made = eval(words, self.scope)
        if isinstance(made, nn.Module):
            made = made.double()
        elif isinstance(made, nn.Parameter):
            made = nn.Parameter(made.double().normal_(std=0.4))
        self.module.register_buffer(name, made.double() if made.is_floating_point() else made) if kind == "b" else setattr(
            self.module, name, made
        )
        self.members[name] = words
        return f"self.{name}"

    def chance(self, of: float) -> bool:
        return self.rng.random() < of

    def pick(self, *values):
        return self.rng.choice(values)

    def number(self) -> str:
        return repr(self.rng.choice([-2, -1.5, -0.7, -0.2, 0.1, 0.5, 0.8, 1, 1.3, 2, 3]))

    # ------------------------------------------------------------------------------------------ drawing lines

    def add(self, draw: Draw) -> bool:
        """Draw a line and run it; whether it stays."""
        members, names, scope = dict(self.members), list(self.names), dict(self.scope)
        before = {name: self.tensor(name).clone() for name in self.names}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                words = draw(self)
                if words is None:
                    raise Unfit
                lines = self._as_lines(words)
                for line in lines:
                    exec(line, self.scope)
                self._look(lines)
        except Exception:
            self.members, self.names, self.scope = members, names, scope
            self.scope |= before
            for name in [
                n for n in (*self.module._parameters, *self.module._buffers, *self.module._modules) if n not in members
            ]:
                delattr(self.module, name)
            return False
        self.lines += lines
        return True

    def _as_lines(self, words: str) -> list[str]:
        """Statements: what is indented belongs to the line before; what no `!` marks becomes a new value."""
        found: list[str] = []
        for line in words.split("\n"):
            if line.startswith("!    "):
                found[-1] += f"\n{line[1:]}"
            else:
                found.append(line[1:] if line.startswith("!") else f"{self.new()} = {line}")
        return found

    def new(self) -> str:
        """The name of a value to come."""
        self.count += 1
        return f"v{self.count}"

    def _look(self, lines: list[str]) -> None:
        """Unfit where a line gave something else than tensors that can be worked on; forget names that are none."""
        for line in lines:
            for name in sorted(defined(line)):
                value = self.scope[name]
                if not isinstance(value, Tensor) or value.is_complex() or value.layout != torch.strided:
                    raise Unfit
                if name not in self.names:
                    self.names.append(name)
        for name in self.names:
            value = self.tensor(name).detach()
            if value.numel() > NUMBERS_MOST or value.ndim > DIMS_MOST or value.numel() == 0:
                raise Unfit
            if value.is_floating_point() and (value.dtype != torch.float64 or not bool((value.abs() <= LARGEST).all())):
                raise Unfit

    # ------------------------------------------------------------------------------------------ the whole

    def program(self, outputs: Sequence[str], habit: Habit) -> Program:
        made = Program(self.shape, dict(self.members), tuple(self.lines), tuple(outputs), habit)
        return made.without_what_is_unused()
