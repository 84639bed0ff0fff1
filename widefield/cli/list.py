"""`widefield list`: the names that recipes can have, with what they stand for."""

from __future__ import annotations

import ast
import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from widefield.naming import did_you_mean, names_in

ORDER = 66
SUMMARY = "list models, tasks and all other names"
HELP = """\
List the names that a recipe can have: models, data, tasks, losses, transforms, metrics, optimizers,
schedules, recipes.

  widefield list tasks
  widefield list models                   ours, and the libraries with more
  widefield list models torchvision       one library's
  widefield list models 'timm/resnet*'    those that a pattern fits
  widefield list metrics f1               those with f1 in them
"""
Rows = list[tuple[str, str]]
"""(name, what it is)."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help=", ".join(_KINDS))
    parser.add_argument("filter", nargs="?", default="", metavar="FILTER", help="a part of a name, or a pattern with *")


def run(options: Namespace) -> int:
    if options.kind not in _KINDS:
        raise ValueError(
            f"there are no '{options.kind}' to list{did_you_mean(options.kind, _KINDS)} It can be: {', '.join(_KINDS)}"
        )
    every = _KINDS[options.kind](options.filter)
    rows = [row for row in every if fits(row[0], options.filter)]
    if not rows:
        hint = did_you_mean(options.filter, [name for name, _ in every])
        raise ValueError(f"none of the {len(every)} {options.kind} has '{options.filter}' in its name{hint}")
    width = max(len(name) for name, about in rows if about) if any(about for _, about in rows) else 0
    for name, about in rows:
        print(f"{name:{width}}  {about}" if about else name)
    return 0


def fits(name: str, wanted: str) -> bool:
    """Whether a name has a text in it, or is of a pattern with `*`; upper and lower case are alike."""
    name, wanted = name.lower(), wanted.lower()
    return fnmatchcase(name, wanted) if "*" in wanted else wanted in name


# ---------------------------------------------------------------------------------------------- kinds


def _files(package: str) -> Rows:
    """The files of a folder with the first sentence of each, read from their text: nothing of them is imported."""
    return [(name, _first_line(f"{package}.{name}")) for name in names_in(package)]


def _first_line(module: str) -> str:
    package, _, name = module.rpartition(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, f"{package} is a package"
    text = Path(spec.submodule_search_locations[0], f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].removesuffix(".")


def _models(wanted: str) -> Rows:
    from widefield import models

    library, slash, _ = wanted.partition("/")
    known = models.libraries()
    if library in known:
        return [(f"{library}/{name}", "") for name in models.names_of(library)]
    if slash:
        raise ValueError(f"there is no library '{library}'{did_you_mean(library, known)} It can be: {', '.join(known)}")
    ours = _files("widefield.models")
    if wanted:
        return ours + [(f"{each}/{name}", "") for each in known for name in _installed(each)]
    own = ("package.module:callable", "Your own")
    return [*ours, *((f"{each}/NAME", f"widefield list models {each}") for each in known), own]


def _installed(library: str) -> list[str]:
    """The models of a library; none where it is not installed, as a search over all libraries is not about it."""
    from widefield import models

    try:
        return models.names_of(library)
    except ValueError:
        return []


def _transforms(wanted: str) -> Rows:
    from widefield.data import transforms

    return [(name, "") for name in transforms.names()]


def _metrics(wanted: str) -> Rows:
    from widefield.tasks import _metrics

    return _metrics.names()


def _optimizers(wanted: str) -> Rows:
    from widefield.training.optimizer import known_optimizers

    return known_optimizers()


def _schedules(wanted: str) -> Rows:
    from widefield.training.schedule import known_schedules

    return [(name, "") for name in known_schedules()]


def _recipes(wanted: str) -> Rows:
    from widefield.config.recipe import packaged_recipes

    texts = {name: path.read_text(encoding="utf-8").splitlines() for name, path in packaged_recipes().items()}
    heads = {name: [line for line in lines if line.startswith("# ")] for name, lines in texts.items()}
    return [(name, " ".join(line[2:] for line in head).partition(". ")[0]) for name, head in heads.items()]


_KINDS: dict[str, Callable[[str], Rows]] = {
    "models": _models,
    "data": lambda wanted: _files("widefield.data.formats"),
    "tasks": lambda wanted: _files("widefield.tasks"),
    "losses": lambda wanted: _files("widefield.losses"),
    "transforms": _transforms,
    "metrics": _metrics,
    "optimizers": _optimizers,
    "schedules": _schedules,
    "recipes": _recipes,
}

CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["models"], {"kind": "models", "filter": ""}),
    (["models", "timm/resnet*"], {"kind": "models", "filter": "timm/resnet*"}),
    ([], "the following arguments are required: KIND"),
]
