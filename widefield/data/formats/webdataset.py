"""WebDataset: samples in tars (shards), each consecutive members that share a stem, as `007.jpg` with `007.cls`.

data.path is a tar, a pattern as `train-{0000..0146}.tar` or `train-*.tar`, or a folder of tars.  Shards whose names have the
words train and val are the two splits, data.options.train and val say others; else hold_out or fold divides the samples.
An index of each shard is made once, after which a sample is one read: an epoch is one permutation of all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.shards.dataset import ShardOptions, dataset_of_shards


def open_dataset(
    config: DataConfig,
    *,
    train: Sequence[str] | str | None = None,
    val: Sequence[str] | str | None = None,
    image: Sequence[str] | str | None = None,
    label: str | None = None,
    labels: str | None = None,
    values: Sequence[str] | str | None = None,
    mask: Sequence[str] | str | None = None,
    classes: Any = None,
    ignore: Any = None,
    group: str | None = None,
    shuffle: dict[str, int] | None = None,
    channels: int | str | None = "usual",
    dtype: str | None = None,
) -> Dataset:
    """train, val: patterns of shards, or lists of them, relative to data.path.

    image, mask: extensions; None: any that is of an image, and for masks begins with mask, seg or label, as mask.png.
    label (one class), labels (several), values (numbers): extensions, with a key of JSON after it: cls, json.label.
        None of these and no mask: cls, else masks.
    classes: names in the order of their numbers, or a file of them; None: as found.  Of masks, and ignore, as in masks.py.
    group: a regular expression whose match in a key is the group, which hold_out and fold do not divide.
    shuffle: {block: 256, blocks: 64} reads blocks of 256 neighbours, of 64 blocks at a time; None: any sample at any time.
    channels: of all images; usual: 3, with masks those of the first image; None: of the first.  dtype: of all.
    ValueError, which names the shard and the member: what is wrong with them, or with the options.
    """
    chosen = ShardOptions(image, label, labels, values, mask, classes, ignore, group, shuffle, channels, dtype)
    return dataset_of_shards(config, train, val, chosen)


def _sample_shards(place: Path, write: Callable[[Path], None]) -> Path:
    import tarfile

    for split, count in (("train", 6), ("val", 4)):
        (place / split).mkdir(parents=True)
        with tarfile.open(place / f"{split}-0000.tar", "w") as tar:
            for number in range(count):
                image, label = place / split / f"{number}.png", place / split / f"{number}.cls"
                write(image)
                label.write_text(str(number % 2))
                for file in (image, label):
                    tar.add(file, arcname=file.name)
    return place


CASES = [({"path": _sample_shards}, 6, 4, 2)]
"""As in imagefolder.py."""
