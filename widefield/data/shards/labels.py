"""Labels of samples as words: what the files `.cls` and `.txt`, or a key of `.json`, say of each.

They are read once and kept beside the index of the shard, since 14 million small reads at every start would take minutes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from widefield.data.shards.columns import Indexed, extensions_in
from widefield.data.shards.index import ShardIndex
from widefield.data.shards.index_files import ShardFile, keep, kept
from widefield.data.shards.indexing import for_each
from widefield.data.shards.open_shards import StoredMember

Array = np.ndarray[Any, Any]
_SEPARATORS = re.compile(r"[;|\n]")
"""Between several labels in one text."""


@dataclass(frozen=True)
class LabelField:
    """Where a label stands: in the member of an extension, in JSON under a path of keys."""

    extension: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.extension, *self.keys))


@dataclass(frozen=True)
class LabelWords:
    """The labels of all samples.  codes: int32, places in `words`; those of sample i are from ends[i - 1] to before ends[i]."""

    words: tuple[str, ...]
    codes: Array
    ends: Array

    def with_word(self, word: int) -> int:
        """The first sample that has a word."""
        return int(np.searchsorted(self.ends, np.flatnonzero(self.codes == word)[0], side="right"))


def field_of(given: str, shards: Sequence[Indexed], *, option: str) -> LabelField:
    """`cls`, or `json.label`: an extension, and keys after it.  ValueError: no member has such an extension."""
    known = extensions_in(shards)
    text = given.lower()
    fitting = [one for one in known if text == one or text.startswith(f"{one}.")]
    if not fitting:
        raise ValueError(
            f"{option} is {given}, and no member has this extension; they have: {', '.join(known)}. Of JSON name the key too, "
            "as json.label"
        )
    extension = max(fitting, key=len)
    keys = given[len(extension) + 1 :]
    return LabelField(extension, tuple(keys.split(".")) if keys else ())


def words_of(shards: Sequence[Indexed], fields: Sequence[LabelField], *, several: bool) -> LabelWords:
    """The labels of all samples of shards, in their order.

    fields: where they stand; of each sample, the words of the first come first.  several: whether one place may have several
    labels, or none; texts have `;`, `|` or ends of lines between.
    ValueError, with the shard and the member: a sample has no such member or key, or it holds no label.
    """
    found = for_each(shards, partial(_words_in, fields=fields, several=several), doing="reading labels")
    known: dict[str, int] = {}
    codes, ends, before = [], [], 0
    for own in found:
        places = np.array([known.setdefault(word, len(known)) for word in own.words], dtype=np.int32)
        codes.append(places[own.codes] if len(own.codes) else own.codes)
        ends.append(own.ends + before)
        before += len(own.codes)
    return LabelWords(tuple(known), np.concatenate(codes), np.concatenate(ends))


def _words_in(one: Indexed, *, fields: Sequence[LabelField], several: bool) -> LabelWords:
    """Of one shard: what is kept, or what its members say, which is kept then."""
    shard, index = one
    what = hashlib.sha256(json.dumps([[str(field) for field in fields], several]).encode()).hexdigest()[:12] + ".labels"
    found = kept(shard, what)
    if found is not None and set(found[1]) == {"codes", "ends"} and len(found[1]["ends"]) == len(index):
        return LabelWords(tuple(found[0]["words"]), found[1]["codes"], found[1]["ends"])
    known: dict[str, int] = {}
    codes, ends = [], []
    for sample in range(len(index)):
        for field in fields:
            codes += [known.setdefault(word, len(known)) for word in _of_sample(shard, index, sample, field, several)]
        ends.append(len(codes))
    made = LabelWords(tuple(known), np.array(codes, dtype=np.int32), np.array(ends, dtype=np.int64))
    keep(shard, what, {"words": made.words}, {"codes": made.codes, "ends": made.ends})
    return made


def _of_sample(shard: ShardFile, index: ShardIndex, sample: int, field: LabelField, several: bool) -> list[str]:
    number = index.member(sample, field.extension)
    if number is None:
        raise ValueError(
            f"{shard.path}: the sample {index.key(sample)} has no label, as it has no .{field.extension}; add it, or leave the "
            "sample out"
        )
    place = (int(one[number]) for one in (index.header, index.start, index.size))
    member = StoredMember(shard, *place, field.extension)
    try:
        return _words(member.read().decode("utf-8"), field, several)
    except UnicodeDecodeError:
        raise ValueError(
            f"{member} is no text in UTF-8, and labels are read from it; mend it, or name another member"
        ) from None
    except _NoLabelError as error:
        raise ValueError(f"{member} {error}") from None


class _NoLabelError(ValueError):
    """A member holds no label; the text goes on after its name."""


def _words(text: str, field: LabelField, several: bool) -> list[str]:
    if field.extension.rpartition(".")[2] == "json":
        return _of_value(_value_in(text, field), several)
    if field.keys:
        raise _NoLabelError(
            f"is no .json, so it has no key {'.'.join(field.keys)}; name the extension alone: {field.extension}"
        )
    if several:
        return [_plain(word) for word in _SEPARATORS.split(text) if word.strip()]
    if "\n" in text.strip():
        raise _NoLabelError(
            f"has {len(text.strip().splitlines())} lines, and one label is wanted; mend it, or set data.options.labels"
        )
    return _of_value(text, several)


def _value_in(text: str, field: LabelField) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _NoLabelError(f"is no JSON ({error}); mend it") from None
    for number, key in enumerate(field.keys):
        if not isinstance(value, dict) or key not in value:
            has = ", ".join(map(str, list(value)[:12])) if isinstance(value, dict) else f"{value!r:.60}"
            raise _NoLabelError(f"has no key {'.'.join(field.keys[: number + 1])}; it has: {has or 'none'}")
        value = value[key]
    return value


def _of_value(value: Any, several: bool) -> list[str]:
    if isinstance(value, dict):
        raise _NoLabelError(
            f"holds several values there; name one key of: {', '.join(map(str, list(value)[:12]))}, as json.label"
        )
    if several and isinstance(value, list):
        return [word for one in value for word in _of_value(one, several=False)]
    if value is None or isinstance(value, list) or not str(value).strip():
        shown = "a list" if isinstance(value, list) else "nothing"
        raise _NoLabelError(
            f"holds {shown} where a label is wanted; mend it, or set data.options.labels where there may be several"
        )
    return [_plain(str(int(value)) if isinstance(value, bool) else str(value))]


def _plain(word: str) -> str:
    """Without spaces around; a whole number without zeros before it.

    >>> _plain(" cat "), _plain("007")
    ('cat', '7')
    """
    word = word.strip()
    return str(int(word)) if word.isascii() and word.isdigit() else word
