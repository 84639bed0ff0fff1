"""nnU-Net's raw folder: imagesTr/CASE_0000.png, a file per channel, labelsTr/CASE.png, dataset.json.

A splits_final.json beside these, as nnU-Net writes it with its preprocessed data, has the folds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from widefield.data import Labels
from widefield.data.mask_layouts import Pair
from widefield.data.masks import SUFFIXES as OF_MASKS
from widefield.data.masks import Coding, Mask, Regions
from widefield.data.records import Target

SPLITS = "splits_final.json"


def is_nnunet(folder: Path) -> bool:
    return (folder / "imagesTr").is_dir() and (folder / "labelsTr").is_dir()


def nnunet_pairs(folder: Path) -> tuple[list[Pair], Labels, Callable[[Pair], Target], list[str]]:
    """The training cases, their kind of labels, a function that gives the target of one, and the names of the classes.

    Labels with several numbers, as nnU-Net's regions, are layers.  ValueError: dataset.json or files that do not fit it.
    """
    about = _read(folder / "dataset.json")
    ending = about.get("file_ending", ".png")
    if ending not in OF_MASKS:
        raise ValueError(
            f"{folder}/dataset.json has file_ending '{ending}'; files of {', '.join(OF_MASKS)} are read here, so convert them"
        )
    labels = _labels(about, folder)
    ignored = labels.pop("ignore", None)
    pairs = _pairs(folder, ending)
    names = [str(name) for name in labels]
    if all(isinstance(number, int) for number in labels.values()):
        number_of = {number: place for place, number in enumerate(labels.values())}
        coding = Coding(tuple(names), number_of, frozenset() if ignored is None else frozenset({ignored}))
        return pairs, "pixels", partial(_mask, coding), names
    return pairs, "layers", *_regions(labels, ignored, folder)


def channel_names(folder: Path) -> list[str]:
    """The names of the channels, in their order; in the first version of nnU-Net they were modalities.

    ValueError: dataset.json cannot be read.
    """
    about = _read(folder / "dataset.json")
    named = about.get("channel_names", about.get("modality", {}))
    if not isinstance(named, dict) or not all(str(number).isdigit() for number in named):
        raise ValueError(f'{folder}/dataset.json has channel_names {named!r}; write them as {{"0": "CT"}}')
    return [str(named[number]) for number in sorted(named, key=int)]


def sides_of_cases(folder: Path, cases: Sequence[str], fold: int | None) -> dict[str, str] | None:
    """The side, train or val, of each case in a fold of splits_final.json; without a word for a case that is in neither.

    None: there is no such file.  ValueError: it cannot be read, has no such fold, or names other cases.
    """
    path = folder / SPLITS
    if not path.exists():
        return None
    try:
        folds = [{side: [str(case) for case in one[side]] for side in ("train", "val")} for one in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f'{path} cannot be read ({error!r}); it is a list with an entry per fold, {{"train": [cases], "val": [cases]}}'
        ) from None
    if fold is None or fold >= len(folds):
        got = "is not set" if fold is None else f"is {fold}"
        raise ValueError(
            f"{path} has {len(folds)} folds, counted from 0, and data.fold {got}; set data.fold to the one to evaluate, or "
            "remove the file"
        )
    sides = {case: side for side in ("train", "val") for case in folds[fold][side]}
    if odd := sides.keys() - set(cases):
        raise ValueError(f"{path} names the case '{min(odd)}', and imagesTr/ has none of that name; mend the file")
    if both := set(folds[fold]["train"]) & set(folds[fold]["val"]):
        raise ValueError(f"{path} has the case '{min(both)}' on both sides of fold {fold}; mend the file")
    return sides


def _read(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); nnU-Net's folder has its classes in it") from None
    if not isinstance(about, dict) or not isinstance(about.get("labels"), dict):
        raise ValueError(f'{path} has no labels; write them as "labels": {{"background": 0, "cell": 1}}')
    return about


def _labels(about: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Numbers by name; the first version of nnU-Net had names by number."""
    labels = about["labels"]
    if all(str(key).isdigit() and isinstance(value, str) for key, value in labels.items()):
        return {value: int(key) for key, value in sorted(labels.items(), key=lambda entry: int(entry[0]))}
    for name, number in labels.items():
        if type(number) is not int and not (isinstance(number, list) and number and all(type(one) is int for one in number)):
            raise ValueError(
                f"{folder}/dataset.json gives '{name}' the number {number!r}; a whole number, or a list, is wanted"
            )
    return dict(labels)


def _pairs(folder: Path, ending: str) -> list[Pair]:
    """ValueError: a label without image, an image without label, or a channel that is missing."""
    labels = {file.name.removesuffix(ending): file for file in sorted((folder / "labelsTr").glob(f"*{ending}"))}
    channels: dict[str, dict[str, Path]] = {}
    for file in sorted((folder / "imagesTr").glob(f"*{ending}")):
        case, _, number = file.name.removesuffix(ending).rpartition("_")
        if not (case and len(number) == 4 and number.isdigit()):
            raise ValueError(f"{file} does not end in the number of its channel, as case_0000{ending}; rename it")
        channels.setdefault(case, {})[number] = file
    if not labels or not channels:
        raise ValueError(f"{folder} has no {ending} files in imagesTr/ or labelsTr/; mend file_ending in dataset.json")
    for case in sorted(channels.keys() ^ labels.keys()):
        lone = labels.get(case) or next(iter(channels[case].values()))
        raise ValueError(
            f"{lone} has no partner in {'imagesTr' if case in labels else 'labelsTr'}/; add it, or remove the file"
        )
    every = max(len(files) for files in channels.values())
    for case, files in channels.items():
        wanted = [f"{number:04}" for number in range(every)]
        lost = [number for number in wanted if number not in files]
        if lost:
            raise ValueError(f"{folder}/imagesTr lacks {case}_{lost[0]}{ending}, and other cases have {every} channels; add it")
    return [Pair(case, tuple(files[key] for key in sorted(files)), (labels[case],)) for case, files in channels.items()]


def _mask(coding: Coding, pair: Pair) -> Mask:
    (file,) = pair.masks
    assert file is not None
    return Mask(file, coding)


def _regions(labels: dict[str, Any], ignored: int | None, folder: Path) -> tuple[Callable[[Pair], Target], list[str]]:
    """Layers of stored numbers; the background is no layer."""
    if ignored is not None:
        raise ValueError(
            f"{folder}/dataset.json has regions and a label to ignore; layers have no such label, so leave one of them out"
        )
    numbers = {name: (one,) if isinstance(one, int) else tuple(one) for name, one in labels.items()}
    layers = {name: some for name, some in numbers.items() if some != (0,)}
    known = frozenset(one for some in numbers.values() for one in some) | {0}

    def make(pair: Pair) -> Target:
        (file,) = pair.masks
        assert file is not None
        return Regions(file, tuple(layers.values()), known)

    return make, list(layers)
