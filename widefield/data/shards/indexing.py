"""The indexes of shards: those that are kept, and the others made, with word of how far that is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from widefield.data.shards.index import ShardIndex, make_index
from widefield.data.shards.index_files import ShardFile, keep, kept, shard_at

One, Made = TypeVar("One"), TypeVar("Made")
THREADS = 8
"""Headers are small and far apart, so that most of the time is spent waiting for the disk."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Where launchers say which rank this is."""
SECONDS = 10.0
"""Between two lines on how far it is, where they are not redrawn."""


def indexed(paths: Sequence[Path]) -> list[tuple[ShardFile, ShardIndex]]:
    """ValueError: of `make_index`, of the first shard that is wrong."""
    return for_each(paths, index_at, doing="indexing shards")


def index_at(path: Path) -> tuple[ShardFile, ShardIndex]:
    """The kept index of a shard; else it is made, and kept if that can be."""
    shard = shard_at(path)
    if (found := is_indexed(shard)) is not None:
        return shard, found
    made = make_index(path)
    if shard_at(path) != shard:
        raise ValueError(f"{path} was changed while it was indexed; wait until it is written, and start again")
    arrays = {name: getattr(made, name) for name in _ARRAYS}
    keep(shard, "index", {"extensions": made.extensions, "others": made.others}, arrays)
    return shard, made


_ARRAYS = ("first", "extension", "header", "start", "size", "keys", "key_ends", "marks")


def is_indexed(shard: ShardFile) -> ShardIndex | None:
    """Its index where one of this state of the shard is kept."""
    found = kept(shard, "index")
    if found is None or set(found[1]) != set(_ARRAYS):
        return None
    return ShardIndex(**found[1], extensions=tuple(found[0]["extensions"]), others=found[0]["others"])


def for_each(these: Sequence[One], work: Callable[[One], Made], *, doing: str) -> list[Made]:
    """What `work` makes of each, in their order, by several threads.

    Several processes that begin at the same time begin at different ones, so that each finds what others have kept.
    The error of the first that has one is raised, which is the same in every process.
    """
    begin, progress = os.getpid() * 7919 % max(1, len(these)), _Progress(doing, len(these))
    with ThreadPoolExecutor(THREADS) as pool:
        rotated = [*range(begin, len(these)), *range(begin)]
        under_way = {number: pool.submit(work, these[number]) for number in rotated}
        for one in under_way.values():
            one.add_done_callback(progress.add)
        try:
            return [under_way[number].result() for number in range(len(these))]
        finally:
            pool.shutdown(cancel_futures=True)
            progress.close()


class _Progress:
    """Lines on standard error, by the first rank alone, of what takes longer than a second."""

    def __init__(self, doing: str, total: int) -> None:
        self._doing, self._total, self._done = doing, total, 0
        self._redraws = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        self._is_quiet = next((os.environ[name] for name in _RANKS if name in os.environ), "0") != "0"
        self._next, self._shown = time.monotonic() + (1.0 if self._redraws else SECONDS), False

    def add(self, _: object) -> None:
        """One more is done; called by any thread."""
        self._done += 1
        now = time.monotonic()
        if self._is_quiet or now < self._next or self._done == self._total:
            return
        self._next, self._shown = now + (0.1 if self._redraws else SECONDS), True
        text = f"{self._doing}: {self._done:,} of {self._total:,}"
        self._write(f"\r{text}\x1b[K" if self._redraws else f"{text}\n")

    def close(self) -> None:
        if self._redraws and self._shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:  # a closed pipe, or a full disk
            self._is_quiet = True
