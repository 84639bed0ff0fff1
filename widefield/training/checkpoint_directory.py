"""The folder of checkpoints: which there are, which are undamaged, and which are kept.  Files only, no tensors or ranks.

    step_00000120/            a complete checkpoint
      about.json              step, metric, plan, names and shapes of the model
      plain.json              the state without its tensors; own_R.json the same for the state of rank R only
      tensors.json            the file of each tensor; tensors_R.safetensors those that rank R wrote
      manifest.sha256         the hash of every file above; `sha256sum -c manifest.sha256` checks it
    .step_00000140.partial/   being written; after a killed run, the next run removes it
    .step_00000100.trash/     being deleted
    .step_00000120.replaced/  the old one, while a new one of the same step takes its name

One run at a time writes to a folder.  Others may read it meanwhile: reading changes nothing.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from widefield.training import manifest, tensors, tree_json

Warn = Callable[[str], None]
ABOUT, PLAIN, PICKLED = "about.json", "plain.json", ".metadata"
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(partial|trash)")


@dataclass(frozen=True)
class About:
    """The metadata of a checkpoint.  model: the full shape of each parameter and buffer.  plan: the plan's text."""

    step: int
    epoch: int
    samples: int
    metric: float | None
    higher_is_better: bool
    ranks: int
    plan: str
    model: dict[str, list[int]]
    versions: dict[str, str]


@dataclass(frozen=True)
class Found:
    """A checkpoint whose hashes were checked."""

    folder: Path
    about: About


# ---------------------------------------------------------------------------------------------- finding


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too, oldest step first."""
    if not folder.is_dir():
        return []
    return sorted((place for place in folder.iterdir() if _STEP.fullmatch(place.name)), key=step_of)


def newest_sound_in(folder: Path, *, warn: Warn) -> Found | None:
    """The newest checkpoint whose hashes are right, or None; warns of each newer one, with the damaged file.

    ValueError: an older version of widefield wrote the next one, with a pickle.
    """
    for place in reversed(steps_in(Path(folder))):
        _refuse_pickled(place)
        about, problem = _sound(place)
        if about is not None:
            return Found(place, about)
        warn(
            f"the checkpoint {place} is passed over: {problem}. "
            "The next older sound one is taken; copy this one back from where it is whole, or delete it"
        )
    return None


def sound_at(place: Path) -> Found:
    """The checkpoint in a folder.  ValueError: it is damaged, or an older version of widefield wrote it, with a pickle."""
    _refuse_pickled(place)
    about, problem = _sound(place)
    if about is None:
        raise ValueError(
            f"the checkpoint {place} cannot be used: {problem}; copy it back from where it is whole, or name another"
        )
    return Found(place, about)


def _refuse_pickled(place: Path) -> None:
    """ValueError for a checkpoint with a pickle: if it were passed over, the run would begin anew in the same folder."""
    if (place / PICKLED).exists() and not (place / tensors.INDEX).exists():
        raise ValueError(
            f"the checkpoint {place} was written by an older widefield, which kept the list of its tensors in a pickle "
            f"({PICKLED}); reading one can run any code, so it is not read. Go on with the version that wrote it, or begin a "
            "run of its own with another --run folder; the run's weights.safetensors can be given as model.weights"
        )


def _sound(place: Path) -> tuple[About | None, str | None]:
    """The metadata of an undamaged checkpoint, or None and what is wrong."""
    problem = manifest.what_is_wrong(place, needed=(ABOUT, PLAIN, tensors.INDEX))
    if problem is not None:
        return None, problem
    try:
        unlisted = tensors.files_in(place) - manifest.names_in(place)
    except tensors.FormatError as error:
        return None, f"it is whole, and not what this version of widefield writes: {error}"
    if unlisted:
        return None, f"{min(unlisted)}, which {tensors.INDEX} names, is not listed in {manifest.MANIFEST}"
    about = _about_or_none(place)
    return about, None if about is not None else f"{ABOUT} is whole, and not what this version of widefield writes"


def check_model(found: Found, model: Mapping[str, Sequence[int]]) -> None:
    """ValueError, naming the first that differ: the checkpoint's names and shapes are not those of `model`."""
    saved = found.about.model
    differ = [name for name in sorted({*saved, *model}) if _shape(saved, name) != _shape(model, name)]
    if not differ:
        return
    first = "; ".join(f"{name} is {_shape(saved, name)} there and {_shape(model, name)} here" for name in differ[:3])
    raise ValueError(
        f"the checkpoint {found.folder} is of another model: {len(differ)} of {len({*saved, *model})} names differ. "
        f"{first}{'; ...' if len(differ) > 3 else ''}. "
        "Build the model as it was (model.name and model.options), or start a new run folder"
    )


