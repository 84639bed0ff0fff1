"""Callbacks of a Python program: objects with some of the methods `on_step`, `on_evaluate` and `on_end`.

Each gets facts, which it cannot change, on every rank.  An exception in one ends all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

METHODS = ("on_step", "on_evaluate", "on_end")


@dataclass(frozen=True)
class StepFacts:
    """An optimizer step that was done.  loss: the mean over the whole batch.  samples: over all ranks.  seconds: wall time."""

    step: int
    epoch: float
    loss: float
    lr: float
    samples: int
    seconds: float
    rank: int


@dataclass(frozen=True)
class EvaluationFacts:
    """An evaluation.  metrics: as in `Evaluation`.  is_best: whether it is the best so far, by `checkpoint.best`."""

    step: int
    epoch: float
    loss: float
    metrics: Mapping[str, float]
    images: int
    is_best: bool
    rank: int


@dataclass(frozen=True)
class EndFacts:
    """The end of a run that did not fail.  best_step, best_value: of the best evaluation; None where there was none."""

    reason: Literal["complete", "interrupted"]
    step: int
    run: Path
    best_step: int | None
    best_value: float | None
    rank: int


class CallbackError(RuntimeError):
    """A callback raised an exception, which is this one's cause."""


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """ValueError: an object has none of the methods, or one of them cannot be called."""
    for one in callbacks:
        found = {name: getattr(one, name) for name in METHODS if hasattr(one, name)}
        wrong = [name for name, method in found.items() if not callable(method)]
        if isinstance(one, type) or wrong or not found:
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            why = (
                f"whose {wrong[0]} cannot be called"
                if wrong
                else f"and an object with {', '.join(METHODS)}, or some, is wanted"
            )
            raise ValueError(f"callbacks has {what}, {why}; each method gets one argument, the facts")


def call(callbacks: Sequence[Any], method: str, facts: StepFacts | EvaluationFacts | EndFacts) -> None:
    """Call the method of every object that has it.  CallbackError: it raised an exception."""
    for one in callbacks:
        if not hasattr(one, method):
            continue
        try:
            getattr(one, method)(facts)
        except Exception as error:
            raise CallbackError(
                f"the callback {type(one).__name__}.{method} failed at step {facts.step}: {type(error).__name__}: {error}"
            ) from error
