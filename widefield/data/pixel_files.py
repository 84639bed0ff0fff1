"""Files of pixels as arrays, with the dtype and channels that they have: no bit is lost in silence.

Pillow reads PNG, JPEG, WebP and BMP, and TIFF where tifffile is not installed; what it would cut to 8 bits is refused.  Other
formats are those of image_files/, of which windows are read alone.
A .npy file is (H, W), (C, H, W) or (H, W, C), the channels being the shorter of the two ends, or, where volumes are wanted,
(D, H, W) or (C, D, H, W); windows of it are read alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from widefield.data.windowed_files import PLAIN, read_box, size_of, windowed
from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.image_files.bytes_read import add_read
from widefield.image_files.opening import suffixes

Array = np.ndarray[Any, Any]
SUFFIXES = (*PLAIN, *(suffix for suffix in suffixes() if suffix not in PLAIN))
_PROGRAMS = ("EPS", "IPTC")
"""Formats that may hold PostScript, which is a program."""
_DTYPES = ("uint8", "uint16", "int16", "float16", "float32", "float64")
_IN_MEMORY, _FORMATS_IN_MEMORY = (".jpg", ".jpeg", ".png", ".webp", ".bmp"), ("JPEG", "MPO", "PNG", "WEBP", "BMP")
"""Suffixes, and Pillow's formats, that are decoded from bytes in memory."""
_BITS, _SAMPLE_FORMAT, _SAMPLES = 258, 339, 277
"""Tags of TIFF 6.0: BitsPerSample, SampleFormat (2 is signed) and SamplesPerPixel."""
_ORIENTATION = 0x0112
"""Tag of EXIF 2.32; 5 to 8 swap height and width."""

Image.MAX_IMAGE_PIXELS = None
"""Pillow refuses images above 179 million pixels as an attack; here they are expected."""


@dataclass(frozen=True)
class Pixels:
    """array: (C, *pixels).  colours: what the channels are where the file says so: L, LA, RGB or RGBA."""

    array: Array
    colours: str = ""


def read_pixels(path: Path, window: tuple[Interval, ...] | None = None, dims: int = 2) -> Pixels:
    """The file's pixels, or those of a window: an interval of rows and one of columns.  dims: of what a .npy file has.

    Raises whatever a damaged file makes a decoder raise; ValueError, in words, where bits would be lost.
    """
    image_file = windowed(path)
    if image_file is not None:
        return Pixels(_sound(read_box(image_file, window)), image_file.info.colours)
    if path.suffix.lower() == ".npy":
        mapped = _channels_first(_mapped(path), dims)
        part = mapped if window is None else mapped[:, *slices(window)]
        add_read(asked=part.nbytes, decoded=part.nbytes)
        return Pixels(_sound(part))
    rows, columns = (slice(None),) * 2 if window is None else slices(window)
    with Image.open(path) as image:
        if image.format in _PROGRAMS:
            raise ValueError(f"{image.format} may hold a program, which Pillow would have Ghostscript run; save it as PNG")
        if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
            whole = Pixels(tiff_array(path, f"it has {image.n_frames} pages, of which Pillow reads one at a time"))  # type: ignore[attr-defined]
        elif bits_of(image, path) > 8 and image.mode not in ("I", "F") and not image.mode.startswith("I;"):
            whole = Pixels(_by_tifffile(path, image))
        else:
            whole = pixels_of(image, ImageOps.exif_transpose(image))
    part = whole.array[:, rows, columns]
    add_read(asked=part.nbytes, decoded=whole.array.nbytes)
    return Pixels(part, whole.colours)


def pixels_in(content: bytes, suffix: str) -> Pixels | None:
    """The pixels of a file whose bytes these are, as `read_pixels` gives them of the file.  Raises as that does.

    None: it is of a format that is read from a disk alone.  suffix: of the file's name, in small letters.
    """
    if suffix == ".npy":
        return _counted(Pixels(_sound(_channels_first(np.lib.format.read_array(BytesIO(content), allow_pickle=False), 2))))
    if suffix not in _IN_MEMORY:
        return None
    with Image.open(BytesIO(content)) as image:
        if image.format not in _FORMATS_IN_MEMORY:
            return None
        bits = bits_of(image, content)
        if bits > 8 and image.mode not in ("I", "F") and not image.mode.startswith("I;"):
            raise ValueError(_too_wide(image, bits))
        return _counted(pixels_of(image, ImageOps.exif_transpose(image)))


def _counted(pixels: Pixels) -> Pixels:
    """The pixels of a file that was read whole."""
    add_read(asked=pixels.array.nbytes, decoded=pixels.array.nbytes)
    return pixels


def shape_of(path: Path, dims: int = 2) -> tuple[int, ...]:
    """(C, H, W) of the file, from its header, or (C, D, H, W) of a volume; a palette counts as RGB.  dims: of a .npy file."""
    image_file = windowed(path)
    if image_file is not None:
        return (image_file.info.channels, *size_of(image_file))
    if path.suffix.lower() == ".npy":
        return _channels_first(_mapped(path), dims).shape
    try:
        opened = Image.open(path)
    except UnidentifiedImageError as error:
        if not is_tiff(path):
            raise
        return _tiff_shape(path, str(error))
    with opened as image:
        if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
            return _tiff_shape(path, "it has several pages")
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) > 4:
            width, height = height, width
        return len(_mode_of(image)), height, width


def _mapped(path: Path) -> Array:
    """What is in a .npy file, not read yet."""
    return np.lib.format.open_memmap(path, mode="r")  # unlike np.load it never unpickles


