"""Blocks are what a file's codec decodes at once.  Can a block be as large as it claims, and is it too large for windows?"""

from __future__ import annotations

import math

import numpy as np

from widefield.image_files.info import Level
from widefield.image_files.stored_array import MOST_CHUNK_BYTES

CHECKED_BYTES, MOST_TIMES = 256 * 2**20, 40_000
"""A block above the first is to have its bytes divided by the second in the file.  Deflate and JPEG make at most about 1,000
bytes of one and zstd 32,768, and a header with a changed bit would have terabytes allocated."""


def require_plausible(decoded: int, stored: int) -> None:
    """ValueError: a block of `decoded` bytes cannot come from `stored` bytes.

    >>> require_plausible(2**28, 2**20), require_plausible(2**20, 1)
    (None, None)
    """
    if decoded > max(CHECKED_BYTES, MOST_TIMES * stored):
        raise ValueError(f"its header claims {decoded:,} bytes of pixels in {stored:,} bytes of the file, which cannot be")


def block_bytes(level: Level, channels: int, dtype: str) -> int:
    """Of a block, decoded, with all channels."""
    return math.prod(level.block) * channels * np.dtype(dtype).itemsize


def advice_on(level: Level, channels: int, dtype: str, convert: str) -> str:
    """Why a window costs more than its own bytes, and `convert`, which says what to do; "" where it does not."""
    size = block_bytes(level, channels, dtype)
    if size <= MOST_CHUNK_BYTES:
        return ""
    block = " x ".join(map(str, level.block))
    return f"any window decodes blocks of {block} pixels ({size / 2**20:,.0f} MiB each); {convert}"
