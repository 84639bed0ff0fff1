"""What the files of strategies add to the config: values of `mesh.data_strategy`, and sections.

Two constants of each file in widefield/parallel/strategies/ are read from its text, since importing a strategy imports torch,
and reading a recipe should not.  `AXIS` is the axis of the mesh that a strategy uses, or None.  `SECTION` names the file in
widefield/config/ with its choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from widefield.naming import constants_in, load
from widefield.section import AnySection, Section

STRATEGIES = "widefield.parallel.strategies"
"""The package of the strategies, whose modules are loaded by name, to check a plan or to parallelize a model."""
_CONSTANTS = constants_in(STRATEGIES, ("AXIS", "SECTION"))

AXES: dict[str, str | None] = {name: constants["AXIS"] for name, constants in _CONSTANTS.items() if "AXIS" in constants}
"""The axis of every strategy, by the name of its file; None for a strategy without an axis."""
SECTIONS: dict[str, str | None] = {
    constants["SECTION"]: AXES.get(name) for name, constants in _CONSTANTS.items() if "SECTION" in constants
}
"""The axis of a section's strategy, by the section's key.  A strategy without an axis is on where its section is set."""

if TYPE_CHECKING:
    DataStrategy = str
else:
    DataStrategy = Literal[tuple(name for name, axis in AXES.items() if axis == "replicate")]


def with_sections_of_strategies(kind: type[AnySection]) -> type[AnySection]:
    """A subclass of `kind` with a field for the section of every strategy, where it has none; so a new strategy edits no list.

    The default is the section's own for a strategy with an axis, and null, which leaves the strategy off, for another.
    """
    further: dict[str, Any] = {}
    for key, axis in SECTIONS.items():
        if key not in kind.model_fields:
            section = _section_in(key)
            further[key] = (section | None, None) if axis is None else (section, section())
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **further) if further else kind


def _section_in(key: str) -> type[Section]:
    """The section that the file `key` in config/ defines.  ValueError: it defines none, or several."""
    module = load("widefield.config", key)
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    sections = [kind for kind in found if issubclass(kind, Section)]
    if len(sections) != 1:
        raise ValueError(f"config/{key}.py defines {len(sections)} sections; a file there is one, a subclass of Section")
    return sections[0]
