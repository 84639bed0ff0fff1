"""Calls of operations with unusual but legal arguments, made from their schemas and a seed.

`calls_of(operation, draw)` gives a Call: tensors and a function of them.  Whether torch takes it shows when it is run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widefield.rules import COMPOSED, RULES
from widefield.tiled.dispatch import load_rules
from widefield.tiled.pointwise import SAME_PIXELS
from widefield.tiled.schemas import outs_of, written_by

aten = torch.ops.aten

SHAPES = [(2, 3, 5, 4), (6, 4), (5,), (1, 4, 1, 3), (2, 0, 3), (1,), (3, 1, 4), (2, 2, 2, 3, 2), (1, 1), (4, 1)]
DTYPES = [torch.float64] * 8 + [
    torch.float32,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex128,
]
SCALARS = [2, -1, 0, 3, True, 0.5, -1.25, 2.0]


@dataclass
class Call:
    """run(*tensors) is the call; name says all that the tensors do not."""

    name: str
    run: Callable[..., Any]
    tensors: list[Tensor]
    no_grad: bool = False


def operations() -> list[Any]:
    """Every operation that has a rule, is composed, or gives each pixel from the same pixel; no two ways to say one."""
    load_rules()
    packets = [getattr(aten, name) for name in dir(aten) if not name.startswith("__")]
    overloads = [getattr(p, name) for p in packets if hasattr(p, "overloads") for name in p.overloads()]
    pointwise = {op for op in overloads if torch.Tag.pointwise in op.tags}
    return sorted(pointwise | SAME_PIXELS | set(RULES) | set(COMPOSED), key=str)


# ---------------------------------------------------------------------------------------------- tensors


def drawn_tensor(draw: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small numbers, some of them equal, zero and one among them."""
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    values = torch.where(torch.rand(tuple(shape), generator=generator) < 0.3, values.round(), values) + 0.0
    # (no -0, at which torch's own kernels give one pole's sign or the other by a value's place in memory)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if values.ndim else -values).to(dtype)
    if dtype is torch.bool:
        return values > 0
    if not dtype.is_floating_point:
        return (values * 3).abs().to(dtype) if dtype is torch.uint8 else (values * 3).to(dtype)
    return values.to(dtype)


