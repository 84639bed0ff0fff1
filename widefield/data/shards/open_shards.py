"""Reading members of shards: one positioned read each, by a handle that each process opens for itself."""

from __future__ import annotations

import os
import tarfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from widefield.data import BadImageError
from widefield.data.shards.index_files import ShardFile
from widefield.data.shards.tar_members import member_at

MOST_OPEN = 128
"""Per process; many systems allow 1,024 open files."""


@dataclass(frozen=True)
class StoredMember:
    """A member of a shard.  Its text is its name, `train-0000.tar/007.jpg`, read from the shard when it is asked for."""

    shard: ShardFile
    header: int
    start: int
    size: int
    extension: str

    def read(self) -> bytes:
        """BadImageError: the disk fails.  ValueError: the shard has changed since it was indexed."""
        try:
            content = _opened(self.shard).read(self.start, self.size)
        except OSError as error:
            raise BadImageError(f"cannot read {self} ({error.strerror or error})") from None
        if len(content) != self.size:
            raise ValueError(
                f"{self.shard.path} has changed since it was indexed: {len(content)} of {self.size} bytes are there at byte "
                f"{self.start}; start again"
            )
        return content

    def __str__(self) -> str:
        try:
            with self.shard.path.open("rb") as file:
                return f"{self.shard.path}/{member_at(file, self.header)}"
        except (OSError, tarfile.TarError):  # an error that is under way says more
            return f"{self.shard.path}/[the {self.extension} at byte {self.start}]"


class _Handle:
    """A file descriptor that is closed when nobody reads by it any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def state(self) -> tuple[int, int]:
        """(bytes, time of the last change) of the file."""
        assert self._descriptor is not None
        about = os.fstat(self._descriptor)
        return about.st_size, about.st_mtime_ns

    def read(self, start: int, size: int) -> bytes:
        """Fewer bytes where the file ends before.  Threads may read at the same time: no position is shared."""
        assert self._descriptor is not None
        pieces: list[bytes] = []
        while size > 0 and (piece := os.pread(self._descriptor, size, start)):
            pieces.append(piece)
            start, size = start + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


_open: OrderedDict[ShardFile, _Handle] = OrderedDict()
_lock = threading.Lock()


def _opened(shard: ShardFile) -> _Handle:
    """OSError: it cannot be opened.  ValueError: it is not what it was."""
    with _lock:
        if shard in _open:
            _open.move_to_end(shard)
            return _open[shard]
    handle = _Handle(shard.path)
    if handle.state() != (shard.size, shard.mtime_ns):
        raise ValueError(
            f"{shard.path} has changed since it was indexed: it had {shard.size} bytes and has {handle.state()[0]}, or was "
            "written since; start again"
        )
    with _lock:
        _open[shard] = handle
        while len(_open) > MOST_OPEN:
            _open.popitem(last=False)  # who still reads by it has it until then
    return handle


def _after_fork() -> None:
    """Handles stay with the process that opened them, and another thread may have held the lock."""
    global _open, _lock
    _open, _lock = OrderedDict(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
