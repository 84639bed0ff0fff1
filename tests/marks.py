"""Which of many cases of a kind does `make test` run?  The others are marked `long`, and run with `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

LONG_ON_CPU = pytest.mark.long(on_gpu=True)
"""A mark for a case of a test that is `on_gpu_too`: long, and `make test-gpu` runs it nevertheless."""
SWEEP = (pytest.mark.long, pytest.mark.sweep)
SWEEP_ON_CPU = (LONG_ON_CPU, pytest.mark.sweep)
"""Marks for a case that `make test-ci` leaves out, for another one of its kind is in it; `make test-gpu` runs the second."""


def few(cases: Iterable[Any], *kept: Any, then: Iterable[Any] = (), is_sweep: bool = False) -> list[Any]:
    """The cases as parameters of a test, in their order; all but those kept are long, and where told a sweep.

    then: those of the long ones that are no sweep, and that run on a GPU as those kept do.
    """
    cases, then, marks = list(cases), list(then), SWEEP if is_sweep else [pytest.mark.long]
    assert kept and all(case in cases for case in (*kept, *then)), f"of {kept} and {then} some are no cases"
    return [
        case if case in kept else pytest.param(*_values(case), marks=[LONG_ON_CPU] if case in then else marks) for case in cases
    ]


def _values(case: Any) -> tuple:
    return case if isinstance(case, tuple) else (case,)
