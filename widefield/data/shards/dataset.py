"""A dataset of shards: which are to train on, what the members are, and which samples are on which side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from widefield.config import DataConfig
from widefield.data import Dataset, Labels
from widefield.data.mask_classes import coding_of
from widefield.data.order import ShuffleBlocks
from widefield.data.records import PixelKind, check_kind, described, kind_of_first, normalization_of
from widefield.data.shards.classes import classes_of, values_of
from widefield.data.shards.columns import Indexed, MemberColumn, column_of, extensions_in
from widefield.data.shards.decoding import image_in, numbers_in_mask
from widefield.data.shards.dividing import divided
from widefield.data.shards.images import (
    BlockedShardImages,
    OneClass,
    ShardImages,
    SomeClasses,
    StoredMasks,
    StoredTargets,
    StoredValues,
)
from widefield.data.shards.indexing import for_each, indexed
from widefield.data.shards.labels import field_of, words_of
from widefield.data.shards.member_kinds import is_image, is_mask
from widefield.data.shards.splitting import chosen_shards
from widefield.data.splits import Item, group_in, split_items

Array = np.ndarray[Any, Any]
Names = Sequence[str] | str | None


@dataclass(frozen=True)
class ShardOptions:
    """The options of the format: what members are, and how pixels are read; see formats/webdataset.py."""

    image: Names
    label: str | None
    labels: str | None
    values: Names
    mask: Names
    classes: Any
    ignore: Any
    group: str | None
    shuffle: dict[str, int] | None
    channels: int | str | None
    dtype: str | None


@dataclass(frozen=True)
class _Targets:
    """What the targets are.  strata: the class of each sample where it has one."""

    kind: Labels
    targets: StoredTargets
    names: list[str]
    strata: Array | None = None
    more: tuple[str, ...] = ()


def dataset_of_shards(config: DataConfig, train: Names, val: Names, chosen: ShardOptions) -> Dataset:
    """ValueError, which names the shard and the member: what is wrong with them, or with the options."""
    found = chosen_shards(config, train, val)
    shards = indexed([*found.train, *found.evaluate])
    images = column_of(shards, _image_test(chosen), noun="image", option="data.options.image")
    first = sum(len(index) for _, index in shards[: len(found.train)]) if found.evaluate else None
    labelled = _labelled(shards, images, chosen, first, found.folder)
    sides = _sides(config, shards, labelled, first, chosen.group)
    pixels = _kind(images, int(sides[0][0]), labelled.kind, chosen)
    mean, std = normalization_of(pixels)
    blocks = _blocks(images.taken(sides[0]), chosen.shuffle)
    parts = [ShardImages(images.taken(side), labelled.targets.taken(side), pixels) for side in sides]
    if blocks is not None:
        parts[0] = BlockedShardImages(parts[0].images, parts[0].targets, pixels, blocks)
    about: dict[str, Any] = {"labels": labelled.kind, "dtype": pixels.dtype, "dims": pixels.dims}
    made = Dataset(parts[0], parts[1], labelled.names, pixels.channels, mean, std, in_memory=False, **about)
    more = [f"{len(shards):,} shards", *labelled.more]
    more += [f"{found.left_out} shards of the test split left out"] if found.left_out else []
    return replace(made, about=described(made, config.path or str(train), more))


def _image_test(chosen: ShardOptions) -> Callable[[str], bool]:
    """Whether an extension is that of the image."""
    if chosen.image is not None:
        return _one_of(chosen.image)
    is_other = is_mask if chosen.mask is None else _one_of(chosen.mask)
    return lambda extension: is_image(extension) and not is_other(extension)


def _one_of(names: Names) -> Callable[[str], bool]:
    wanted = {name.lower().removeprefix(".") for name in ([names] if isinstance(names, str) else names or [])}
    return lambda extension: extension in wanted


def _kind(images: MemberColumn, first: int, labels: Labels, chosen: ShardOptions) -> PixelKind:
    """What images are read as, from the options and the first image to train on."""
    usual = None if labels in ("pixels", "layers") else 3
    channels: Any = usual if chosen.channels == "usual" else chosen.channels
    check_kind(channels, chosen.dtype)
    sample = image_in(images.member(first))
    return kind_of_first(tuple(sample.shape), sample.dtype, channels, chosen.dtype)


# ---------------------------------------------------------------------------------------------- targets


def _labelled(
    shards: Sequence[Indexed], images: MemberColumn, chosen: ShardOptions, train: int | None, folder: Path
) -> _Targets:
    """train: how many samples, the first ones, are to train on; None: it is not known yet."""
    given = {name: getattr(chosen, name) for name in ("label", "labels", "values", "mask")}
    some = [name for name, value in given.items() if value is not None]
    if len(some) > 1:
        raise ValueError(f"data.options has {' and '.join(some)}, which are different kinds of labels; leave all but one out")
    known = extensions_in(shards)
    what = some[0] if some else "label" if "cls" in known else "mask" if any(map(is_mask, known)) else ""
    if what == "mask":
        return _masked(shards, chosen, folder)
    if not what:
        raise ValueError(
            f"no member of {shards[0][0].path} is known to be a label, as .cls or .mask.png; the members are "
            f"{', '.join(known)}: set data.options.label, labels or values to one, as txt or json.KEY, or mask"
        )
    if what == "values":
        return _with_values(shards, images, [chosen.values] if isinstance(chosen.values, str) else list(chosen.values or []))
    field = field_of(given[what] or "cls", shards, option=f"data.options.{what}")
    words = words_of(shards, [field], several=what == "labels")
    names, numbers = classes_of(words, chosen.classes, train=train, name_of=images.member, folder=folder)
    if what == "label":
        return _Targets("class", OneClass(numbers[words.codes]), names, strata=numbers[words.codes])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), words.ends[:-1]])
    return _Targets("classes", SomeClasses(numbers[words.codes], starts, words.ends, len(names)), names)


def _with_values(shards: Sequence[Indexed], images: MemberColumn, options: list[str]) -> _Targets:
    if not options:
        raise ValueError("data.options.values is an empty list; name members or keys of JSON, as json.age")
    fields = [field_of(one, shards, option="data.options.values") for one in options]
    values = values_of(words_of(shards, fields, several=False), options, images.member)
    return _Targets("values", StoredValues(values), options)


def _masked(shards: Sequence[Indexed], chosen: ShardOptions, folder: Path) -> _Targets:
    test = is_mask if chosen.mask is None else _one_of(chosen.mask)
    masks = column_of(shards, test, noun="mask", option="data.options.mask")

    def numbers() -> set[int]:
        each = for_each(range(len(masks)), lambda sample: numbers_in_mask(masks.member(sample)), doing="reading masks")
        return set().union(*each)

    coding, why = coding_of(chosen.classes, chosen.ignore, numbers, folder=folder)
    return _Targets("pixels", StoredMasks(masks, coding), list(coding.names), more=(why,))


# ---------------------------------------------------------------------------------------------- sides and order


def _sides(
    config: DataConfig, shards: Sequence[Indexed], labelled: _Targets, train: int | None, group: str | None
) -> tuple[Array, Array]:
    """The samples on each side, in order.

    Where no shards say it, hashes of names do: of the shard and the key.  With groups, names are read and kept for that long.
    """
    total = sum(len(index) for _, index in shards)
    if train is not None and group is not None:
        raise ValueError(
            f"data.options.group is '{group}' and shards say what is evaluated; leave it out, or name shards that say no split "
            "and set data.hold_out or data.fold"
        )
    if train is not None:
        return np.arange(train), np.arange(train, total)
    if group is None and len({shard.path.name for shard, _ in shards}) == len(shards):
        marks = np.concatenate([index.marks for _, index in shards])
        found = divided(marks, labelled.strata, labelled.names, config)
        if found is not None:
            return found
    keys = ((shard.path.name, index.key(sample)) for shard, index in shards for sample in range(len(index)))
    strata = repeat(None) if labelled.strata is None else (labelled.names[number] for number in labelled.strata.tolist())
    items = [Item(f"{name}/{key}", stratum, group_in(key, group)) for (name, key), stratum in zip(keys, strata, strict=False)]
    sides = split_items(items, config, source=str(config.path or shards[0][0].path))
    return np.array(sides.train, dtype=np.int64), np.array(sides.evaluate, dtype=np.int64)


def _blocks(images: MemberColumn, shuffle: dict[str, int] | None) -> ShuffleBlocks | None:
    """ShuffleBlocks of samples that lie one behind the other in one shard."""
    if shuffle is None:
        return None
    odd = not isinstance(shuffle, dict) or set(shuffle) != {"block", "blocks"}
    if odd or not all(type(number) is int and number >= 1 for number in shuffle.values()):
        raise ValueError(
            f"data.options.shuffle is {shuffle!r}; write {{block: 256, blocks: 64}}, how many neighbours make a block and of "
            "how many blocks samples are mixed"
        )
    ends = np.flatnonzero(np.diff(images.shard)) + 1
    runs = zip([0, *ends.tolist()], [*ends.tolist(), len(images)], strict=True)
    starts = [place for start, stop in runs for place in range(start, stop, shuffle["block"])]
    return ShuffleBlocks(np.array([*starts, len(images)], dtype=np.int64), shuffle["blocks"])
