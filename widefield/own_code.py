"""`package.module:callable` in a recipe: code of the user's own, found, imported and called.

A module is looked for where Python looks, then in the folder that the process stands in, then in the folder of the recipe that
was read last.  The last two come behind all others, so that no file there hides an installed package.  A run folder is none of
them: it may be somebody else's.  Which names count at all, trust.py says.

An object that a Python program passed stands in a config as the name of its class in angle brackets, which makes nothing.
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
"""What of sys.path is there for the sake of users' modules."""


def is_code(name: str) -> bool:
    """Whether a name in a recipe is `package.module:callable`."""
    return ":" in name and not is_object(name)


def is_object(name: str) -> bool:
    """Whether a name in a config stands for an object that a Python program passed."""
    return name.startswith("<") and name.endswith(">")


def object_name(thing: object) -> str:
    """What a config calls an object: `<mynets.Net>`."""
    return f"<{type(thing).__module__}.{type(thing).__qualname__}>"


def refuse_object(name: str, *, key: str, keyword: str) -> None:
    """ValueError where a name stands for an object that is not at hand.  keyword: the argument that passes it."""
    if is_object(name):
        raise ValueError(
            f"{key} is '{name}', an object that a Python program passed, and a run folder holds no more of it than this name; "
            f"pass it again, as wf.evaluate(run, {keyword}=...) or wf.train(config, run=run, {keyword}=...), or name what "
            f"makes it: {key}=package.module:callable"
        )


def look_in(folder: Path) -> None:
    """Look for users' modules in `folder` too, and no more in the one that was named before."""
    _beside[:] = [folder.resolve()]


def code_named(name: str, *, key: str) -> Callable[..., Any]:
    """The callable that `name` says, `key` being where it stands in the recipe.

    ValueError: no such module, nothing of that name in it, nothing that can be called, or two files of one module's name.
    Whatever the module itself raises otherwise goes on as it is, for its traceback says it best.
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
    except ValueError:  # something of C has none to show
        return []


def call(build: Callable[..., Any], *arguments: Any, options: dict[str, Any], key: str, name: str) -> Any:
    """What `build` gives; ValueError where it does not take the arguments and the options.  key: of the options."""
    try:
        inspect.signature(build).bind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"{key} {options} do not fit '{name}': {error}") from None
    except ValueError:  # something of C has no signature to show; calling it tells
        pass
    return build(*arguments, **options)


def _look_in_places() -> list[str]:
    """Put the places for users' modules at the end of sys.path, and nothing else that was put there for an earlier recipe."""
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
    """ValueError where a module of this name was imported from another file than it would be now: Python knows it by name."""
    known = getattr(sys.modules.get(module), "__file__", None)
    spec = PathFinder.find_spec(module) if known is not None and module != "__main__" else None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != Path(str(known)).resolve():
        raise ValueError(
            f"a module '{module}' was imported from {known} and the one asked for is {spec.origin}; rename one of them, or use "
            "a process for each"
        )
