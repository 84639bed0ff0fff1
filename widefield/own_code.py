"""`package.module:callable` in a recipe: a user's own code, found, imported and called.

A module is looked for on sys.path, then in the current folder, then in the folder of the recipe that was read last.  The last
two are at the end of sys.path, so that no file there hides an installed package.  A run folder is never searched, since it may
be somebody else's.  trust.py decides which names are allowed.

An object that a Python program passed is in a config as the name of its class in angle brackets, from which nothing can be
built.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from widefield.naming import did_you_mean
from widefield.trust import run_folder_of

_beside: list[Path] = []
"""The folder of the recipe that was read last."""
_added: list[str] = []
"""The entries of sys.path that were added for users' modules."""


def is_code(name: str) -> bool:
    """Whether a name in a recipe is `package.module:callable`."""
    return ":" in name and not is_object(name)


def is_object(name: str) -> bool:
    """Whether a name in a config stands for an object that a Python program passed."""
    return name.startswith("<") and name.endswith(">")


def object_name(thing: object) -> str:
    """The name of an object in a config, as `<mynets.Net>`: of a function its own, of others that of their class."""
    named = thing if inspect.isfunction(thing) else type(thing)
    return f"<{named.__module__}.{named.__qualname__}>"


def refuse_object(name: str, *, key: str, keyword: str) -> None:
    """ValueError: the name stands for an object that was not passed.  keyword: the argument that passes it."""
    if is_object(name):
        raise ValueError(
            f"{key} is '{name}', an object that a Python program passed, and a run folder holds no more of it than this name; "
            f"pass it again, as wf.evaluate(run, {keyword}=...) or wf.train(config, run=run, {keyword}=...), or name what "
            f"makes it: {key}=package.module:callable"
        )


def look_in(folder: Path) -> None:
    """Look for users' modules in `folder` too, in place of the folder of the last call."""
    _beside[:] = [folder.resolve()]


def code_named(name: str, *, key: str) -> Callable[..., Any]:
    """The callable that `name` names.  key: where the name is in the recipe, for errors.

    ValueError: no such module or attribute, it is not callable, or the module was imported from another file before.
    Other exceptions of the module itself are not caught, since their traceback helps most.
    """
    module_name, _, attribute = name.partition(":")
    places = _look_in_places()
    try:
        _check_one_file(module_name.partition(".")[0])
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"; looked for where Python looks and in {' and '.join(places)}" if places else ""
        raise ValueError(f"{key} is '{name}' and that cannot be imported: {error}{where}") from None
    except (ImportError, ValueError) as error:
        raise ValueError(f"{key} is '{name}' and that cannot be imported: {error}") from None
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [known for known in vars(module) if not known.startswith("_")])
        raise ValueError(
            f"{key} is '{name}' and that cannot be imported: module '{module_name}' has no attribute '{attribute}'{hint}"
        )
    found = getattr(module, attribute)
    if not callable(found):
        raise ValueError(f"{key} is '{name}' and that is a {type(found).__name__}, which cannot be called")
    return found


def takes(build: Callable[..., Any], *names: str) -> list[str]:
    """Those of `names` that are parameters of `build`."""
    try:
        return [name for name in names if name in inspect.signature(build).parameters]
    except ValueError:  # a C function without a signature
        return []


def call(build: Callable[..., Any], *arguments: Any, options: dict[str, Any], key: str, name: str) -> Any:
    """Call `build`.  ValueError: it does not take the arguments and the options.  key: of the options in the recipe."""
    try:
        inspect.signature(build).bind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"{key} {options} do not fit '{name}': {error}") from None
    except ValueError:  # a C function without a signature
        pass
    return build(*arguments, **options)


def _look_in_places() -> list[str]:
    """Put the folders of users' modules at the end of sys.path, and remove those of an earlier recipe; returns them."""
    places = [str(place) for place in dict.fromkeys([Path.cwd(), *_beside]) if run_folder_of(place / "recipe.yaml") is None]
    for place in [place for place in _added if place not in places]:
        _added.remove(place)
        if place in sys.path:
            sys.path.remove(place)
    further = [place for place in places if place not in sys.path]
    sys.path.extend(further)
    _added.extend(further)
    importlib.invalidate_caches()  # a file may have been written a moment ago
    return places


def _check_one_file(module: str) -> None:
    """ValueError: a module of this name was imported from another file, which Python would return again."""
    known = getattr(sys.modules.get(module), "__file__", None)
    spec = PathFinder.find_spec(module) if known is not None and module != "__main__" else None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != Path(str(known)).resolve():
        raise ValueError(
            f"a module '{module}' was imported from {known} and the one asked for is {spec.origin}; rename one of them, or use "
            "a process for each"
        )