def shape_beside(draw: random.Random, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts with another."""
    kind = draw.random()
    if kind < 0.5:
        return tuple(shape)
    if kind < 0.6:
        return ()
    other = [1 if draw.random() < 0.3 else extent for extent in shape]
    return tuple(other[draw.randint(0, len(other)) if kind < 0.8 else 0 :])


# ---------------------------------------------------------------------------------------------- arguments by their schema


class Maker:
    """Draws the arguments of one call: tensors are collected, everything else is kept in the call."""

    def __init__(self, draw: random.Random, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        self.draw = draw
        self.shape = draw.choice(list(shapes))
        self.dtype = draw.choice(DTYPES)
        self.tensors: list[Tensor] = []

    def tensor(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> _Slot:
        self.tensors.append(drawn_tensor(self.draw, shape, dtype or self.dtype))
        return _Slot(len(self.tensors) - 1)

    def dim(self, extra: int = 0) -> int:
        count = len(self.shape) + extra
        return self.draw.randrange(-count, count) if count else self.draw.choice([-1, 0])

    def dims(self) -> list[int]:
        count = len(self.shape)
        chosen = self.draw.sample(range(count), self.draw.randint(0, count))
        return [dim - count if self.draw.random() < 0.4 else dim for dim in chosen]

    def extent(self, dim: int) -> int:
        return self.shape[dim] if self.shape else 1

    def argument(self, argument: Any) -> Any:
        """A value for an argument of a schema; KeyError: nothing is known of such a one."""
        name, kind = argument.name, str(argument.type)
        if kind.startswith("Optional[") and name != "dtype" and self.draw.random() < 0.4:
            return None
        if name in BY_NAME and not (name == "dim" and "List" in kind):
            return BY_NAME[name](self)
        return BY_TYPE[kind[9:-1] if kind.startswith("Optional[") else kind](self)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor goes that was collected."""

    number: int


def _beside(maker: Maker) -> _Slot:
    if maker.tensors and maker.draw.random() < 0.15:
        return _Slot(0)
    dtype = maker.dtype if maker.draw.random() < 0.7 else maker.draw.choice(DTYPES)
    return maker.tensor(shape_beside(maker.draw, maker.shape), dtype)


def _size(maker: Maker) -> list[int]:
    """A size to expand to, or to view as."""
    if maker.draw.random() < 0.5:
        lead = [maker.draw.randint(1, 3)] if maker.draw.random() < 0.3 else []
        return lead + [maker.draw.choice([2, 3]) if extent == 1 else extent for extent in maker.shape]
    flat = list(maker.shape)
    at = maker.draw.randrange(len(flat)) if flat else 0
    return [*flat[:at], -1] if maker.draw.random() < 0.5 or len(flat) < 2 else [-1, *flat[at:]]


def _parts(maker: Maker) -> list[int]:
    first = maker.draw.randint(0, maker.extent(0))
    return [first, maker.extent(0) - first]


def _permuted(maker: Maker) -> list[int]:
    order = list(range(len(maker.shape)))
    maker.draw.shuffle(order)
    return [dim - len(order) if maker.draw.random() < 0.3 else dim for dim in order]


BY_NAME: dict[str, Callable[[Maker], Any]] = {
    "dim": Maker.dim, "dim0": Maker.dim, "dim1": Maker.dim, "dim2": Maker.dim, "dimension": Maker.dim,
    "dims": _permuted, "size": _size, "split_sizes": _parts, "repeats": lambda m: [m.draw.randint(0, 2) for _ in m.shape],
    "shifts": lambda m: [m.draw.randint(-3, 3)], "split_size": lambda m: m.draw.randint(1, 4),
    "k": lambda m: m.draw.randint(0, 3), "diagonal": lambda m: m.draw.randint(-2, 2), "offset": lambda m: m.draw.randint(-2, 2),
    "start": lambda m: m.draw.randint(-4, 3), "end": lambda m: m.draw.randint(-2, 6), "step": lambda m: m.draw.randint(1, 3),
    "index": lambda m: m.draw.randint(-2, 1), "n": lambda m: m.draw.randint(0, 4), "decimals": lambda m: m.draw.randint(-1, 3),
    "dtype": lambda m: m.draw.choice([None, None, *DTYPES]), "memory_format": lambda m: None, "layout": lambda m: None,
    "device": lambda m: None, "pin_memory": lambda m: None, "generator": lambda m: None, "approximate": lambda m: "tanh",
    "rounding_mode": lambda m: m.draw.choice([None, "trunc", "floor"]), "negative_slope": lambda m: 0.2,
    "half_to_float": lambda m: False, "implicit": lambda m: False, "correction": lambda m: m.draw.choice([None, 0, 1, 2]),
    "ord": lambda m: m.draw.choice([0, 0.5, 1, 2, 3, float("inf"), -float("inf"), -1]),
    "p": lambda m: m.draw.choice([1, 2, 0.5, 3]),
    "reduction": lambda m: m.draw.randint(0, 2), "mask": lambda m: m.tensor(shape_beside(m.draw, m.shape), torch.bool),
    "condition": lambda m: m.tensor(shape_beside(m.draw, m.shape), torch.bool), "lambd": lambda m: 0.5,
    "reduce": lambda m: "add",
    "is_result": lambda m: False, "eps": lambda m: 0.1, "non_blocking": lambda m: False, "copy": lambda m: True,
    "input_dtype": lambda m: m.dtype, "delta": lambda m: 0.7, "beta": lambda m: m.draw.choice([1, 0.5]),
    "upscale_factor": lambda m: 1, "downscale_factor": lambda m: 2, "groups": lambda m: 1,
}  # fmt: skip
"""What an argument of this name is, of any operation."""

BY_TYPE: dict[str, Callable[[Maker], Any]] = {
    "Tensor": _beside, "number": lambda m: m.draw.choice(SCALARS), "bool": lambda m: m.draw.random() < 0.5,
    "float": lambda m: m.draw.choice([0.5, 1.5, -0.25]), "int": lambda m: m.draw.randint(0, 3), "List[int]": Maker.dims,
    "List[Tensor]": lambda m: [_beside(m) for _ in range(m.draw.randint(1, 3))],
    "str": lambda m: "none", "complex": lambda m: 0.5,
}  # fmt: skip


def call_of(operation: Any, draw: random.Random) -> Call:
    """One call of an operation; KeyError where its schema holds an argument that nothing is known of."""
    maker = Maker(draw)
    outs = outs_of(operation)
    values: list[tuple[Any, Any]] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.name in outs:
            continue
        if number == 0 and str(argument.type) == "Tensor":
            value: Any = maker.tensor(maker.shape)
        elif argument.has_default_value() and draw.random() < 0.5:
            continue
        else:
            value = maker.argument(argument)
        values.append((argument, value))
    return Call(_name_of(operation, values), _run_of(operation, values, outs, draw), maker.tensors, bool(outs))


def _name_of(operation: Any, values: Sequence[tuple[Any, Any]]) -> str:
    said = [f"{argument.name}={value}" for argument, value in values if not isinstance(value, _Slot)]
    return f"{operation}({', '.join(said)})"


def _run_of(operation: Any, values: Sequence[tuple[Any, Any]], outs: Sequence[str], draw: random.Random) -> Callable[..., Any]:
    """The call as a function of its tensors.  What is written to is a copy, and part of the result."""
    how = draw.randrange(3)
    is_written = bool(written_by(operation)) and not outs

    def run(*tensors: Tensor) -> Any:
        def filled(value: Any) -> Any:
            if isinstance(value, list):
                return [filled(item) for item in value]
            return tensors[value.number] if isinstance(value, _Slot) else value

        given = {argument.name: filled(value) for argument, value in values}
        first = next(iter(given), None)
        if is_written and first is not None:
            given[first] = given[first] * 1
        made = operation(**given, **_outs(operation, given, outs, how)) if outs else operation(**given)
        return [made, given[first]] if is_written else made

    return run


def _outs(operation: Any, given: dict, outs: Sequence[str], how: int) -> dict[str, Tensor]:
    """Tensors for results: like them, empty, or views of tensors that hold them twice."""
    from widefield.tiled.schemas import new_of

    made = new_of(operation)(**given)
    likes = [made] if isinstance(made, Tensor) else list(made)
    tensors = [like.detach() * 0 for like in likes]
    if how == 1:
        tensors = [torch.cat([t.unsqueeze(0)] * 2)[1] for t in tensors]
    if how == 2:
        tensors = [torch.zeros(like.shape, dtype=like.dtype) for like in likes]
    return dict(zip(outs, tensors, strict=True))


def attempts(operation: Any, seed: int) -> Iterator[Call]:
    """Ever more calls of one operation; legal or not."""
    draw = random.Random(f"{operation} {seed}")
    try:
        while True:
            yield call_of(operation, draw)
    except KeyError:
        return
