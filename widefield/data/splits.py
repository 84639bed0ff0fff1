"""Which samples are trained on and which are evaluated: by a column, by a share that is held out, or by a fold.

What is held out depends on hashes of names, so adding images moves few.  Each class is divided alike.  Samples of one group, as
the images of a patient, are never on both sides.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from widefield.config import DataConfig

TRAINING = ("train", "training")
EVALUATION = ("val", "validation", "valid", "dev", "eval", "evaluate")
TEST = ("test", "testing")


@dataclass(frozen=True)
class Item:
    """What decides a sample's side.  stratum: its class; None where it has no single one.  split, fold: of a column."""

    name: str
    stratum: str | None = None
    group: str | None = None
    split: str | None = None
    fold: str | None = None


@dataclass(frozen=True)
class Sides:
    """Numbers of the samples on each side, in order.  left_out: how many are on neither, as those of a test split."""

    train: list[int]
    evaluate: list[int]
    left_out: int = 0


def group_in(name: str, pattern: str | None) -> str | None:
    """What a regular expression matches in a sample's name, its first group if it has one; None without an expression.

    ValueError: it is none, or matches nothing.

    >>> group_in("cats/P07_scan3.png", r"(P[0-9]+)_")
    'P07'
    """
    if pattern is None:
        return None
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise ValueError(f"data.options.group is '{pattern}', which is no regular expression ({error}); mend it") from None
    if found is None:
        raise ValueError(f"data.options.group is '{pattern}' and the name '{name}' does not match it; let it match every name")
    return found[1] if found.re.groups else found[0]


def split_items(items: Sequence[Item], config: DataConfig, *, source: str) -> Sides:
    """The two sides that the items' own splits or folds, or the config, ask for.  source: of the items, for errors.

    ValueError: nothing says what to hold out, or two things do; too few samples, groups or images of a class;
    a group on both sides.
    """
    has_split, has_fold = (any(getattr(item, key) is not None for item in items) for key in ("split", "fold"))
    if has_split:
        _refuse_keys(config, f"{source} has a split", "hold_out", "fold")
        sides = _by_split(items, source)
    elif has_fold:
        _refuse_keys(config, f"{source} has folds", "hold_out")
        sides = _by_fold_column(items, config, source)
    elif config.fold is not None:
        _refuse_keys(config, f"data.fold={config.fold} is set", "hold_out")
        sides = _sides(items, _folds(items, config, source), {config.fold})
    else:
        sides = _held_out(items, config, source)
    _check_sides(items, sides, source)
    return sides


def _refuse_keys(config: DataConfig, why: str, *keys: str) -> None:
    for key in keys:
        if getattr(config, key) is not None:
            raise ValueError(f"{why}, so leave data.{key}={getattr(config, key)} out")


def _check_sides(items: Sequence[Item], sides: Sides, source: str) -> None:
    if not sides.train or not sides.evaluate:
        raise ValueError(
            f"{source} gives {len(sides.train)} samples to train on and {len(sides.evaluate)} to evaluate; at least 1 of each "
            "is wanted"
        )
    both = {items[index].group for index in sides.train} & {items[index].group for index in sides.evaluate} - {None}
    if both:
        group = min(map(str, both))
        raise ValueError(
            f"{source} has samples of the group '{group}' on both sides, so it would be evaluated on what it has seen; give "
            f"each group one split ({len(both)} have two)"
        )


def _by_split(items: Sequence[Item], source: str) -> Sides:
    sides: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for index, item in enumerate(items):
        word = (item.split or "").strip().lower()
        side = next((name for name, words in zip(sides, (TRAINING, EVALUATION, TEST), strict=True) if word in words), None)
        if side is None:
            raise ValueError(
                f"{source} gives {item.name} the split '{item.split or ''}'; it is one of "
                f"{', '.join((*TRAINING, *EVALUATION, *TEST))}"
            )
        sides[side].append(index)
    if sides["val"]:
        return Sides(sides["train"], sides["val"], len(sides["test"]))
    return Sides(sides["train"], sides["test"])