def _channels_first(array: Array, dims: int) -> Array:
    """(C, *pixels) of what a .npy file has.  ValueError: another number of dims, or it is not known which are channels."""
    if dims == 3:
        if array.ndim not in (3, 4) or not array.size:
            raise ValueError(f"an array of shape {array.shape} is no volume; save (D, H, W) or (C, D, H, W)")
        return array[None] if array.ndim == 3 else array
    if array.ndim == 2:
        return array[None]
    if array.ndim != 3 or not array.size:
        raise ValueError(f"an array of shape {array.shape} is no image; save (H, W), (C, H, W) or (H, W, C)")
    if array.shape[0] == array.shape[2]:
        raise ValueError(f"of shape {array.shape} it is not known which dim is channels, the first or the last; save (C, H, W)")
    return array if array.shape[0] < array.shape[2] else np.moveaxis(array, 2, 0)


def _sound(array: Array) -> Array:
    """An array that torch and the network take.  ValueError: its dtype."""
    if array.dtype == bool:
        return array.astype(np.uint8)
    name = array.dtype.newbyteorder("=").name
    if name in _DTYPES:
        return np.array(array, dtype=name)
    if array.dtype.kind in "iu":
        return fitting(np.array(array))
    raise ValueError(f"its pixels are {name}; save it as one of {', '.join(_DTYPES)}")


def fitting(array: Array) -> Array:
    """Wide integers as uint16, or as int16 where some are negative.  ValueError: some do not fit 16 bits."""
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low >= 0 and high <= 65535:
        return array.astype(np.uint16)
    if low >= -32768 and high <= 32767:
        return array.astype(np.int16)
    raise ValueError(
        f"pixels from {low} to {high} do not fit 16 bits; save it with 16 bits, or as 32-bit floating-point numbers"
    )


def bits_of(image: Image.Image, file: Path | bytes) -> int:
    """Bits per channel in the file, which Pillow's mode does not say of colour images.  file: or what is in it."""
    if image.format == "PNG":
        header = file[:25] if isinstance(file, bytes) else _start_of(file, 25)
        return header[24] if len(header) > 24 else 8
    bits = getattr(image, "tag_v2", {}).get(_BITS, 8)
    return max(bits) if isinstance(bits, tuple) else int(bits)


def _mode_of(image: Image.Image) -> str:
    """L, LA, RGB or RGBA: what the image becomes without loss."""
    if image.mode in ("1", "L", "F") or image.mode.startswith("I"):
        return "L"
    if image.mode in ("LA", "RGB", "RGBA"):
        return image.mode
    has_alpha = image.mode == "P" and "transparency" in image.info
    return "RGBA" if has_alpha or image.mode in ("PA", "RGBa") else "RGB"


def pixels_of(image: Image.Image, upright: Image.Image | None = None) -> Pixels:
    """A PIL image's pixels.  upright: the same, turned as its EXIF says.  ValueError: integers that do not fit 16 bits."""
    mode = _mode_of(image)
    signed = getattr(image, "tag_v2", {}).get(_SAMPLE_FORMAT, 1)
    upright = upright or image
    if image.mode == "F":
        array = np.array(upright, dtype=np.float32)
    elif image.mode.startswith("I"):
        wide = np.array(upright, dtype=np.int64)
        is_signed = 2 in (signed if isinstance(signed, tuple) else (signed,)) and _bits_in(image) <= 16
        array = wide.astype(np.int16) if is_signed else fitting(wide)
    else:
        array = np.array(upright.convert(mode))
    return Pixels(array.reshape(*array.shape[:2], -1).transpose(2, 0, 1), mode)


def _bits_in(image: Image.Image) -> int:
    bits = getattr(image, "tag_v2", {}).get(_BITS, (32,))
    return max(bits) if isinstance(bits, tuple) else int(bits)


def _by_tifffile(path: Path, image: Image.Image) -> Array:
    """(C, H, W) of a TIFF with more than 8 bits per colour.  ValueError: another format, or tifffile is not installed."""
    bits = bits_of(image, path)
    if image.format != "TIFF":
        raise ValueError(_too_wide(image, bits))
    return tiff_array(path, f"it has {bits} bits per channel in {image.mode}, of which Pillow reads 8")


def _too_wide(image: Image.Image, bits: int) -> str:
    return f"it is {image.mode} with {bits} bits per channel, of which Pillow reads 8; save it as TIFF or .npy, or with 8 bits"


def tiff_array(path: Path, why: str) -> Array:
    """(C, H, W) of a TIFF, by tifffile.  ValueError, beginning with `why`: tifffile is not installed, or no image is there."""
    with _series_of(path, why) as series:
        array, axes = series.asarray(), series.axes
    if array.ndim == 2:
        return _sound(array[None])
    return _sound(np.moveaxis(array, 2, 0) if axes[-1] in "SC" else array)


def _tiff_shape(path: Path, why: str) -> tuple[int, int, int]:
    """(C, H, W) of what `tiff_array` gives, from the file's header."""
    with _series_of(path, why) as series:
        *first, last = series.shape
        if len(first) == 1:
            return 1, first[0], last
        return (last, first[0], first[1]) if series.axes[-1] in "SC" else (first[0], first[1], last)


@contextmanager
def _series_of(path: Path, why: str) -> Iterator[Any]:
    try:
        import tifffile
    except ImportError:
        raise ValueError(f"{why}; pip install 'widefield[tiff]'") from None
    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        if len(series.shape) not in (2, 3):
            raise ValueError(f"its pixels have the shape {series.shape} ({series.axes}); save rows, columns and channels alone")
        yield series


def is_tiff(path: Path) -> bool:
    """By its name and its first bytes.  Pillow knows no TIFF of five channels or of doubles, for example."""
    return path.suffix.lower() in (".tif", ".tiff") and _start_of(path) in (b"II", b"MM")


def _start_of(path: Path, count: int = 2) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
