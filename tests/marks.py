"""Which of many cases of a kind does `make test` run?  The others are marked `long`, and run with `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *kept: Any, is_sweep: bool = False) -> list[Any]:
    """The cases as parameters of a test, in their order; all but those kept are long, and where told a sweep."""
    cases, marks = list(cases), [pytest.mark.long, *[pytest.mark.sweep] * is_sweep]
    assert kept and all(case in cases for case in kept), f"of {kept} some are no cases"
    return [case if case in kept else pytest.param(*_values(case), marks=marks) for case in cases]


def _values(case: Any) -> tuple:
    return case if isinstance(case, tuple) else (case,)
