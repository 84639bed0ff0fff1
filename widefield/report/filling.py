"""Templates filled in with texts, from files that anybody may have made: every text is escaped, and odd values are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

T = TypeVar("T")


def laid_out(template: str, **texts: Any) -> str:
    """A page of this folder with its texts filled in, and the style that all pages share."""
    folder = resources.files(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = Markup((folder / "style.css").read_text(encoding="utf-8"))
    return environment.from_string((folder / template).read_text(encoding="utf-8")).render(style=style, **texts)


def of_files(make: Callable[[], T], folder: Path) -> T:
    """What `make` makes of a folder's files; ValueError where their values are not such as widefield writes."""
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a file of {folder} holds values that widefield does not write, so there is no report of it "
            f"({type(error).__name__}: {error}); take the files from where they were written"
        ) from error
