"""Run folders may be somebody else's: reading one must not run code, and its names must not lead out of it.

A run folder has texts, numbers and pictures.  Its config may name parts of widefield, torchvision, timm and torchmetrics, which
are installed here.  `package.module:callable` may name any code, and some arguments of timm's models name files that are
unpickled.  So these are allowed only where the user gave them: on the command line, in a recipe outside of run folders, or by
`--trust`.  Hashes detect damage, not forgery: whoever can change a file can change its hash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

READS_FILES = ("cache_dir", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args")
"""Arguments of timm's models that name files or URLs of weights, which may be pickles."""
_OURS = ("record.jsonl", "plan.yaml", "bench.json")
_MAY_BE_OURS = ("model.json", "evaluation.json", "weights.safetensors", "checkpoints")
"""Files of a run, or of a comparison, beside its config.yaml: names of its own, and names that other projects may have too."""


# ---------------------------------------------------------------------------------------------- paths


def inside(folder: Path, name: object) -> Path:
    """The path of `name`, which a file in `folder` gives, below the folder.

    ValueError: it is no text, is absolute, has `..`, or leads out of the folder through a symbolic link.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file in {folder}")
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} leads out of {folder}, whose files name only what is in it")
    if leads_out(folder, folder / path):
        raise ValueError(f"{folder / path} is a link out of {folder}, whose files name only what is in it")
    return folder / path


def leads_out(folder: Path, path: Path) -> bool:
    """Whether `path`, with links followed, is outside of `folder`, or a circle of links."""
    try:
        return not path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return True


def check_links(folder: Path, names: Iterable[str]) -> None:
    """ValueError: one of `names` in a folder, or something below it, is a symbolic link out of the folder."""
    for name in names:
        for path in _links_at(folder / name):
            if leads_out(folder, path):
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)}, out of the run folder {folder}: reading would show another file "
                    "as the run's, and writing overwrite it. Put the file itself there, or link the whole run folder"
                )


def _links_at(path: Path) -> list[Path]:
    """`path` if it is a symbolic link, else all symbolic links below it."""
    if path.is_symlink():
        return [path]
    if not path.is_dir():
        return []
    return [Path(place, name) for place, folders, files in os.walk(path) for name in (*folders, *files)
            if os.path.islink(os.path.join(place, name))]  # fmt: skip


# ---------------------------------------------------------------------------------------------- names


def run_folder_of(path: str | Path, *, run: str | Path | None = None) -> Path | None:
    """The folder of a run or comparison that contains a file, at any depth; None where there is none.

    run: a folder that counts as a run folder in any case.
    """
    places = [Path(os.path.abspath(path)), Path(path).resolve()]
    for folder in dict.fromkeys(parent for place in places for parent in place.parents):
        nearest = folder in (place.parent for place in places)
        if _is_run_folder(folder, nearest=nearest) or (run is not None and folder == Path(run).resolve()):
            return folder
    return None


def _is_run_folder(folder: Path, *, nearest: bool) -> bool:
    marks = (*_OURS, *_MAY_BE_OURS) if nearest else _OURS
    return os.path.isfile(folder / "config.yaml") and any(os.path.exists(folder / mark) for mark in marks)


def check_code(
    named: Mapping[str, str], options: Mapping[str, Any], *, overrides: Sequence[str], source: str, folder: Path
) -> None:
    """ValueError: a recipe from a run folder names code, or a file of weights, that the user has not named.

    named: the code in the recipe by key, as {"model.name": "mynets:tiny"}.  options: `model.options`.
    overrides: the user's, whose keys are trusted.  source: the name of the recipe, for the error.
    """
    keys = {override.partition("=")[0] for override in overrides}
    where = f"and {source} lies in the run folder {folder}, which may be somebody else's"
    for key, code in named.items():
        if not {key, key.partition(".")[0]} & keys:
            raise ValueError(
                f"{key} is '{code}', code of its own, {where}; nothing of it was run. If you trust that folder add --trust, "
                f"or name the code yourself: {key}={code}; from Python, trust=True"
            )
    for option in READS_FILES:
        if option in options and not {"model", "model.options", f"model.options.{option}"} & keys:
            raise ValueError(
                f"model.options.{option} is {options[option]!r}, where weights would be loaded from that may be pickles, "
                f"{where}; nothing was loaded. If you trust that folder add --trust, or give model.options yourself"
            )
