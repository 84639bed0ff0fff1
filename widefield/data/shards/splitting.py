"""Which shards are to train on, and which to evaluate: by patterns of each, by their names, or by neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from widefield.config import DataConfig
from widefield.data.shards.patterns import is_pattern, shards_of, sides_by_name
from widefield.naming import did_you_mean

Names = Sequence[str] | str | None


@dataclass(frozen=True)
class ChosenShards:
    """evaluate: empty where samples are still to be divided.  left_out: shards of a test split.

    folder: what paths in options are relative to.
    """

    train: list[Path]
    evaluate: list[Path]
    left_out: int
    folder: Path


def chosen_shards(config: DataConfig, train: Names, val: Names) -> ChosenShards:
    """ValueError: no shards, or none on a side; one on both; hold_out or fold where shards say the split."""
    folder = _folder(config.path)
    found = _by_options(config, train, val, folder) if train is not None or val is not None else _by_names(config, folder)
    for key in ("hold_out", "fold"):
        if found.evaluate and (value := getattr(config, key)) is not None:
            raise ValueError(f"there are shards to evaluate, as {found.evaluate[0]}, so leave data.{key}={value} out")
    return found


def _folder(path: str | None) -> Path:
    """What options are relative to: data.path where it is a folder, else the folder that it is in."""
    if path is None:
        return Path()
    return Path(path) if Path(path).is_dir() else Path(path).parent


def _by_options(config: DataConfig, train: Names, val: Names, folder: Path) -> ChosenShards:
    if train is None:
        if config.path is None or Path(config.path).is_dir():
            raise ValueError(f"data.options.val is {val!r} and data.options.train is not set; set both")
        to_train = shards_of(config.path, Path(), option="data.path")
    else:
        to_train = shards_of(train, folder, option="data.options.train")
    if val is None:
        return ChosenShards(to_train, [], 0, folder)
    evaluate = shards_of(val, folder, option="data.options.val")
    both = {path.resolve() for path in to_train} & {path.resolve() for path in evaluate}
    if both:
        raise ValueError(
            f"{min(both)} is of the shards to train on and of those to evaluate ({len(both)} are), so it would be evaluated on "
            "what it has seen; give each shard one side"
        )
    return ChosenShards(to_train, evaluate, 0, folder)


def _by_names(config: DataConfig, folder: Path) -> ChosenShards:
    if config.path is None:
        raise ValueError(
            "data.name=webdataset reads shards and data.path is not set; add data.path=DIR or 'train-{0000..0146}.tar'"
        )
    path = Path(config.path)
    if not path.exists() and not is_pattern(config.path):
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"data.path is {path} and there is no such folder or tar{did_you_mean(path.name, beside)}")
    every = shards_of(config.path, Path(), option="data.path")
    sides = sides_by_name(every, folder)
    return ChosenShards(every, [], 0, folder) if sides is None else ChosenShards(*sides, folder)
