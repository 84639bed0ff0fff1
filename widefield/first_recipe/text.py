"""The text of a first recipe: YAML with the reasons as comments."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from widefield.config import parse_config
from widefield.first_recipe import choices, volumes
from widefield.first_recipe.choices import RecipeEntry
from widefield.first_recipe.look import Look, look_at
from widefield.quantity import count_of


def recipe_for(folder: str | Path, *, name: str = "") -> str:
    """A recipe for the images in a folder, as YAML.  name: of its file, for the command in its first lines.

    Reads up to 64 images, and all targets where this needs no image.
    ValueError: nothing that can be trained on; and what the format finds wrong with its files.
    """
    look = look_at(Path(folder))
    is_volumes = look.dataset.dims == 3
    entries = volumes.choices_for(look) if is_volumes else choices.choices_for(look)
    lines = [*_head(look, Path(folder), name)]
    for section, group in groupby(entries, key=lambda entry: entry.key.partition(".")[0]):
        lines += [f"{section}:", *(line for choice in group for line in _lines_of(choice))]
    text = "\n".join(lines) + "\n"
    parse_config(text, name="the first recipe")  # a recipe that is refused would be our own mistake
    return text


def write_recipe(folder: str | Path, path: str | Path) -> str:
    """Write `recipe_for` a folder to a new file; returns the text.  ValueError: the file is there, or cannot be written."""
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} is there already, and is not overwritten; name another file with --output, or delete it")
    text = recipe_for(folder, name=str(path))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror or error}); name another file with --output") from None
    return text


def _head(look: Look, folder: Path, name: str) -> list[str]:
    dataset = look.dataset
    sizes = sorted({shape[1:] for shape in look.shapes})
    is_volumes = dataset.dims == 3
    noun, unit = ("volumes", "voxels") if is_volumes else ("images", "px")
    size = " x ".join(map(str, sizes[0])) + f" {unit}" if len(sizes) == 1 else f"{len(sizes)} sizes"
    size += f", {volumes.spacing_in_words(volumes.volumes_of(look))}" if is_volumes else ""
    counts = f"{len(dataset.train):,} {noun} to train on and {len(dataset.evaluate):,} to evaluate"
    pixels = f"{count_of(dataset.channels, 'channel')}, {str(look.dtype).removeprefix('torch.')}"
    return [
        f"# Written for {folder}: {counts}, of {size},",
        f"# {pixels} ({len(look.shapes)} {noun} were read).  Every value is a first guess; change what you know better.",
        "#",
        f"#   widefield train {name or 'RECIPE'}",
    ]


def _lines_of(choice: RecipeEntry) -> list[str]:
    """`  key: value  # reason`, the reason on a line of its own where the line would be long."""
    line = f"  {choice.key.partition('.')[2]}: {_yaml(choice.value)}"
    if not choice.reason:
        return [line]
    reason = f"# {choice.reason}"
    return [f"{line}  {reason}"] if len(line) + len(reason) < 118 else [f"  {reason}", line]


def _yaml(value: Any) -> str:
    """A value in YAML's flow style; texts as plain words where they are that."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str) and yaml.safe_load(value) == value and not re.search(r"[^\w./-]", value):
        return value
    return json.dumps(value)
