"""A name in a config is a file in a folder: load it, list the names, suggest the nearest.

`load("widefield.tasks", "classification")` imports `widefield/tasks/classification.py`.  Adding a file adds the
name; no list is edited anywhere.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def names_in(package: str) -> list[str]:
    """The names that a folder offers: its files without `.py`, sorted, without private ones.  Imports only parent packages."""
    return list(_files_of(package))


def _files_of(package: str) -> dict[str, pkgutil.ModuleInfo]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is not a package"
    found = pkgutil.iter_modules([str(Path(place)) for place in spec.submodule_search_locations])
    return {module.name: module for module in sorted(found, key=lambda one: one.name) if not module.name.startswith("_")}


def constants_in(package: str, constants: Collection[str]) -> dict[str, dict[str, Any]]:
    """For each name in a folder, those of `constants` that its file sets, with values.  Read from the text: imports nothing.

    ValueError: one is not set to a literal.
    """
    found = {}
    for name, module in _files_of(package).items():
        spec = module.module_finder.find_spec(name, None)
        assert spec is not None and spec.origin is not None, f"{package}.{name} is no file"
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"), filename=spec.origin)
        found[name] = dict(pair for node in tree.body for pair in _constant(node, constants, spec.origin))
    return found


def _constant(node: ast.stmt, constants: Collection[str], path: str) -> list[tuple[str, Any]]:
    """The (name, value) that a statement sets, if the name is one of `constants`."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name) and target.id in constants]
    try:
        return [(name, ast.literal_eval(node.value)) for name in names]
    except ValueError:
        where = f"{path}, line {node.lineno}: {ast.unparse(node)}"
        raise ValueError(f"{where} is read before the file runs; write a literal, as {names[0]} = 'name'") from None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: `"; did you mean 'segmentation'?"`, or `"."` where no name is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else "."


def load(package: str, name: str) -> ModuleType:
    """The module `package.name`.  ValueError, with the nearest name and the whole list: there is no such file."""
    names = names_in(package)
    if name not in names:
        folder = package.rpartition(".")[2]
        hint = did_you_mean(name, names)
        raise ValueError(f"{folder}/ has no {name}.py{hint} It has: {', '.join(names)}.")
    return importlib.import_module(f"{package}.{name}")


def load_all(package: str) -> list[ModuleType]:
    """Every module that a folder offers, in the order of their names."""
    return [importlib.import_module(f"{package}.{name}") for name in names_in(package)]
