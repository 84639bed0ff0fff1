"""Tiles as files: pictures of the image, and numbers as scripts.

A page that is opened from disk may show pictures but not look into them, so labels come as scripts, which hand their numbers to
the page: deflated, in base64.  What is the same number everywhere has no file; the page's data has that number.
"""

from __future__ import annotations

import base64
import io
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, features

from widefield.viewer.pyramid import Array

NOTHING = -1
"""The number of a picture in which no pixel holds anything."""


@dataclass(frozen=True)
class PictureTile:
    """shown: (1 or 3, H, W) uint8.  holds: (H, W), 0 where a pixel holds nothing, which is transparent."""

    shown: Array
    holds: Array


Content = PictureTile | Array
"""Of a tile: a picture, or numbers (H, W) of uint8 or uint16."""


def number_of(content: Content) -> int | None:
    """The number that a tile has everywhere; None where it needs a file."""
    if isinstance(content, PictureTile):
        return None if content.holds.any() else NOTHING
    first = int(content.flat[0])
    return first if (content == first).all() else None


def encoded(key: str, content: Content) -> bytes:
    """The file of a tile.  key: its name for the page."""
    return _picture(content) if isinstance(content, PictureTile) else _script(key, content)


def picture_suffix(bands: int) -> str:
    """WebP without loss is a fifth smaller than PNG for colours, and faster; grey is smaller as PNG."""
    return "webp" if bands == 3 and features.check("webp") else "png"


def _picture(content: PictureTile) -> bytes:
    bands = list(content.shown)
    if not content.holds.all():
        bands.append(np.where(content.holds, 255, 0).astype(np.uint8))
    pixels = np.ascontiguousarray(np.stack(bands, axis=-1))
    image, file = Image.fromarray(pixels[..., 0] if len(bands) == 1 else pixels), io.BytesIO()
    if picture_suffix(len(content.shown)) == "webp":
        image.save(file, "WEBP", lossless=True, method=0, quality=0, exact=True)
    else:
        image.save(file, "PNG", compress_level=6)
    return file.getvalue()


def _script(key: str, numbers: Array) -> bytes:
    """Hands numbers, row by row and the lower byte first, to the page."""
    plain = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<")).tobytes()
    text = base64.b64encode(zlib.compress(plain, 6)).decode()
    return f'widefieldTile("{key}","{text}")\n'.encode()


@dataclass
class TileFiles:
    """The files of tiles in a folder.  same: by key, the number of a tile that has one number, and so no file.

    count, size: of the files so far; size in bytes.
    """

    folder: Path
    same: dict[str, int] = field(default_factory=dict)
    count: int = 0
    size: int = 0

    def add(self, key: str, content: Content) -> None:
        """Write a tile, if it needs a file.  OSError: the disk refuses."""
        number = number_of(content)
        if number is not None:
            self.same[key] = number
            return
        suffix = picture_suffix(len(content.shown)) if isinstance(content, PictureTile) else "js"
        path, plain = self.folder / f"{key}.{suffix}", encoded(key, content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plain)
        self.count, self.size = self.count + 1, self.size + len(plain)