def _shape(model: Mapping[str, Sequence[int]], name: str) -> str:
    return str(list(model[name])) if name in model else "missing"


def _about_or_none(folder: Path) -> About | None:
    try:
        about = About(**tree_json.from_json((folder / ABOUT).read_text(encoding="utf-8"), {}))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = (about.step, about.epoch, about.samples, about.ranks, about.metric or 0.0)
    shapes = about.model.values() if isinstance(about.model, dict) else [None]
    ours = all(isinstance(number, int | float) for number in numbers) and all(isinstance(shape, list) for shape in shapes)
    return about if ours else None


def step_of(place: Path) -> int:
    match = _STEP.fullmatch(place.name)
    assert match is not None, f"{place} is no checkpoint"
    return int(match[1])


# ---------------------------------------------------------------------------------------------- writing


def clean(folder: Path) -> None:
    """Remove what a killed run left; rename a `.replaced` checkpoint back where the new one is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in sorted(folder.glob(".step_*.replaced")):
        current = left.with_name(left.name.removeprefix(".").removesuffix(".replaced"))
        if current.exists():
            shutil.rmtree(left)
        else:
            left.rename(current)
    for left in sorted(folder.glob(".step_*")):
        if _LEFTOVER.fullmatch(left.name):
            shutil.rmtree(left)


def partial_of(folder: Path, step: int) -> Path:
    """The folder where the checkpoint of a step is written, before it is renamed."""
    return folder / f".{name_of(step)}.partial"


def make_anew(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def make_current(partial: Path, hashes: Mapping[str, str]) -> None:
    """Write the manifest and rename the folder; when this returns, the checkpoint survives a power cut.

    hashes: of every file in it, all of them synced.  A checkpoint of the same step is replaced.
    """
    manifest.write_manifest(partial, hashes)
    folder = partial.parent
    current = folder / partial.name.removeprefix(".").removesuffix(".partial")
    with _replaced(current):
        partial.rename(current)
        manifest.sync(folder)


@contextlib.contextmanager
def _replaced(current: Path) -> Iterator[None]:
    """Rename an existing checkpoint for the time inside, and delete it; after an error or a kill it gets its name back."""
    aside = current.with_name(f".{current.name}.replaced")
    if not current.exists():
        yield
        return
    shutil.rmtree(aside, ignore_errors=True)
    current.rename(aside)
    try:
        yield
    except OSError:
        if not current.exists():
            aside.rename(current)
        raise
    shutil.rmtree(aside, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- keeping


def prune(folder: Path, *, step: int, last: int, best: int, warn: Warn) -> None:
    """Delete the checkpoints that need not be kept now that `step` is saved; warns of those that cannot be deleted."""
    # Checkpoints of later steps are damaged: the run resumed before them.  Counted, they would push out this one.
    old = [place for place in steps_in(folder) if step_of(place) <= step]
    keep = names_to_keep({place.name: _about_or_none(place) for place in old}, last=last, best=best)
    for place in old:
        if place.name not in keep:
            try:
                _delete(place)
            except OSError as error:
                warn(f"the old checkpoint {place} could not be deleted: {error}; delete it by hand")


def names_to_keep(abouts: Mapping[str, About | None], *, last: int, best: int) -> set[str]:
    """The names of the checkpoints to keep: the `last` newest and the `best` by metric.

    abouts: oldest first; None where about.json cannot be read.  Of equal metrics the newer is kept.  Checkpoints without a
    metric, or with nan, are not among the best.
    """
    merit: dict[str, float] = {}
    for name, about in abouts.items():
        if about is not None and about.metric is not None and not math.isnan(about.metric):
            merit[name] = about.metric if about.higher_is_better else -about.metric
    newest_first = list(merit)[::-1]
    ranked = sorted(newest_first, key=merit.__getitem__, reverse=True)  # stable: of equals the first, the newer, stays first
    return {*list(abouts)[-max(1, last) :], *ranked[:best]}


def _delete(place: Path) -> None:
    """Rename a checkpoint before deleting it, so that a half-deleted one is never taken for complete."""
    trash = place.with_name(f".{place.name}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    place.rename(trash)
    shutil.rmtree(trash)