def _by_fold_column(items: Sequence[Item], config: DataConfig, source: str) -> Sides:
    folds = sorted({item.fold or "" for item in items}, key=lambda name: (len(name), name))
    if "" in folds:
        empty = next(item.name for item in items if not item.fold)
        raise ValueError(f"{source} gives {empty} no fold, and others one; give all of them one")
    if config.fold is None or str(config.fold) not in folds:
        got = "is not set" if config.fold is None else f"is {config.fold}"
        raise ValueError(f"{source} has the folds {', '.join(folds)} and data.fold {got}; set data.fold to the one to evaluate")
    return _sides(items, [int(item.fold == str(config.fold)) for item in items], {1})


def _sides(items: Sequence[Item], part_of: Sequence[int], held: set[int]) -> Sides:
    train = [index for index in range(len(items)) if part_of[index] not in held]
    return Sides(train, [index for index in range(len(items)) if part_of[index] in held])


# ---------------------------------------------------------------------------------------------- by hashes of names


def _held_out(items: Sequence[Item], config: DataConfig, source: str) -> Sides:
    """Hold out the `share` of each stratum whose names, or groups, have the lowest hashes; both sides get at least one."""
    if not config.hold_out:
        raise ValueError(
            f"{source} has no train/ and val/ folders or split, so nothing is held out for evaluation; add data.hold_out=0.1 "
            "to hold out a tenth of the images, or data.fold=0 for the first of 5 folds, or make the two folders"
        )
    held: set[str] = set()
    for stratum, units in _strata(items).items():
        if len(units) < 2 and not _grouped(items):
            what = "its class's only image" if stratum is not None else "the only image"
            raise ValueError(f"{source}: {units[0]} is {what}, so none can be held out; add images")
        held.update(units[: min(len(units) - 1, max(1, round(config.hold_out * len(units))))])
    if not held:
        raise ValueError(
            f"{source} has {len({_unit(item) for item in items})} groups, each the only one of its class, so none can be "
            "held out"
        )
    return _sides(items, [int(_unit(item) in held) for item in items], {1})


def _folds(items: Sequence[Item], config: DataConfig, source: str) -> list[int]:
    """The fold of each item.  Runs of a stratum's hashes, so that one more image moves at most one of each fold's ends.

    Strata with fewer units than folds are dealt out one by one, so that no fold has all of a small class.
    """
    count, strata = config.folds, _strata(items)
    assert config.fold is not None
    if config.fold >= count:
        raise ValueError(f"data.fold is {config.fold} and there are data.folds={count}, counted from 0; set 0 to {count - 1}")
    units = sum(map(len, strata.values()))
    if units < count:
        what = "groups" if _grouped(items) else "samples"
        raise ValueError(f"{source} has {units} {what}, fewer than data.folds={count}; set data.folds={max(2, units)} or less")
    lone = next((found[0] for stratum, found in strata.items() if len(found) < 2 and stratum is not None), None)
    if lone is not None and not _grouped(items):
        raise ValueError(f"{source}: {lone} is its class's only image, so one fold would never train on it; add images")
    fold_of: dict[str, int] = {}
    small = [unit for found in strata.values() if len(found) < count for unit in found]
    fold_of |= {unit: place % count for place, unit in enumerate(small)}
    for found in strata.values():
        if len(found) >= count:
            fold_of |= {unit: place * count // len(found) for place, unit in enumerate(found)}
    return [fold_of[_unit(item)] for item in items]


def _strata(items: Sequence[Item]) -> dict[str | None, list[str]]:
    """The units, groups or names, of each stratum, by hash.  A group has the stratum of most of its samples."""
    seen: dict[str, Counter[str | None]] = {}
    for item in items:
        seen.setdefault(_unit(item), Counter())[item.stratum] += 1
    strata: dict[str | None, list[str]] = {}
    for unit, counts in seen.items():
        stratum = min(counts, key=lambda name: (-counts[name], name or ""))
        strata.setdefault(stratum, []).append(unit)
    return {stratum: sorted(strata[stratum], key=_hash) for stratum in sorted(strata, key=lambda name: name or "")}


def _unit(item: Item) -> str:
    return item.name if item.group is None else f"group {item.group}"


def _grouped(items: Sequence[Item]) -> bool:
    return any(item.group is not None for item in items)


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
