"""Fills templates with values from files that may not be trusted: texts are escaped, unexpected values are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

T = TypeVar("T")


def render(template: str, **texts: Any) -> str:
    """Render a template of this folder with the shared style."""
    loader = FunctionLoader(_text_of)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(style=Markup(_text_of("style.css")), **texts)


def _text_of(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def from_files(make: Callable[[], T], folder: Path) -> T:
    """Call `make`, which reads a folder's values.  ValueError: they are not such as widefield writes."""
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a file of {folder} holds values that widefield does not write, so there is no report of it "
            f"({type(error).__name__}: {error}); take the files from where they were written"
        ) from error
