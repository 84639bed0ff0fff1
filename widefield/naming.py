"""A name in a config is a file in a folder: load it, list its neighbours, suggest the nearest.

`load("widefield.tasks", "classification")` imports `widefield/tasks/classification.py`.  Adding a file adds the
name; no list is edited anywhere.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def names_in(package: str) -> list[str]:
    """The names a folder offers: its files without `.py`, sorted, private ones left out.  Imports only the packages above."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not a package"
    found = pkgutil.iter_modules([str(Path(place)) for place in spec.submodule_search_locations])
    return sorted(module.name for module in found if not module.name.startswith("_"))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that says what is missing: `"; did you mean 'segmentation'?"`, or `"."` where nothing is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else "."


def load(package: str, name: str) -> ModuleType:
    """The module `package.name`.  ValueError, with the nearest name and the whole list, where there is no such file."""
    names = names_in(package)
    if name not in names:
        folder = package.rpartition(".")[2]
        hint = did_you_mean(name, names)
        raise ValueError(f"{folder}/ has no {name}.py{hint} It has: {', '.join(names)}.")
    return importlib.import_module(f"{package}.{name}")
