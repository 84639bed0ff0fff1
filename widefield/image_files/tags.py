"""The tags of a TIFF's first image, and whether its pixels are all in the file.  No library, for it tells which one to install.

TIFF 6.0 and BigTIFF, in both byte orders.  No number is believed before it is seen to lie in the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

Array = np.ndarray[Any, Any]
Values = dict[int, Array | bytes]

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, SAMPLES = 256, 257, 258, 259, 262, 277
STRIP_OFFSETS, STRIP_ROWS, STRIP_BYTES, PLANAR = 273, 278, 279, 284
TILE_WIDTH, TILE_HEIGHT, TILE_OFFSETS, TILE_BYTES = 322, 323, 324, 325
SOFTWARE, XMP = 305, 700
GEO_PIXEL_SCALE, GEO_TRANSFORM, GEO_KEYS, GDAL_NODATA = 33550, 34264, 34735, 42113
_PLACE = (WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, SAMPLES, STRIP_ROWS, PLANAR, TILE_WIDTH, TILE_HEIGHT)
_SAYING = (270, 282, 283, 320, 330, 347)
"""Description, resolution, palette, smaller images and tables of JPEG."""
_BLOCKS = (STRIP_OFFSETS, STRIP_BYTES, TILE_OFFSETS, TILE_BYTES)

_KINDS = {1: "u1", 2: "S", 3: "u2", 4: "u4", 5: "u4", 6: "i1", 7: "S", 8: "i2", 9: "i4", 10: "i4", 11: "f4", 12: "f8",
          13: "u4", 16: "u8", 17: "i8", 18: "u8"}  # fmt: skip
"""By the number of a tag's type, what it holds; a fraction (5, 10) is two numbers."""
YCBCR = 6
OUTSIDE: Array = np.empty(0)
"""The value of a tag that would lie outside of the file."""
MOST_TAGS = 4096
"""More in one image are a sign of damage; tifffile has the same limit."""
MOST_BYTES = 2**30
"""Of a tag's value; the offsets of 100 million blocks have fewer."""


def is_tiff(start: bytes) -> bool:
    """By the first four bytes of a file.

    >>> is_tiff(b"MM\\0\\x2a rest"), is_tiff(b"II\\x2b\\0 rest"), is_tiff(b"II are letters")
    (True, True, False)
    """
    return start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def read_tags(path: Path, wanted: Collection[int] = ()) -> Values:
    """The tags of the first image by their numbers; {} if the file is no TIFF or its list of tags is not in the file.

    wanted: the tags whose values are read, texts as bytes and numbers as an array; those of the others are b"".
    """
    with path.open("rb") as file:
        start = file.read(16)
        if not is_tiff(start):
            return {}
        order, big = ">" if start[:1] == b"M" else "<", start[:4] in (b"II+\0", b"MM\0+")
        try:
            place = struct.unpack_from(f"{order}{'Q' if big else 'I'}", start, 8 if big else 4)[0]
            return _first_image(file, place, order=order, big=big, wanted=wanted)
        except (struct.error, ValueError, OSError):  # cut short, or a place that no file has
            return {}


def check_chain(path: Path) -> None:
    """ValueError: an image in a TIFF says that another follows, which is not in the file.  Readers would show fewer."""
    for number, (place, is_there, size) in enumerate(_images(path), start=1):
        if not is_there:
            raise ValueError(f"image {number} would begin at byte {place}, and the file has {size}: it is cut short")


def check_end(path: Path) -> None:
    """ValueError: an image in a TIFF says that one of those before follows.  Readers would go round without an end."""
    for _ in _images(path):
        pass


def _images(path: Path) -> Iterator[tuple[int, bool, int]]:
    """The byte at which each image begins, whether it is in the file, and the file's bytes.  ValueError: they form a ring."""
    with path.open("rb") as file:
        start = file.read(16)
        size, order, big = file.seek(0, 2), ">" if start[:1] == b"M" else "<", start[:4] in (b"II+\0", b"MM\0+")
        head, entry_bytes, field = ("Q", 20, "Q") if big else ("H", 12, "I")
        (place,) = struct.unpack_from(order + field, start, 8 if big else 4)
        known: set[int] = set()
        while place:
            if place in known:
                raise ValueError(
                    f"behind its image {len(known)} follows the one at byte {place}, which was there before: they have no end"
                )
            known.add(place)
            following = place
            if place < size:
                file.seek(place)
                (count,) = struct.unpack(order + head, file.read(struct.calcsize(head)).ljust(struct.calcsize(head), b"\xff"))
                following = place + struct.calcsize(head) + entry_bytes * count
            is_there = following + struct.calcsize(field) <= size
            yield place, is_there, size
            if not is_there:
                return
            file.seek(following)
            (place,) = struct.unpack(order + field, file.read(struct.calcsize(field)))


