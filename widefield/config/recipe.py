"""Which config does a recipe give, with overrides?  Precedence, lowest first: defaults, the recipe file, the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from widefield.config.run import RunConfig
from widefield.naming import did_you_mean
from widefield.section import parse_section
from widefield.trust import check_model, run_folder_of


def read_config(
    path: str | Path, overrides: Sequence[str] = (), *, run: str | Path | None = None, trust: bool = False
) -> RunConfig:
    """The recipe at `path` with dotted overrides (`optimizer.lr=0.2`) as a RunConfig.

    run: the run folder in question, which needs no other sign of being one.
    trust: let a recipe that lies in a run folder name code of its own, see trust.py.
    ValueError where the file does not exist, is no YAML mapping, asks for what does not exist, or for code it may not name.
    """
    path = Path(path)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        have = f" {path.parent}/ has: {', '.join(beside)}." if beside else ""
        raise ValueError(f"no recipe at {path}{did_you_mean(path.name, beside)}{have}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error}); name a recipe, a YAML file in UTF-8") from None
    config = parse_config(text, overrides, name=str(path))
    folder = None if trust else run_folder_of(path, run=run)
    if folder is not None:
        check_model(config.model.name, config.model.options, overrides=overrides, source=str(path), folder=folder)
    return config


def parse_config(text: str, overrides: Sequence[str] = (), *, name: str = "config") -> RunConfig:
    """As `read_config`, from text."""
    return parse_section(RunConfig, text, overrides, name=name)


def json_schema() -> str:
    """JSON Schema of a recipe, for editors (`# yaml-language-server: $schema=...`)."""
    return json.dumps(RunConfig.model_json_schema(), indent=2) + "\n"
