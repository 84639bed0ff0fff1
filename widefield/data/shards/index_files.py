"""What was found in a shard, kept in a file: in `.widefield/` beside it or, if that cannot be written, in the user's cache.

A file is one line of JSON, then arrays.  It is of no use when the shard has changed: its size, its time, or a hash of its two
ends; nor when its own bytes are not those that were written.  Then it is made again.  It is written under another name first,
so that several processes may make it at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MAGIC = b"widefield shard 1 "
END_BYTES = 16384
"""Of each end of a shard, which are hashed: tar fills its last 10,240 with zeros."""
_DTYPES = ("int16", "int32", "int64", "uint8")


@dataclass(frozen=True)
class ShardFile:
    """A shard as it was when it was opened.  ends: the hash of its two ends."""

    path: Path
    size: int
    mtime_ns: int
    ends: str

    @property
    def stamp(self) -> dict[str, Any]:
        return {"size": self.size, "mtime_ns": self.mtime_ns, "ends": self.ends}


def shard_at(path: Path) -> ShardFile:
    """ValueError: it cannot be read, or is empty."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            start = file.read(END_BYTES)
            file.seek(max(0, about.st_size - END_BYTES))
            ends = hashlib.sha256(start + file.read(END_BYTES)).hexdigest()
    except OSError as error:
        raise ValueError(
            f"the shard {path} cannot be read ({error.strerror or error}); mend the path or its permissions"
        ) from None
    if not about.st_size:
        raise ValueError(f"the shard {path} is empty (0 bytes); copy it again")
    return ShardFile(path, about.st_size, about.st_mtime_ns, ends)


def kept(shard: ShardFile, what: str) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """What `keep` kept of a shard under a name, facts and arrays; None: nothing, or of another state of the shard."""
    for place in _places(shard, what):
        try:
            content = place.read_bytes()
        except OSError:
            continue
        found = _parsed(content)
        if found is not None and found[0].get("stamp") == shard.stamp:
            return found
    return None


def keep(shard: ShardFile, what: str, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> Path | None:
    """Keep facts, as JSON, and arrays of a shard under a name; where, or None where no place can be written.

    arrays: of one dim, int16, int32, int64 or uint8.
    """
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    head = {
        **facts, "stamp": shard.stamp, "crc": zlib.crc32(body),
        "arrays": [[name, array.dtype.name, len(array)] for name, array in arrays.items()],
    }  # fmt: skip
    content = MAGIC + json.dumps(head).encode() + b"\n" + body
    return next((place for place in _places(shard, what) if _written(place, content)), None)


def _parsed(content: bytes) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """None: it is damaged, or of another version."""
    line, _, body = content.partition(b"\n")
    if not line.startswith(MAGIC):
        return None
    try:
        head = json.loads(line[len(MAGIC) :])
        arrays, at = {}, 0
        for name, dtype, length in head["arrays"]:
            if dtype not in _DTYPES or length < 0:
                return None
            arrays[name] = np.frombuffer(body, dtype=dtype, count=length, offset=at) if length else np.empty(0, dtype=dtype)
            at += arrays[name].nbytes
        return (head, arrays) if at == len(body) and head["crc"] == zlib.crc32(body) else None
    except (ValueError, KeyError, TypeError):
        return None


def _places(shard: ShardFile, what: str) -> Iterator[Path]:
    whole = shard.path.resolve()
    yield whole.parent / ".widefield" / f"{whole.name}.{what}"
    with suppress(RuntimeError):  # of a user without a home
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        mark = hashlib.sha256(os.fsencode(whole)).hexdigest()[:16]
        yield Path(home) / "widefield" / "shards" / f"{whole.name}-{mark}.{what}"


def _written(place: Path, content: bytes) -> bool:
    """Under a name of this thread's own first: a file of the right name is whole."""
    part = place.with_name(f"{place.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        os.replace(part, place)
    except OSError:
        with suppress(OSError):
            part.unlink()
        return False
    return True
