"""Draw programs: a stem with weights, some lines from the tables, outputs, and how training uses the module."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import layers, pointwise, reductions, shapes, structure
from .program import Habit, Program, used
from .trial import LARGEST, TOLERANCE, Careful, Outcome, Uninteresting, train_whole
from .workbench import Draw, Workbench

TABLES = ((3, pointwise.DRAWS), (3, reductions.DRAWS), (4, shapes.DRAWS), (6, layers.DRAWS), (2, structure.DRAWS))
DRAWS: list[tuple[float, Draw]] = [
    (weight * share / sum(w for w, _ in table), draw) for share, table in TABLES for weight, draw in table
]
SIZES = {1: range(4, 18), 2: range(3, 12), 3: range(2, 6)}
TRIES_MOST = 40
TORCH_IS_WRONG = (
    ("(Batch|Instance)Norm|batch_norm|instance_norm", r"transpose\(1, 2\)|movedim\(1, -1\)"),
    ("align_corners=True, antialias=True",),
)
"""What torch's CPU gives other numbers for in another order of dims in memory (docs/log.md): gradients of norms that come in
another order than the image, and resizing with antialiasing and aligned corners.  Programs with all words of a row are left
out.
"""


def draw_program(seed: int) -> tuple[Program, Outcome]:
    """A program that trains on one device, and what it gives there."""
    for attempt in range(TRIES_MOST):
        rng = random.Random(seed * 1000 + attempt)
        torch.default_generator.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return finished(_drawn(rng))
            except Exception:  # of the program itself: a graph that is used twice, a second derivative that torch has not
                continue
    raise Uninteresting(f"seed {seed} gives no program")


def _drawn(rng: random.Random) -> Program:
    dims = rng.choices([1, 2, 3], [2, 8, 2])[0]
    shape = (rng.choice([1, 2, 3, 3, 4, 5]), rng.randint(1, 4), *(rng.choice(SIZES[dims]) for _ in range(dims)))
    bench = Workbench(rng, shape)
    wanted = rng.randint(1, 6)
    bench.add(rng.choice([layers.convolution, layers.convolution, structure.sequence, shapes.pad]))
    weights, draws = [weight for weight, _ in DRAWS], [draw for _, draw in DRAWS]
    for _ in range(3 * wanted):
        if wanted > 0 and bench.add(rng.choices(draws, weights)[0]):
            wanted -= 1
    floats = [name for name in bench.names[1:] if bench.tensor(name).is_floating_point() and bench.tensor(name).requires_grad]
    outputs = [floats[-1], *(name for name in floats[:-1] if rng.random() < 0.15)]
    program = bench.program(outputs, _habit(rng, sorted(bench.members)))
    if rng.random() < 0.1:  # a layer that nobody calls
        program = replace(program, members=program.members | {"never": "nn.Conv2d(2, 2, 3)"})
    return program


def _habit(rng: random.Random, members: Sequence[str]) -> Habit:
    learning = [name for name in members if not name.startswith("b")]
    habit = Habit(train=rng.random() < 0.85)
    if rng.random() < 0.15 and learning:
        habit = replace(habit, frozen=tuple(rng.sample(learning, 1)), late=rng.random() < 0.5)
    kind, more = rng.random(), rng.random()
    habit = replace(habit, passes=2 if more < 0.1 else 1, evaluates=more > 0.88, channels_last=0.1 < more < 0.2)
    if kind < 0.07:
        return replace(habit, forwards=2)
    if kind < 0.12:
        return replace(habit, backwards=2)
    return replace(habit, penalty=True) if kind < 0.17 else habit


def finished(program: Program) -> tuple[Program, Outcome]:
    """The program with what its outputs say of samples, and its own numbers; Uninteresting where these say nothing."""
    if any(all(re.search(words, program.text()) for words in row) for row in TORCH_IS_WRONG):
        raise Uninteresting("torch's own numbers depend on the order of dims in memory")
    program = replace(program, per_sample=_per_sample(program))
    with Careful():
        outcome = train_whole(program)
    gradients = [v for n, v in outcome.numbers.items() if "gradient" in n and v is not None]
    if not any(bool(g.abs().max() > TOLERANCE) for g in gradients if g.numel()):
        raise Uninteresting("nothing learns")
    for value in outcome.numbers.values():
        if value is not None and not bool((value.double().abs() < LARGEST).all()):
            raise Uninteresting("numbers explode")
    return program, outcome


def _per_sample(program: Program) -> tuple[bool | None, ...]:
    """Of each output, whether it holds samples along a dim, by its shape for one more of them, one less and one alone."""
    if not any("x" in used(line) for line in program.lines):
        raise Uninteresting("no image")
    count = program.shape[0]
    shapes_of = []
    for batch in (count, count + 1, max(1, count - 1), 1):
        model = program.build().train(program.habit.train)
        try:
            outputs = model(program.images(0, batch))
        except Exception:
            return (None,) * len(program.outputs)
        if any(not isinstance(out, Tensor) or not out.requires_grad or not out.numel() for out in outputs):
            raise Uninteresting("an output that does not learn")
        shapes_of.append([out.shape for out in outputs])
    return tuple(_belongs(*shapes, count) for shapes in zip(*shapes_of, strict=True))


def _belongs(shape: torch.Size, larger: torch.Size, smaller: torch.Size, single: torch.Size, count: int) -> bool | None:
    if shape == larger == smaller == single:
        return False
    others = {larger: count + 1, smaller: max(1, count - 1), single: 1}
    if any(len(other) != len(shape) for other in others):
        return None
    dims = [dim for dim, extents in enumerate(zip(shape, *others, strict=True)) if len(set(extents)) > 1]
    if len(dims) != 1:
        return None
    each, rest = divmod(shape[dims[0]], count)
    return True if not rest and all(other[dims[0]] == each * samples for other, samples in others.items()) else None
