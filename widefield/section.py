"""A frozen group of fields and its YAML text: read with errors that name the line, written so that it reads back equal.

An unknown key or a wrong type is a ValueError that names the field, shows its line and suggests the nearest key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from widefield.naming import did_you_mean


class Section(BaseModel):
    """A frozen group of fields; unknown keys, wrong types and numbers that are not finite are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )


AnySection = TypeVar("AnySection", bound=Section)


# ---------------------------------------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2: 1e-3 is a number (in PyYAML text), yes, on and 2026-01-31 are text (true and a date)."""


class _Dumper(yaml.SafeDumper):
    """Quotes texts that a reader of YAML 1.1, or ours, would read as something else."""


_BOOL, _FLOAT, _DATE = (f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "timestamp"))
_NUMBER = re.compile(r"^[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(_FLOAT, _NUMBER, list("-+0123456789."))

Path_ = tuple[str | int, ...]
DEEPEST, MOST_VALUES = 50, 1_000_000
"""Of a text's values: those of a recipe are nested some six deep."""


@dataclass(frozen=True)
class _Source:
    """The origin of values, for errors: the file's lines and, by path, the line or override that set a value."""

    name: str
    lines: Sequence[str]
    line_of: Mapping[Path_, int]
    overrides: Mapping[Path_, str]

    def where(self, path: Path_) -> str:
        """As `recipes/digits.yaml, line 3:  batchsize: 64`, of the path or its nearest known parent."""
        for end in range(len(path), -1, -1):
            near = path[:end]
            if near in self.overrides:
                return f"command line:  {self.overrides[near]}"
            if near in self.line_of and near:
                line = self.line_of[near]
                return f"{self.name}, line {line}:  {self.lines[line - 1].strip()}"
        return self.name


def parse_section(kind: type[AnySection], text: str, overrides: Sequence[str] = (), *, name: str) -> AnySection:
    """A Section from YAML text and overrides.  ValueError: with field, line and the nearest known key.  name: of the text."""
    line_of: dict[Path_, int] = {}
    try:
        root = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader) or {}
        _check_nesting(values, name)
        if isinstance(values, dict) and root is not None:
            _note_lines(root, (), line_of, name)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deep; write its values out") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} holds a {type(values).__name__}; a mapping of keys to values is wanted, as seed: 0")
    given = {_override(values, override): override for override in overrides}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        source = _Source(name, text.splitlines(), line_of, given)
        problems: dict[Path_, str] = {}
        for problem in error.errors():  # of the types that a field may have, the first one speaks
            path = _path_in(values, tuple(problem["loc"])) if problem["type"] != "missing" else tuple(problem["loc"])
            problems.setdefault(path, _explain(kind, problem, path, source))
        raise ValueError("\n".join(problems.values())) from None


def _check_nesting(values: Any, name: str) -> None:
    """ValueError: values hold themselves, or each other so often that they are endless, through aliases, or are nested deep."""
    left, count = [(values, 0)], 0
    while left:
        one, depth = left.pop()
        count += 1
        if depth > DEEPEST or count > MOST_VALUES:
            raise ValueError(
                f"{name} is nested more than {DEEPEST} deep, or has more than {MOST_VALUES:,} values, as where one holds "
                "itself through an alias; write its values out"
            )
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        left += [(part, depth + 1) for part in inner]


def _path_in(values: Any, path: Path_) -> Path_:
    """The part of a problem's path that is in `values`; pydantic adds the type of a field that may have several."""
    for depth, part in enumerate(path):
        inside = part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int)
        if not inside:
            return path[:depth]
        values = values[part]
    return path


def _note_lines(node: yaml.Node, path: Path_, line_of: dict[Path_, int], name: str) -> None:
    """Record the line of every key below `node`.  ValueError: a key is given twice, of which YAML would keep the last."""
    line_of.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            if here in line_of:
                where = f"{name}, line {key.start_mark.line + 1}: {'.'.join(map(str, here))}"
                raise ValueError(f"{where} is given twice, first on line {line_of[here]}")
            line_of[here] = key.start_mark.line + 1
            _note_lines(value, here, line_of, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*path, index), line_of, name)


def _override(values: dict[str, Any], override: str) -> Path_:
    """Set `a.b=value` in `values`; returns the path."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"not an override: {override!r}; write KEY=VALUE, as optimizer.lr=0.2 or data.path=images")
    *parents, last = key.split(".")
    place = values
    for depth, parent in enumerate(parents):
        if place.get(parent) is None:
            place[parent] = {}
        inner = place[parent]
        if not isinstance(inner, dict):
            raise ValueError(f"command line: {override}: {'.'.join(parents[: depth + 1])} holds {inner!r}, which has no keys")
        place = inner
    try:
        place[last] = yaml.load(text, Loader=_Loader) if text else None
        _check_nesting(place[last], f"command line: {override[:100]}")
    except yaml.YAMLError as error:
        raise ValueError(f"command line: {override}: {text!r} is not YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"command line: {override[:100]}: it is nested too deep") from None
    return (*parents, last)


def _explain(kind: type[Section], problem: Any, path: Path_, source: _Source) -> str:
    """The text for one error of pydantic: which field, why, where, what to do.  path: of the field."""
    field = ".".join(str(part) for part in path)
    where = source.where(path)
    if problem["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        inside = f"'{'.'.join(map(str, path[:-1]))}'" if len(path) > 1 else "a recipe"
        return f"unknown key '{field}'{did_you_mean(str(path[-1]), known)} {inside} has: {', '.join(known)}\n  {where}"
    if problem["type"] == "missing":
        return f"'{field}' is missing; it has no default, so write it in the recipe\n  {where}"
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        hint = did_you_mean(str(problem["input"]), re.findall(r"'([^']+)'", problem["ctx"]["expected"]))
        return f"'{field}' is {problem['input']!r}{hint} It can be {problem['ctx']['expected']}\n  {where}"
    return f"'{field}' is {problem['input']!r} ({type(problem['input']).__name__}): {reason[0].lower() + reason[1:]}\n  {where}"


def _fields_at(kind: type[BaseModel], path: Path_) -> list[str]:
    """The keys that the section at `path` knows."""
    for part in (part for part in path if isinstance(part, str)):  # numbers are places in a list
        annotation: Any = kind.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        kind = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return list(kind.model_fields)


# ---------------------------------------------------------------------------------------------- writing


def to_yaml(section: Section) -> str:
    """The section as YAML, which `parse_section` reads back equal."""
    return yaml.dump(section.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def text_of(values: Mapping[str, Any], *, name: str) -> str:
    """A dict of plain values as YAML, for `parse_section`.  ValueError: a value that YAML cannot express."""
    try:
        return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False)
    except yaml.representer.RepresenterError as error:
        raise ValueError(
            f"{name} holds {error.args[-1]!r}, a {type(error.args[-1]).__name__}; give texts, numbers, true, false, None, "
            "lists and dicts"
        ) from None


def differences(old: Section, new: Section) -> list[str]:
    """The fields in which two sections differ, as `["optimizer.lr: 0.1 -> 0.2"]`."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = [*before, *(key for key in after if key not in before)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys if before.get(key) != after.get(key)]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    inner = [_flat(value, f"{prefix}.{key}" if prefix else key) for key, value in values.items()]
    return {key: value for part in inner for key, value in part.items()}
