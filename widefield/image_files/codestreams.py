"""What is seen of a compressed block before a decoder is given it, which would allocate what a damaged one claims, or crash."""

from __future__ import annotations

import struct

import numpy as np

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


_CLEAR, _END, _FIRST_ENTRY = 256, 257, 258
"""Codes of TIFF 6.0, section 13, of 9 to 12 bits: the table begins anew, the data ends, and the first that the table adds."""
_PLACES = np.arange(4097 - _FIRST_ENTRY)
"""Of the codes between two clear codes; with each but the first the table grows by an entry, up to 4,096."""
_WIDTHS = 9 + np.searchsorted(np.array([511, 1023, 2047]) - _FIRST_ENTRY, _PLACES - 1, side="right")
_STARTS = np.concatenate([[0], np.cumsum(_WIDTHS)[:-1]])
_LARGEST = np.concatenate([[255], _FIRST_ENTRY + _PLACES[:-1]])


def check_lzw(data: bytes) -> None:
    """ValueError: a code stands for a string that is not in the table yet.

    imagecodecs' decoder reads on from there, and of damaged blocks one in some ten thousand ended the process.  This takes as
    long as decoding does.

    >>> check_lzw(bytes.fromhex("80184c463808"))
    """
    padded = np.frombuffer(data + bytes(3), dtype=np.uint8).astype(np.int64)
    bits, place = 8 * len(data), 9
    if int.from_bytes(data[:2], "big") >> 7 != _CLEAR:
        raise ValueError("a block does not begin as LZW: the file is damaged")
    while True:
        starts = place + _STARTS
        count = int(np.searchsorted(starts + _WIDTHS, bits, side="right"))
        byte, shift = starts[:count] >> 3, starts[:count] & 7
        three = padded[byte] << 16 | padded[byte + 1] << 8 | padded[byte + 2]
        codes = three >> (24 - shift - _WIDTHS[:count]) & ((1 << _WIDTHS[:count]) - 1)
        ends = np.flatnonzero((codes == _CLEAR) | (codes == _END))
        end = int(ends[0]) if len(ends) else count
        if (codes[:end] > _LARGEST[:end]).any() or end == len(_PLACES):
            raise ValueError("a block is no LZW after its beginning: the file is damaged")
        if end == count or codes[end] == _END:  # some programs leave the last code out
            return
        place = int(starts[end] + _WIDTHS[end])
