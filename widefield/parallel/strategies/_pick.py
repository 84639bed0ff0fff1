"""Modules by name or pattern, as a recipe names them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from widefield.naming import did_you_mean

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def picked(model: nn.Module, patterns: list[str], *, field: str) -> list[str]:
    """The names of the modules that match `patterns`, in the model's order; `*` stops at dots, as in `layer*.*`.

    A ModuleList or ModuleDict stands for its members.  field: the recipe key, for the error.
    ValueError: a pattern that no module matches.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            raise ValueError(
                f"{field} names '{pattern}', which no module of {type(model).__name__} fits{did_you_mean(pattern, names)} "
                f"Its parts are: {', '.join(name for name, _ in model.named_children())}"
            )
    fitting = [name for name in names if any(_fits(name, pattern) for pattern in patterns)]
    return list(dict.fromkeys(each for name in fitting for each in _members(name, model.get_submodule(name))))


def some(names: list[str], most: int = 4) -> str:
    """The first few of many names, for a sentence."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _fits(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _members(name: str, module: nn.Module) -> list[str]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [name]
    return [each for key, child in module.named_children() for each in _members(f"{name}.{key}", child)]
