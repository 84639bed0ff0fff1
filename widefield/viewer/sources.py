"""Which files are shown: images that are named one by one, or those of a folder that `widefield predict` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from widefield.image_files import is_image_file
from widefield.image_files.opening import suffixes
from widefield.trust import inside
from widefield.viewer.scenes import LABELS

TABLE = "predictions.json"
ENDINGS = ("", "_mask", "_masks", "_label", "_labels", "_seg", "_gt")
"""What may stand behind an image's stem in the name of its labels."""


@dataclass(frozen=True)
class SceneFiles:
    """name: in the page.  labels: files by name, of LABELS."""

    name: str
    image: Path
    labels: Mapping[str, Path] = field(default_factory=dict)
    probabilities: Path | None = None


@dataclass(frozen=True)
class ScenesFound:
    """classes: their names; none where nothing has names.  space: into how many tiles the run cut an image, along each dim."""

    sources: list[SceneFiles]
    classes: list[str] = field(default_factory=list)
    space: list[int] = field(default_factory=list)


def folder_of_predictions(path: Path) -> Path | None:
    """The folder of predictions that a path is, or that a run folder has; None: it is neither."""
    return next((folder for folder in (path, path / "predictions") if (folder / TABLE).is_file()), None)


def named_sources(images: Mapping[Path, Path], labels: Mapping[str, Path], probabilities: Path | None) -> ScenesFound:
    """Images, with labels that are files for one image, or folders in which each image's has its stem.

    images: the relative path, without suffix, by which each is called.  A prediction in a folder that `widefield predict` wrote
    has the classes' names from there.

    ValueError: several images and one file, or a folder without any.
    """
    if probabilities is not None and len(images) > 1:
        raise ValueError(f"--probabilities {probabilities} is one file and there are {len(images)} images; name one of them")
    sources = [
        SceneFiles(str(name), image, _labels_of(image, labels, len(images), name), probabilities)
        for image, name in images.items()
    ]
    _check_found(sources, labels)
    beside = labels.get("prediction", Path()).parent
    if "prediction" not in labels or not (beside / TABLE).is_file():
        return ScenesFound(sources)
    tree = _read(beside)
    return ScenesFound(sources, _classes(tree), _space(beside, tree.get("run")))


def predicted_sources(folder: Path, labels: Mapping[str, Path]) -> ScenesFound:
    """What a folder of predictions has, with further labels, as the truth, from files or folders.

    ValueError: it has no labels of pixels, or its images are not where they were.
    """
    tree = _read(folder)
    rows = [row for row in tree["predictions"] if isinstance(row, dict) and row.get("labels")]
    if tree.get("labels") != "pixels" or not rows:
        raise ValueError(
            f"{folder / TABLE} has no labels of pixels, one class each, and these are what is shown; open predictions.csv"
        )
    sources = [_predicted(folder, row, labels, len(rows)) for row in rows]
    _check_found(sources, {name: path for name, path in labels.items() if name != "prediction"})
    return ScenesFound(sources, _classes(tree), _space(folder, tree.get("run")))


def _read(folder: Path) -> dict[str, Any]:
    try:
        tree = json.loads((folder / TABLE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder / TABLE} cannot be read ({error}); predict again") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("predictions"), list):
        raise ValueError(f"{folder / TABLE} has no list of predictions, as `widefield predict` writes it; predict again")
    return tree


def _classes(tree: Mapping[str, Any]) -> list[str]:
    found = tree.get("classes")
    return [str(name) for name in found] if isinstance(found, list) else []


def _predicted(folder: Path, row: Mapping[str, Any], labels: Mapping[str, Path], count: int) -> SceneFiles:
    image = Path(str(row.get("input")))
    if not image.exists():
        raise ValueError(
            f"{folder / TABLE} names the image {image}, and there is none, seen from here; stand where it was predicted, or "
            "name the image itself, with --labels"
        )
    prediction = _below(folder, str(row["labels"]))
    name = prediction.relative_to(folder).with_name(stem_of(prediction))
    below, ends = folder / "probabilities" / name, (".npy", "".join(prediction.suffixes[-1:]), ".nii")
    likely = next((path for end in ends if (path := below.with_name(below.name + end)).exists()), None)
    found = {"prediction": prediction, **_labels_of(image, labels, count, name)}
    return SceneFiles(str(name), image, found, likely)


def _below(folder: Path, label: str) -> Path:
    """The file of labels in a folder, which may have been moved since: the longest end of the path that is there."""
    parts = [part for part in Path(label).parts if part not in ("/", "\\", "..")]
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    found = next((path for end in ends if (path := inside(folder, end)).exists()), None)
    if found is None:
        raise ValueError(f"{folder / TABLE} names the labels {label}, which {folder} has not; predict again")
    return found


def _labels_of(image: Path, labels: Mapping[str, Path], count: int, name: Path) -> dict[str, Path]:
    """name: what the image is called, with the folders that it is in."""
    found = {}
    for key, path in labels.items():
        if path.is_dir() and not is_image_file(path):
            own = _of_stem(path, [name, Path(stem_of(image))])
            found |= {} if own is None else {key: own}
        elif count > 1:
            raise ValueError(
                f"--labels {key}={path} is one file and there are {count} images; name a folder in which each image's labels "
                "have its stem"
            )
        else:
            found[key] = path
    return found


def _of_stem(folder: Path, names: Sequence[Path]) -> Path | None:
    """The one file below a folder that has one of these names, without suffix, first come first taken."""
    for name in names:
        place = folder / name.parent
        wanted = {f"{name.name}{ending}" for ending in ENDINGS}
        files = sorted(place.iterdir()) if place.is_dir() else []
        found = [file for file in files if is_image_file(file) and stem_of(file) in wanted]
        if len(found) > 1:
            raise ValueError(f"{found[0]} and {found[1]} may both be the labels of {name}; leave one of them there")
        if found:
            return found[0]
    return None


def stem_of(path: Path) -> str:
    """The name without the suffix, which may have two parts, as .ome.tif."""
    name = path.name
    fits = [suffix for suffix in suffixes() if name.lower().endswith(suffix)]
    return name[: -len(max(fits, key=len))] if fits else path.stem


def _check_found(sources: Sequence[SceneFiles], labels: Mapping[str, Path]) -> None:
    for key, path in labels.items():
        if not any(key in source.labels for source in sources):
            stem = stem_of(sources[0].image)
            raise ValueError(f"--labels {key}={path} has no file for any of the images, as {stem}.png for {stem}; name another")


def _space(folder: Path, run: object) -> list[int]:
    """`mesh.space` of the run's recipe; [] where it cannot be read."""
    for place in (Path(str(run)), folder.parent):
        try:
            tree = yaml.safe_load((place / "config.yaml").read_text(encoding="utf-8"))
            space = tree["mesh"]["space"]
        except (OSError, ValueError, TypeError, LookupError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(space, list) and all(isinstance(one, int) and 0 < one < 10_000 for one in space):
            return list(space)
    return []


def check_names(labels: Mapping[str, Path]) -> None:
    """ValueError: one is none of LABELS."""
    for name in labels:
        if name not in LABELS:
            raise ValueError(f"--labels {name}=... is neither {' nor '.join(LABELS)}; write one of these")
