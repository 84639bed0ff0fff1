"""Do Python, torch and the libraries fit each other, and are they the same on all hosts?"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Sequence
from typing import Any

from widefield.diagnosis.finding import Facts, Finding, State, differing
from widefield.diagnosis.place import Surroundings
from widefield.installed import version_of

ORDER, TITLE, MESSAGES = 20, "versions", False
PACKAGES = ("widefield", "torch", "torchvision", "numpy", "torchmetrics", "safetensors")
_BOUND = re.compile(r"(>=|<=|<|>|==|!=)\s*([\d.]+)")


def look(surroundings: Surroundings) -> dict[str, Any]:
    versions = {"python": platform.python_version(), **{name: version_of(name, otherwise="none") for name in PACKAGES}}
    return {**versions, "outside": _outside()}


def _outside() -> list[str]:
    """What widefield's own metadata asks for and does not get, as `numpy 1.24 (>=1.26)`."""
    try:
        asked = importlib.metadata.requires("widefield") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in asked:
        name, bounds = re.match(r"[\w.-]+", line), line.partition(";")[0]
        if name is None or "extra" in line.partition(";")[2]:
            continue
        version = version_of(name[0], otherwise="none")
        if not is_within(version, bounds[name.end() :]):
            found.append(f"{name[0]} {version} ({bounds[name.end() :].strip()})")
    return found


def is_within(version: str, bounds: str) -> bool:
    """Whether a version keeps `>=2.11,<2.16`.

    >>> is_within("2.12.1+cu130", ">=2.11,<2.16"), is_within("2.9", ">=2.11"), is_within("none", ">=1")
    (True, False, False)
    """
    mine = _numbers(version)
    kept = {"!=": lambda a, b: a != b, "==": lambda a, b: a == b, ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b,
            "<": lambda a, b: a < b, ">": lambda a, b: a > b}  # fmt: skip
    return version != "none" and all(kept[sign](mine, _numbers(bound)) for sign, bound in _BOUND.findall(bounds))


def _numbers(version: str) -> tuple[int, ...]:
    """`2.12.0+cu130` as (2, 12): what follows a number that is none, and zeros at the end, do not count."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def judge(facts: Sequence[Facts]) -> Finding:
    other = [f"{name} ({told})" for name in ("python", *PACKAGES) if (told := differing(facts, name))]
    if other:
        return Finding("bad", f"differ between hosts: {'; '.join(other)}", "use the same environment or image on all hosts")
    outside = sorted({text for one in facts for text in one["outside"]})
    if outside:
        return Finding("bad", f"outside of what widefield is tested with: {', '.join(outside)}", "pip install -U widefield")
    first = facts[0]
    return Finding("ok", f"Python {first['python']}, " + ", ".join(f"{name} {first[name]}" for name in PACKAGES[:4]))


_ONE = {"rank": 0, "host": "n1", "python": "3.11.4", **dict.fromkeys(PACKAGES, "2.12"), "outside": []}

CASES: list[tuple[list[Facts], State, str]] = [
    ([_ONE, {**_ONE, "rank": 1, "host": "n2"}], "ok", "Python 3.11.4, widefield 2.12, torch 2.12"),
    ([_ONE, {**_ONE, "rank": 1, "host": "n2", "torch": "2.13"}], "bad", "torch (n1: 2.12; n2: 2.13)"),
    ([{**_ONE, "outside": ["numpy 1.24 (>=1.26)"]}], "bad", "numpy 1.24 (>=1.26)"),
]
