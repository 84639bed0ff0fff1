"""Reads a recipe with overrides as a RunConfig.  Precedence, lowest first: defaults, the recipe file, the command line."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from widefield.config.run import RunConfig
from widefield.naming import did_you_mean
from widefield.own_code import is_code, look_in
from widefield.section import parse_section, text_of
from widefield.trust import check_code, run_folder_of

TRAINED = ("model", "data", "task", "optimizer", "schedule")
"""The sections that name something which training builds."""
EVALUATED = ("model", "data", "task")
"""Those that an evaluation builds."""
PREDICTED = ("model", "task")
"""Those that prediction and export build."""
DATA, LOSS = "data", "task.loss"
_OF_TRAINING = ("optimizer", "schedule", "ema", "evaluate", "checkpoint", "guard", "log")
"""The sections that an evaluation does not use."""


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    trust: bool = False,
    builds: Collection[str] = TRAINED,
) -> RunConfig:
    """The recipe at `path`, or the packaged one of that name, with dotted overrides (`optimizer.lr=0.2`) as a RunConfig.

    run: a folder that counts as a run folder in any case.
    trust: let a recipe in a run folder name code of its own, see trust.py.
    builds: the sections that will be built; code that others name is not checked.
    From now on, modules of the user are also looked for in the recipe's folder, unless that is a run folder.
    ValueError: no such file, no YAML mapping, unknown keys, wrong values, or code that it may not name.
    """
    path = recipe_path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no recipe, which is a YAML file in UTF-8 ({error}); to train on images name their folder, as "
            f"'widefield train {path.absolute().parent.name}/'"
        ) from None
    config = parse_config(text, overrides, name=str(path))
    folder = run_folder_of(path, run=run)
    if folder is None:
        look_in(path.parent)
    elif not trust:
        unused = [LOSS] if DATA not in builds else []  # without data nothing has a loss
        code = {key: name for key, name in code_in(config).items() if key.partition(".")[0] in builds and key not in unused}
        check_code(code, config.model.options, overrides=overrides, source=str(path), folder=folder)
    return config


def recipe_path(path: str | Path) -> Path:
    """The file at `path`, or that of the packaged recipe of that name.  ValueError, with the nearest name: there is none."""
    found, packaged = Path(path), packaged_recipes()
    if found.is_file():
        return found
    if str(path) in packaged:
        return packaged[str(path)]
    if len(found.parts) == 1 and not found.suffix:
        hint = did_you_mean(str(path), packaged)
        raise ValueError(f"no recipe at {path}{hint} Packaged ones are: {', '.join(packaged)}. Or name a YAML file")
    beside = sorted(p.name for p in found.parent.glob("*.yaml")) if found.parent.is_dir() else []
    have = f" {found.parent}/ has: {', '.join(beside)}." if beside else ""
    raise ValueError(f"no recipe at {path}{did_you_mean(found.name, beside)}{have}")


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with widefield, by name.  They are in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    place = next(place for place in (package / "recipes", package.parent / "recipes") if place.is_dir())
    return {file.stem: file for file in sorted(place.glob("*.yaml"))}


def parse_config(text: str, overrides: Sequence[str] = (), *, name: str = "config") -> RunConfig:
    """A RunConfig from YAML text and overrides.  name: of the text, for errors."""
    return parse_section(RunConfig, text, overrides, name=name)


def config_of(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A RunConfig from a dict and overrides."""
    return parse_config(text_of(values, name="the config"), overrides, name="the config")


def code_in(config: RunConfig) -> dict[str, str]:
    """The names of a user's own code in a config, by key."""
    named = {f"{section}.name": getattr(config, section).name for section in TRAINED} | {LOSS: config.task.loss or ""}
    listed = [str(next(iter(entry), "") if isinstance(entry, dict) else entry) for entry in config.task.metrics]
    own = {key: name for key, name in named.items() if is_code(name)}
    metrics = [name for name in listed if is_code(name)]
    return own | ({"task.metrics": f"[{', '.join(metrics)}]"} if metrics else {})


def refuse_unused(overrides: Sequence[str]) -> None:
    """ValueError: an override sets a key that an evaluation does not use."""
    for override in overrides:
        if override.partition("=")[0].split(".")[0] in _OF_TRAINING:
            raise ValueError(f"{override} changes nothing in an evaluation, which does not train; leave it out")


def on_mesh_of(overrides: Sequence[str], *, alone: bool) -> list[str]:
    """Overrides with which a run's config has their mesh, and not that of its training.  alone: one copy if they name none."""
    fresh = [f"{section}={{}}" for section in ("mesh", "gradient", "sharding", "pipeline")]
    copies = ["mesh.replicate=1"] * alone
    return [*fresh, "recompute=", "data.batch_size=1000000000", *copies, *overrides]  # no plan is too large for the batch


def json_schema() -> str:
    """The JSON Schema of recipes, for editors (`# yaml-language-server: $schema=...`)."""
    return json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
