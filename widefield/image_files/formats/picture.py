"""PNG, JPEG, WebP and BMP, by Pillow, which decodes the whole image for any window of it.

What was decoded is kept, so that windows of one image cost one decode if no larger ones come between: see last_decoded.py.
Pixels are upright (EXIF), CMYK becomes RGB, a palette's stay numbers of colours; what Pillow would cut to 8 bits is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from widefield.geometry.box import Box, slices
from widefield.image_files.block_sizes import require_plausible
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, one_level
from widefield.image_files.last_decoded import OpenBlocks, last_decoded

NAME = "picture"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
EXTRA = ""
PRIORITY = 0
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""In Pillow's words.  Others are never tried: PostScript is a program, for example."""
ADVICE = (
    "any window decodes all of it; write it once in tiles: tifffile.imwrite('tiled.tif', numpy.asarray(PIL.Image.open(file)), "
    "tile=(512, 512), compression='zlib', photometric='rgb' or 'minisblack')"
)
OF_TIFF = "Pillow decodes all of it for any window, and tifffile would not; pip install 'widefield[tiff]'"
_CODECS = {"PNG": "deflate", "MPO": "JPEG", "BMP": ""}
_WIDTH, _HEIGHT, _BITS, _ORIENTATION, _SAMPLES, _SAMPLE_FORMAT, _DEPTH = 256, 257, 258, 274, 277, 339, 32997
"""Tags of TIFF 6.0, and ImageDepth of SGI's; a sample format of 2 is signed."""
PNG_TEXTS = (b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Texts in which older programs, and Adobe's, say how an image is turned; the longest first."""
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
"""Lengths in bytes of the header that follows the first 14."""

Image.MAX_IMAGE_PIXELS = None
"""Pillow refuses images above 179 million pixels as an attack; here they are expected, and the file's size bounds them."""


def claims(path: Path, start: bytes) -> bool:
    is_bmp = start[:2] == b"BM" and int.from_bytes(start[14:18], "little") in _BMP_HEADERS
    is_webp = start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    return start.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")) or is_webp or is_bmp


def open_image(path: Path) -> ImageFile:
    return PictureFile(path, PictureFile.read_info(path))


class PictureFile(ImageFile):
    """Its handle is what owns the decoded pixels, (C, H, W)."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        with _opened(path) as image:
            (width, height), mode, dtype = image.size, mode_of(image), _dtype_of(image)
            require_plausible(height * width * len(mode) * np.dtype(dtype).itemsize, path.stat().st_size)
            name, palette = image.format or "", _palette(image)
            if name == "TIFF":  # some versions of Pillow have turned its size already
                width, height = image.tag_v2[_WIDTH], image.tag_v2[_HEIGHT]
            if (name != "PNG" or _has_exif(path)) and image.getexif().get(_ORIENTATION, 1) > 4:
                width, height = height, width
        return ImageInfo(
            format=name, reader=f"Pillow {Image.__version__}", axes="YX", channels=len(mode), dtype=dtype,
            levels=one_level((height, width)), colours="" if palette else mode, palette=palette,
            channel_names=("palette",) if palette else (), compression=_CODECS.get(name, name), by_window=False,
            advice=OF_TIFF if name == "TIFF" else ADVICE,
        )  # fmt: skip

    def open_handle(self) -> OpenBlocks:
        return OpenBlocks()

    def close_handle(self, handle: OpenBlocks) -> None:
        """The pixels go with it."""

    def read_box(self, handle: OpenBlocks, box: Box, level: int) -> Array:
        return last_decoded(handle, 0, self._decoded)[:, *slices(box)]

    def _decoded(self) -> Array:
        with _opened(self.path) as image:
            kind = np.dtype(self.info.dtype)
            try:
                ImageOps.exif_transpose(image, in_place=True)
            except OSError as error:
                if image.format != "TIFF":
                    raise
                raise ValueError(f"Pillow: {error}; tifffile may read it: pip install 'widefield[tiff]'") from None
            pixels = np.asarray(_plain(image, mode_of(image)))
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        if pixels.dtype != kind:
            pixels = pixels.astype(kind)
        return np.moveaxis(pixels, -1, 0)


def _opened(path: Path) -> Any:
    """ValueError, in words: bits would be lost, or it has several pages."""
    image = Image.open(path, formats=FORMATS)
    try:
        if image.format == "TIFF":
            _check_tiff(image)
        bits = _bits_of(image, path)
        if bits > 8 and image.mode not in ("I", "F") and not image.mode.startswith("I;"):
            raise ValueError(
                f"it is {image.mode} with {bits} bits per channel, of which Pillow reads 8; save it as TIFF or .npy"
            )
    except Exception:
        image.close()
        raise
    return image


def _check_tiff(image: Any) -> None:
    """ValueError: Pillow would read one page, one plane or the first channel of it, and say nothing."""
    channels, depth = image.tag_v2.get(_SAMPLES, 1), image.tag_v2.get(_DEPTH, 1)
    if image.n_frames > 1 or depth > 1 or channels != len(image.getbands()):
        raise ValueError(f"it has {image.n_frames} pages of {channels} channels and {depth} planes, of which Pillow reads one")


def _bits_of(image: Any, path: Path) -> int:
    """Bits per channel in the file, which Pillow's mode does not say of colour images."""
    if image.format == "PNG":
        with path.open("rb") as file:  # width, height, then the depth: RFC 2083, 4.1.1
            header = file.read(25)
        return header[24] if len(header) > 24 else 8
    bits = getattr(image, "tag_v2", {}).get(_BITS, 8)
    return max(bits) if isinstance(bits, tuple) else int(bits)


def mode_of(image: Any) -> str:
    """L, LA, RGB or RGBA: what an image becomes without loss; P where its pixels stay numbers of colours.

    >>> [mode_of(Image.new(mode, (1, 1))) for mode in ("1", "I;16", "LA", "P", "CMYK")]
    ['L', 'L', 'LA', 'P', 'RGB']
    """
    if image.mode in ("1", "L", "F") or image.mode.startswith("I"):
        return "L"
    if image.mode in ("P", "LA", "RGB", "RGBA"):
        return image.mode
    return "RGBA" if image.mode in ("PA", "RGBa") else "RGB"


def _plain(image: Any, mode: str) -> Any:
    """In a mode of which NumPy takes every bit."""
    return image if image.mode in ("1", mode, "F") or image.mode.startswith("I") else image.convert(mode)


def _dtype_of(image: Any) -> str:
    """Of the pixels in the file: a mode of 32 bits may have 16 of them."""
    if image.mode in ("1", "F"):
        return {"1": "bool", "F": "float32"}[image.mode]
    if not image.mode.startswith("I"):
        return "uint8"
    tags = getattr(image, "tag_v2", {})
    bits, signed = tags.get(_BITS, 16), tags.get(_SAMPLE_FORMAT, 1)
    bits, signed = (max(one) if isinstance(one, tuple) else int(one) for one in (bits, signed))
    return f"{'int' if signed == 2 else 'uint'}{32 if bits > 16 else 16}"


def _palette(image: Any) -> tuple[tuple[int, ...], ...]:
    """The colours by number; with alpha where some are transparent.  It decodes no pixel, as Pillow's `getpalette` does."""
    if image.mode != "P":
        return ()
    small, stored = Image.new("P", (1, 1)), image.palette
    small.putpalette(bytes(stored.palette), stored.rawmode or stored.mode)
    colours = small.getpalette("RGB") or []
    clear = image.info.get("transparency")
    found = [tuple(colours[first : first + 3]) for first in range(0, len(colours), 3)]
    if clear is None:
        return tuple(found)
    alphas = dict(enumerate(clear)) if isinstance(clear, bytes) else {clear: 0}
    return tuple((*colour, alphas.get(number, 255)) for number, colour in enumerate(found))


def _has_exif(path: Path) -> bool:
    """Whether a PNG has something that may say how it is turned.  Pillow decodes all of one to look behind its pixels."""
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, name = int.from_bytes(head[:4], "big"), head[4:]
            start = file.read(min(length, len(PNG_TEXTS[0]))) if name in (b"tEXt", b"zTXt", b"iTXt") else b""
            if name == b"eXIf" or start.startswith(PNG_TEXTS):
                return True
            file.seek(length - len(start) + 4, 1)  # and its checksum
    return False


def write_example(path: Path, pixels: Array) -> None:
    """pixels: (C, H, W).  The name says how: one that begins with `palette`, and the suffix."""
    if path.name.startswith("palette"):
        image = Image.fromarray(pixels[0])
        image.putpalette([number * 5 % 256 for number in range(768)])
    else:
        image = Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1) if len(pixels) > 1 else pixels[0]))
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    image.save(path, **options)


CASES = [
    ("colours.png", (3, 37, 50), "uint8"),
    ("alpha.png", (4, 20, 31), "uint8"),
    ("grey_alpha.png", (2, 20, 31), "uint8"),
    ("wide.png", (1, 33, 21), "uint16"),
    ("bits.png", (1, 33, 21), "bool"),
    ("palette.png", (1, 40, 23), "uint8"),
    ("image.jpg", (3, 41, 70), "uint8"),
    ("grey.jpeg", (1, 41, 70), "uint8"),
    ("image.webp", (3, 30, 44), "uint8"),
    ("image.bmp", (3, 30, 44), "uint8"),
]
LOSSY = ("image.jpg", "grey.jpeg")
