"""Which keys does a recipe have, and what does each do?  Writes that table into docs/guide/recipes.md.

    python docs/generate.py

Names, types, defaults and words come from the fields of RunConfig.
tests/test_docs.py holds that the committed page is what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from widefield.config import RunConfig
from widefield.section import Section

PAGE = Path(__file__).parent / "guide" / "recipes.md"
BEGIN = "<!-- keys: written by docs/generate.py, do not edit -->"
END = "<!-- end of keys -->"

SECTIONS = {
    "data.intensity": "How [pixels](data.md#pixels) become numbers; short: `zscore`, or `{window: {center: 40, width: 400}}`.",
    "data.patches": "[Patches](data.md#patches-of-large-images) of large images; off where the whole section is left out.",
    "guard": "[Guards](failures.md#guards): NaN, spikes and replicas that differ.",
    "ema": "A moving average of the weights; off where the whole section is left out.",
    "stream": "[Tiles in time](stream.md): images run tile after tile on each device; off where the whole section is left out.",
}
"""Words for a section that may be null."""


def fields(kind: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every key that holds a value, in the order of RunConfig."""
    for name, field in kind.model_fields.items():
        section = section_of(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from fields(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """The Section that a field holds, or may hold; None for a plain value."""
    if get_origin(field.annotation) is list:  # of sections, whose keys are in the words of the list
        return None
    options = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None)


def words(key: str, field: FieldInfo) -> str:
    """What a key does, on one line.  ValueError where its section does not say it."""
    if not field.description:
        raise ValueError(f"{key} is not explained; write a docstring under the field in config/")
    return " ".join(field.description.split()).replace("|", "\\|")


def table() -> str:
    """Every key in Markdown: one table per section."""
    schema = RunConfig.model_json_schema()
    rows: dict[str, list[str]] = {"": []}  # the keys of no section come first
    for key, field in fields():
        default, kind = _default(field), _type(_property(schema, key), schema)
        row = f"| `{key}` | {kind} | {default} | {words(key, field)} |"
        rows.setdefault(key.rpartition(".")[0], []).append(row)
    return "\n".join(line for section, its in rows.items() for line in [*_head(section), *its]) + "\n"


def _head(section: str) -> list[str]:
    told = [SECTIONS[section], ""] if section in SECTIONS else []
    title = f"`{section}`" if section else "The run itself"
    return ["", f"### {title}", "", *told, "| key | type | default | what it does |", "|---|---|---|---|"]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    return f"`{value if isinstance(value, str) else json.dumps(value, default=str).strip(chr(34))}`"


def _property(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """The JSON Schema of one key."""
    here = schema
    for part in key.split("."):
        here = _resolved(here, schema)["properties"][part]
    return here


def _resolved(here: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference, also one that may be null."""
    for option in here.get("anyOf", [here]):
        if "$ref" in option:
            return schema["$defs"][option["$ref"].rpartition("/")[2]]
    return here


_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false", "null": "null"}


def _type(here: dict[str, Any], schema: dict[str, Any]) -> str:
    """`whole number`, `text or null`, `list of number`, or the values that are allowed."""
    if "anyOf" in here:
        return " or ".join(_type(option, schema) for option in here["anyOf"])
    if "const" in here:
        return f"`{here['const']}`"
    if "enum" in here:
        return ", ".join(f"`{value}`" for value in here["enum"])
    if here.get("type") == "array":
        items = here.get("items")
        return "list" if not items else f"list of {'mapping' if '$ref' in items else _type(items, schema)}"
    if here.get("type") == "object":
        return "mapping"
    return "duration" if "examples" in here else _TYPES[here["type"]] + _bounds(here)


def _bounds(here: dict[str, Any]) -> str:
    """` (from 0, below 1)`, of what is worth saying."""
    low = [f"from {here['minimum']:g}"] if "minimum" in here else []
    low += [f"above {here['exclusiveMinimum']:g}"] if "exclusiveMinimum" in here else []
    high = [f"to {here['maximum']:g}"] if "maximum" in here else []
    high += [f"below {here['exclusiveMaximum']:g}"] if here.get("exclusiveMaximum", 2**63) < 2**53 else []
    return f" ({', '.join(low + high)})" if low + high else ""


def page(text: str) -> str:
    """The page `text` with its table as the config is now.  ValueError where the marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table; put '{BEGIN}' and '{END}' on lines of their own")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
