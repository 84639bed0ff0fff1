"""What is in a shard, in words, for `widefield inspect`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np

from widefield.data.shards.columns import column_of
from widefield.data.shards.decoding import image_in
from widefield.data.shards.index import ShardIndex, make_index
from widefield.data.shards.index_files import ShardFile, shard_at
from widefield.data.shards.indexing import is_indexed
from widefield.data.shards.member_kinds import is_image, is_mask
from widefield.data.shards.open_shards import StoredMember
from widefield.quantity import bytes_text, size_text

SHOWN = 12
"""Extensions and keys that are listed."""


def about_shard(path: Path) -> list[str]:
    """Lines.  Nothing is written.  ValueError, with the shard: it is damaged, or no tar."""
    shard = shard_at(path)
    found = is_indexed(shard)
    index = make_index(path) if found is None else found
    rows = {
        "format": f"tar, uncompressed, {bytes_text(shard.size)}",
        "samples": f"{len(index):,}: {_keys(index)}",
        "members": _extensions(index),
        "others": f"{index.others:,} files that belong to no sample" if index.others else "",
        "image": _image(shard, index),
        "labels": _labels(shard, index),
        "indexed": "yes" if found is not None else "not yet: training does it once",
        "order": "samples are read in any order, each by one read of its own bytes",
    }
    width = max(map(len, rows))
    return [str(path), *(f"  {name:{width}}  {text}" for name, text in rows.items() if text)]


def _keys(index: ShardIndex) -> str:
    some = [index.key(sample) for sample in sorted({0, min(1, len(index) - 1), len(index) - 1})]
    return f"{', '.join(some[:-1])} to {some[-1]}" if len(some) > 2 else ", ".join(some)


def _extensions(index: ShardIndex) -> str:
    """As `jpg 100 of 1.2 MiB, cls 100 of 200 B`."""
    counts = Counter(dict(enumerate(np.bincount(index.extension, minlength=len(index.extensions)).tolist())))
    parts = []
    for number, count in counts.most_common(SHOWN):
        size = int(index.size[index.extension == number].sum())
        parts.append(f"{index.extensions[number]} {count:,} of {size_text(size)}")
    return ", ".join(parts) + (" and more" if len(counts) > SHOWN else "")


def _image(shard: ShardFile, index: ShardIndex) -> str:
    """The first sample's, or why there is none."""
    try:
        column = column_of([(shard, index)], is_image, noun="image", option="data.options.image")
        image = image_in(column.member(0))
    except ValueError as error:
        return str(error)
    size = " x ".join(map(str, image.shape[1:]))
    kind = str(image.dtype).removeprefix("torch.")
    return f"the first is {size}, {len(image)} channel{'s' if len(image) > 1 else ''} of {kind}"


def _labels(shard: ShardFile, index: ShardIndex) -> str:
    masks = [extension for extension in index.extensions if is_mask(extension)]
    if "cls" in index.extensions:
        return "classes in .cls"
    if masks:
        return f"masks in .{masks[0]}"
    others = [extension for extension in index.extensions if not is_image(extension)]
    if not others:
        return "none"
    words = [word for extension in others[:SHOWN] for word in _places(shard, index, extension)]
    return f"in {', '.join(words)}; say which: data.options.label={words[0]}, or labels, or values"


def _places(shard: ShardFile, index: ShardIndex, extension: str) -> list[str]:
    """Where labels may be in members of an extension; of JSON, the keys of the first."""
    if not extension.endswith("json"):
        return [extension]
    number = int(np.flatnonzero(index.extension == index.extensions.index(extension))[0])
    start, size = (int(one[number]) for one in (index.start, index.size))
    try:
        value = json.loads(StoredMember(shard, int(index.header[number]), start, size, extension).read())
    except ValueError:
        return [f"{extension}.KEY"]
    return [f"{extension}.{key}" for key in list(value)[:SHOWN]] if isinstance(value, dict) and value else [extension]
