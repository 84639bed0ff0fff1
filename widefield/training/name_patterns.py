"""Parameters by name or pattern, as a recipe names them: `layer1`, `layer1*`, `*.bias`.

A pattern fits a parameter where it fits the parameter's name, or that of a module that contains it; `*` stands for any text,
dots too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from widefield.naming import did_you_mean


def fitting(names: Sequence[str], patterns: str | Sequence[str], *, field: str) -> list[str]:
    """Those of `names` that a pattern fits, in their order.  field: the key of the recipe, for the error.

    ValueError: a pattern that fits none of them.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            parts = list(dict.fromkeys(part for name in names for part in containing(name)))
            top = dict.fromkeys(name.partition(".")[0] for name in names)
            raise ValueError(
                f"{field} names '{pattern}', which fits nothing of the model{did_you_mean(pattern, parts)} Its parts are: "
                f"{', '.join(top)}"
            )
    return [name for name in names if any(fits(name, pattern) for pattern in patterns)]


def fits(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in containing(name))


def containing(name: str) -> list[str]:
    """The names of the modules that contain a parameter, outermost first, and its own."""
    return list(accumulate(name.split("."), lambda before, part: f"{before}.{part}"))


def modules_in_words(names: Sequence[str], most: int = 6) -> str:
    """The modules at the top of the model that have these parameters, for a sentence."""
    top = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return ", ".join(top[:most]) + (f" and {len(top) - most} more" if len(top) > most else "")
