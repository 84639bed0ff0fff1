"""planned.json of a run folder: the plan that was chosen for the run, why, and what a step of it should take."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from widefield.config import RunConfig
from widefield.config.mesh import MeshConfig
from widefield.section import parse_section, to_yaml
from widefield.training.disk import replace_text

PLANNED = "planned.json"


@dataclass(frozen=True)
class PlannedRun:
    """What was chosen for a run.

    key: of the recipe and the machines that it was chosen for.  overrides: the keys of the choice.
    reasons: in sentences, the choice first.
    prediction: `plan` in words, peak_memory_bytes and `parts` of rank 0, `seconds` of a step with seconds_by, and the like.
    """

    key: str
    machines: str
    overrides: list[str]
    reasons: list[str] = field(default_factory=list)
    prediction: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(vars(self), indent=1) + "\n"

    def applied(self, config: RunConfig) -> RunConfig:
        """The config with the chosen plan in place of mesh.auto."""
        plain = config.model_copy(update={"mesh": MeshConfig(independent=config.mesh.independent)})
        return parse_section(RunConfig, to_yaml(plain), self.overrides, name="the chosen plan")


def planned_from(text: str) -> PlannedRun:
    """What `to_text` wrote.  ValueError, TypeError: it is damaged."""
    found = PlannedRun(**json.loads(text))
    texts = (found.key, found.machines, *found.overrides, *found.reasons)
    if not all(isinstance(one, str) for one in texts) or not isinstance(found.prediction, dict):
        raise TypeError("it holds values that widefield does not write")
    return found


def read_planned(folder: Path) -> PlannedRun | None:
    """What the folder has; None without it, or where it is damaged: a run is then planned anew."""
    try:
        return planned_from((folder / PLANNED).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write_planned(folder: Path, planned: PlannedRun) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / PLANNED, planned.to_text())
