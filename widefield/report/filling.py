"""Fills templates with values from files that may not be trusted: texts are escaped, unexpected values are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

T = TypeVar("T")


def render(template: str, **texts: Any) -> str:
    """Render a template of this folder with the shared style."""
    folder = resources.files(__package__)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = Markup((folder / "style.css").read_text(encoding="utf-8"))
    return environment.from_string((folder / template).read_text(encoding="utf-8")).render(style=style, **texts)


def from_files(make: Callable[[], T], folder: Path) -> T:
    """Call `make`, which reads a folder's values.  ValueError: they are not such as widefield writes."""
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a file of {folder} holds values that widefield does not write, so there is no report of it "
            f"({type(error).__name__}: {error}); take the files from where they were written"
        ) from error
