"""What do the files of strategies bring to a config: values of `mesh.data_strategy`, and sections?

Two constants of each file in widefield/parallel/strategies/ are read from its text, for to import a strategy imports torch,
and a recipe is read, printed and explained where torch is not loaded.  `AXIS` is the axis of the mesh that a strategy lays a
model out over, or None.  `SECTION` names the file in widefield/config/ that has what a user may choose of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from widefield.naming import constants_in, load
from widefield.section import AnySection, Section

STRATEGIES = "widefield.parallel.strategies"
"""The folder; a module of it is loaded by name, and only where a plan is checked or a model laid out."""
_CONSTANTS = constants_in(STRATEGIES, ("AXIS", "SECTION"))

AXES: dict[str, str | None] = {name: constants["AXIS"] for name, constants in _CONSTANTS.items() if "AXIS" in constants}
"""The axis of every strategy, by the name of its file; None for one that no axis turns on."""
SECTIONS: dict[str, str | None] = {
    constants["SECTION"]: AXES.get(name) for name, constants in _CONSTANTS.items() if "SECTION" in constants
}
"""The axis of the strategy that a section belongs to, by the section's key.  Where it is None, the section turns it on."""

if TYPE_CHECKING:
    DataStrategy = str
else:
    DataStrategy = Literal[tuple(name for name, axis in AXES.items() if axis == "replicate")]


def with_sections_of_strategies(kind: type[AnySection]) -> type[AnySection]:
    """`kind` with a field for every section of a strategy that it has none for, so that a new strategy edits no list.

    The section of a strategy with an axis has its defaults; another's is null, which leaves the strategy off.
    """
    further: dict[str, Any] = {}
    for key, axis in SECTIONS.items():
        if key not in kind.model_fields:
            section = _section_in(key)
            further[key] = (section | None, None) if axis is None else (section, section())
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **further) if further else kind


def _section_in(key: str) -> type[Section]:
    """The one section that the file `key` in config/ defines."""
    module = load("widefield.config", key)
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    sections = [kind for kind in found if issubclass(kind, Section)]
    if len(sections) != 1:
        raise ValueError(f"config/{key}.py defines {len(sections)} sections; a file there is one, a subclass of Section")
    return sections[0]