def _first_image(file: BinaryIO, place: int, *, order: str, big: bool, wanted: Collection[int]) -> Values:
    size = file.seek(0, 2)
    file.seek(place)
    head, entry_bytes, field = ("Q", 20, "Q") if big else ("H", 12, "I")
    (count,) = struct.unpack(f"{order}{head}", file.read(struct.calcsize(head)))
    if count > MOST_TAGS:
        return {}
    content = file.read(entry_bytes * count)
    found: Values = {}
    for number in range(len(content) // entry_bytes):
        entry = content[number * entry_bytes :][:entry_bytes]
        code, kind, items = struct.unpack_from(f"{order}HH{field}", entry)
        found[code] = b""
        if code in wanted and kind in _KINDS:
            inline = entry[4 + struct.calcsize(field) :]
            found[code] = _value(
                file, size, inline, kind=_KINDS[kind], items=items * (2 if kind in (5, 10) else 1), order=order
            )
    return found


def _value(file: BinaryIO, size: int, inline: bytes, *, kind: str, items: int, order: str) -> Array | bytes:
    """inline: what the tag has room for, which is the value, or where it is in the file."""
    dtype = None if kind == "S" else np.dtype(order + kind)
    needed = items * (1 if dtype is None else dtype.itemsize)
    if needed > len(inline):
        place = int.from_bytes(inline, "big" if order == ">" else "little")
        if place + needed > size or needed > MOST_BYTES:
            return OUTSIDE
        file.seek(place)
        inline = file.read(needed)
    return inline[:needed] if dtype is None else np.frombuffer(inline[:needed], dtype)


def check_values(path: Path) -> None:
    """ValueError: a value of the first image lies outside of the file.  A reader would go on as if it had never been said."""
    for code, value in read_tags(path, _SAYING).items():
        if value is OUTSIDE:
            raise ValueError(f"the value of tag {code} is not in the file: it is cut short")


def text_in(values: Values, code: int) -> bytes:
    """The text of a tag that was read; b"" where it is missing or is no text."""
    found = values.get(code, b"")
    return found if isinstance(found, bytes) else found.tobytes() if found.dtype.itemsize == 1 else b""


def number_in(values: Values, code: int) -> int | None:
    """The first number of a tag that was read; None where it is missing or is no number."""
    found = values.get(code, b"")
    return None if isinstance(found, bytes) or not len(found) or found.dtype.kind == "f" else int(found[0])


def check_first_image(path: Path) -> None:
    """ValueError: the blocks of a TIFF's first image are fewer than its size says, or do not lie in the file."""
    values = read_tags(path, (*_PLACE, *_BLOCKS))
    number = {code: found for code in _PLACE if (found := number_in(values, code)) is not None}
    offsets, counts = (
        values.get(tile, values.get(strip, b"")) for tile, strip in ((TILE_OFFSETS, STRIP_OFFSETS), (TILE_BYTES, STRIP_BYTES))
    )
    if not {WIDTH, HEIGHT} <= set(number) or not all(isinstance(one, np.ndarray) and len(one) for one in (offsets, counts)):
        return  # the library says what is wrong with it
    height, width = number[HEIGHT], number[WIDTH]
    rows = number.get(TILE_HEIGHT, min(number.get(STRIP_ROWS, height), height))
    columns = number.get(TILE_WIDTH, width)
    if not rows or not columns:
        raise ValueError(f"its blocks have {rows} x {columns} pixels, so its header is damaged")
    samples, planar = number.get(SAMPLES, 1), number.get(PLANAR, 1) == 2
    wanted = math.ceil(height / rows) * math.ceil(width / columns) * (samples if planar else 1)
    check_blocks(offsets, counts, wanted=wanted, file_bytes=path.stat().st_size)
    if number.get(COMPRESSION, 1) == 1 and number.get(PHOTOMETRIC) != YCBCR:  # which may have fewer colours than pixels
        bits = number.get(BITS, 1) * columns * (1 if planar else samples)
        last = rows if TILE_HEIGHT in number else (height - 1) % rows + 1  # a last strip has the rows that are left
        check_raw_blocks(counts[:wanted], row_bytes=math.ceil(bits / 8), rows=rows, last=last, down=math.ceil(height / rows))


def check_blocks(offsets: Any, counts: Any, *, wanted: int, file_bytes: int) -> None:
    """offsets, counts: in bytes, of the blocks of an image in a file; a count of 0 is an empty block.

    ValueError: there are fewer than wanted, or one ends outside of the file.
    """
    if len(offsets) < wanted or len(counts) < wanted:
        raise ValueError(f"it has {min(len(offsets), len(counts))} of the {wanted} blocks that its size needs")
    starts, sizes = np.asarray(offsets[:wanted], dtype=np.float64), np.asarray(counts[:wanted], dtype=np.float64)
    ends = np.where(sizes > 0, starts + sizes, 0)
    if len(ends) and ends.max() > file_bytes:
        block = int(ends.argmax())
        raise ValueError(
            f"block {block} of {wanted} ends at byte {int(ends[block])}, and the file has {file_bytes}: it is cut short"
        )


def check_raw_blocks(counts: Any, *, row_bytes: int, rows: int, last: int, down: int) -> None:
    """ValueError: a block without compression, which is not empty, has fewer bytes than its rows.

    last: the rows of the last of `down` blocks from top to bottom.
    """
    found = np.asarray(counts, dtype=np.float64)
    needed = np.full(len(found), float(rows * row_bytes))
    if last != rows:
        needed[down - 1 :: down] = last * row_bytes  # strips: `down` of them for each plane
    short = (found > 0) & (found < needed)
    if short.any():
        block = int(short.argmax())
        raise ValueError(f"block {block} has {int(found[block])} of its {int(needed[block])} bytes: the file is damaged")
