"""The size that a JPEG or a JPEG 2000 itself claims, from its first bytes; a decoder would allocate what a damaged one says."""

from __future__ import annotations

import struct

_START, _TILED = b"\xff\xd8", b"\xff\x4f\xff\x51"
"""How a JPEG and a JPEG 2000 begin."""
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
"""Markers of ITU T.81, B.1.1.3 that are followed by a size."""


def claimed_pixels(data: bytes) -> int | None:
    """Height x width.  None: it is neither, or its first part is not there.

    >>> claimed_pixels(bytes.fromhex("ffd8 ffc0 0011 08 0010 0020 03"))
    512
    """
    if data[:4] == _TILED and len(data) >= 16:
        width, height = struct.unpack(">II", data[8:16])
        return height * width
    place = 2 if data[:2] == _START else len(data)
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker, length, height, width = struct.unpack(">BHxHH", data[place + 1 : place + 9])
        if marker in _FRAMES:
            return height * width
        if marker == 0xDA:  # pixels begin
            return None
        place += 2 + length
    return None


def require_small(data: bytes, *, pixels: int) -> None:
    """ValueError: a block claims more than twice the pixels that it is to have."""
    claimed = claimed_pixels(data)
    if claimed is not None and claimed > 2 * pixels + 4096:
        raise ValueError(f"a block claims {claimed:,} pixels, and the header says {pixels:,}: the file is damaged")
