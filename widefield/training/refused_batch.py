"""The batches that the guard refused, kept in the run folder so that their step can be run again: `guard/step_00000012/`.

    batch_R.safetensors   the samples that rank R read, with the rest of each pass as JSON in the file's metadata

Every rank that reads pixels of its own writes them.  `joined` puts the parts of all ranks together, as one rank would have read
them.  Reading runs no code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from widefield.comm.mesh import Mesh
from widefield.data.batch import Batch
from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.trust import inside

FOLDER = "guard"
_STEP, _PART = re.compile(r"step_(\d{8,})"), re.compile(r"batch_\d+\.safetensors")
_TENSORS = ("image", "target", "index", "partner", "share", "box", "moments")
_PLAIN = ("seeds", "samples", "skipped", "asked", "readable", "idle", "shown")
_ABOUT = "widefield"
"""The key of the JSON in the metadata."""


@dataclass(frozen=True)
class _Part:
    """What one rank read in each pass.  copy: the copy of the model that it is for."""

    copy: int
    passes: list[Batch]


def folder_of(run: Path, step: int) -> Path:
    """Where the batch of step `step`, counted from 1, is."""
    return run / FOLDER / f"step_{step:08d}"


def kept_steps(run: Path) -> list[int]:
    """The steps whose batches are kept, counted from 1, oldest first."""
    place = run / FOLDER
    found = [_STEP.fullmatch(entry.name) for entry in place.iterdir()] if place.is_dir() else []
    return sorted(int(match[1]) for match in found if match is not None)


# ---------------------------------------------------------------------------------------------- writing


def write(run: Path, step: int, passes: Sequence[Batch], mesh: Mesh) -> Path:
    """Write what this rank read for step `step`, counted from 1, if anything.  OSError: the disk refuses it."""
    folder = folder_of(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    if mesh.is_first_of_tile and passes:
        tensors = {f"{number}.{name}": value.contiguous() for number, batch in enumerate(passes) for name, value in _of(batch)}
        about = {"step": step, "copy": mesh.copy, "passes": [_plain(batch) for batch in passes]}
        path = folder / f"batch_{mesh.rank}.safetensors"
        safetensors.torch.save_file(tensors, path, metadata={_ABOUT: json.dumps(about)})
    return folder


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` batches."""
    steps = kept_steps(run)
    for step in steps[: max(0, len(steps) - keep)]:
        shutil.rmtree(folder_of(run, step), ignore_errors=True)


def _of(batch: Batch) -> list[tuple[str, Tensor]]:
    return [(name, value) for name in _TENSORS if (value := getattr(batch, name)) is not None]


def _plain(batch: Batch) -> dict[str, Any]:
    window = None if batch.window is None else [[run.start, run.stop] for run in batch.window]
    return {name: getattr(batch, name) for name in _PLAIN} | {"whole_shape": batch.whole_shape, "window": window}


# ---------------------------------------------------------------------------------------------- reading


def joined(run: Path, step: int) -> list[Batch] | None:
    """The batches of a step, one per pass, with the samples of all ranks as one rank reads them; None where none are kept.

    ValueError: a file is damaged, or parts are missing.
    """
    folder = folder_of(run, step)
    if not folder.is_dir():
        return None
    parts = [_part(folder, name) for name in sorted(entry.name for entry in folder.iterdir() if _PART.fullmatch(entry.name))]
    try:
        return [_joined_pass([(part.copy, part.passes[number]) for part in parts]) for number in range(_passes(parts))]
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not hold the batch of one step ({error}); {_CURE}") from None


_CURE = "take it from where the run was trained, or delete it, and the step is read from the data"


def _part(folder: Path, name: str) -> _Part:
    try:
        with safe_open(inside(folder, name), framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[_ABOUT])
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}
        copy, passes = about["copy"], [_batch(number, plain, tensors) for number, plain in enumerate(about["passes"])]
        if type(copy) is not int:
            raise TypeError(f"copy is {copy!r}")
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / name} is damaged ({type(error).__name__}: {error}); {_CURE}") from None
    return _Part(copy, passes)


def _batch(number: int, plain: dict[str, Any], tensors: dict[str, Tensor]) -> Batch:
    mine = {name: tensors[f"{number}.{name}"] for name in _TENSORS if f"{number}.{name}" in tensors}
    window = None if plain["window"] is None else tuple(Interval(int(start), int(stop)) for start, stop in plain["window"])
    whole = None if plain["whole_shape"] is None else tuple(int(length) for length in plain["whole_shape"])
    rest = {name: plain[name] for name in _PLAIN} | {"shown": tuple(float(value) for value in plain["shown"])}
    if not 0 <= int(rest["samples"]) <= len(mine["image"]):
        raise ValueError(f"pass {number} has {rest['samples']} samples and {len(mine['image'])} images")
    return Batch(**mine, **rest, window=window, whole_shape=whole)


def _passes(parts: list[_Part]) -> int:
    numbers = {len(part.passes) for part in parts}
    if len(numbers) != 1:
        raise ValueError("no part is there" if not numbers else f"ranks have {sorted(numbers)} passes")
    return numbers.pop()


def _joined_pass(parts: list[tuple[int, Batch]]) -> Batch:
    """One pass of all copies, in their order; the tiles of each image put together."""
    copies = sorted({copy for copy, batch in parts if batch.samples})
    wholes = [_whole([batch for copy, batch in parts if copy == one and batch.samples]) for one in copies]
    if not wholes:
        return parts[0][1]  # idle, or of no image that could be read
    before = [sum(len(whole.image) for whole in wholes[:number]) for number in range(len(wholes))]
    found: dict[str, Any] = {}
    for name in _TENSORS:
        values = [getattr(whole, name) for whole in wholes]
        if name == "partner" and values[0] is not None:
            values = [value + first for value, first in zip(values, before, strict=True)]
        found[name] = None if values[0] is None else torch.cat(values)
    for name in ("seeds", "skipped", "asked", "readable"):
        found[name] = [one for whole in wholes for one in getattr(whole, name)]
    return Batch(**found, samples=sum(whole.samples for whole in wholes), shown=wholes[0].shown)


def _whole(tiles: list[Batch]) -> Batch:
    """The whole images of which these are the tiles."""
    first = tiles[0]
    if first.window is None or first.whole_shape is None:
        return first
    pixels, dims = first.whole_shape[1:], len(first.window)
    image = first.image.new_zeros((*first.image.shape[:2], *pixels))
    labelled = first.target.ndim > dims
    target = first.target.new_zeros((*first.target.shape[:-dims], *pixels)) if labelled else first.target
    covered = 0
    for tile in tiles:
        assert tile.window is not None, "all ranks of a copy read a window"
        image[(..., *slices(tile.window))] = tile.image
        covered += tile.image[0, 0].numel()
        if labelled:
            target[(..., *slices(tile.window))] = tile.target
    if covered < image[0, 0].numel():
        raise ValueError(f"its tiles have {covered:,} of {image[0, 0].numel():,} pixels; parts of some ranks are missing")
    return replace(first, image=image, target=target, whole_shape=None, window=None)
