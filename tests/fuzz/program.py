"""A random program: a module as text, the images that it is trained on, and how it is called.

Lines stand alone, so that a program can be shrunk by leaving some out, and its text is the test that shows what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

_NAME = re.compile(r"\b(v\d+|x)\b")
_WRITES = re.compile(r"self\.b\d+(\.\w+_\(| [+*]?= )")
_MEMBER = re.compile(r"\bself\.(\w+)")


@dataclass(frozen=True)
class Habit:
    """How a training step uses the module.

    forwards: calls per step, of images and of their mirror images, with one backward.  backwards: of the same graph.
    penalty: on the gradient of the images.  frozen: members whose parameters do not learn; late: not before the second step.
    passes: forwards and backwards per step, whose gradients are added up and sent after the last.
    evaluates: whether outputs are looked at in between, in eval mode and without gradients.
    channels_last: whether images and weights lie so in memory.
    """

    train: bool = True
    forwards: int = 1
    backwards: int = 1
    penalty: bool = False
    frozen: tuple[str, ...] = ()
    late: bool = False
    passes: int = 1
    evaluates: bool = False
    channels_last: bool = False


@dataclass(frozen=True)
class Program:
    """members: `self.name`, in the words that make it; names of buffers begin with b.  outputs: the values that it returns.

    per_sample: of each output, whether it holds samples along a dim; None where that cannot be said.
    """

    shape: tuple[int, ...]
    members: dict[str, str]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    habit: Habit = field(default_factory=Habit)
    per_sample: tuple[bool | None, ...] = ()

    def text(self) -> str:
        """The class `Net`."""
        made = [
            f'self.register_buffer("{name}", {words})' if name.startswith("b") else f"self.{name} = {words}"
            for name, words in self.members.items()
        ]
        body = [*self.lines, f"return {', '.join(self.outputs)}" + ("," if len(self.outputs) == 1 else "")]
        init = "".join(f"        {line}\n" for line in ["super().__init__()", *made])
        forward = "".join(f"        {line}\n" for statement in body for line in statement.split("\n"))
        return f"class Net(nn.Module):\n    def __init__(self):\n{init}\n    def forward(self, x):\n{forward}"

    def build(self) -> nn.Module:
        """The module, in float64, with the same weights each time."""
        scope = new_scope()
        exec(_compiled(self.text()), scope)
        torch.default_generator.manual_seed(1)
        model = scope["Net"]().double()
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.4)
            for parameter in model.parameters() if self.habit.channels_last else ():
                parameter.data = _channels_last(parameter.data)
        return model

    def images(self, step: int, batch: int | None = None) -> Tensor:
        """Of a step, and of as many samples as `batch` says."""
        shape = (batch or self.shape[0], *self.shape[1:])
        images = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return _channels_last(images) if self.habit.channels_last else images

    def without_what_is_unused(self) -> Program:
        """Lines and members that no output depends on are left out; writes to what is used stay."""
        needed, kept = set(self.outputs), []
        for line in reversed(self.lines):
            if defined(line) & needed or (not defined(line) and used(line) & needed) or _WRITES.search(line):
                needed |= used(line)
                kept.append(line)
        lines = tuple(reversed(kept))
        named = {name for line in lines for name in _MEMBER.findall(line)}
        return replace(self, lines=lines, members={n: w for n, w in self.members.items() if n in named})


@lru_cache(16)
def _compiled(text: str) -> CodeType:
    return compile(text, "<program>", "exec")


def _channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.ndim, torch.contiguous_format))


def new_scope() -> dict[str, Any]:
    """What a program's words may name."""
    import torch.nn.functional as F
    from torch.nn.utils import parametrizations
    from torch.utils.checkpoint import checkpoint

    import widefield as wf

    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "checkpoint": checkpoint,
        "wf_whole": wf.whole,
        "parametrizations": parametrizations,
    }


def defined(line: str) -> set[str]:
    """The values that a statement makes."""
    return {name for each in line.split("\n") for name in _NAME.findall(_sides(each)[0])}


def used(line: str) -> set[str]:
    """The values that a statement needs."""
    found: set[str] = set()
    made: set[str] = set()
    for each in line.split("\n"):
        left, right = _sides(each)
        found |= set(_NAME.findall(right)) - made
        made |= set(_NAME.findall(left))
    return found


def _sides(line: str) -> tuple[str, str]:
    """Names that a line gives values to, and the rest of it."""
    left, sign, right = line.strip().partition(" = ")
    return (left, right) if sign and re.fullmatch(r"[\w, ]+", left) else ("", line)
