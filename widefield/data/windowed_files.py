"""Files of which windows are read without the rest: which are they, and what are their pixels?

Of TIFFs, those that Pillow would read otherwise (palettes, CMYK, one bit) are left to Pillow, and so is every TIFF where
tifffile is not installed.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from widefield.data import BadImageError
from widefield.geometry import Interval
from widefield.image_files import ImageFile, is_image_file, is_series, opened_image, stem_of
from widefield.image_files.info import spacing_in_mm

Array = np.ndarray[Any, Any]
PLAIN = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp", ".npy")
"""What pixel_files.py reads by itself."""
_TIFF = (".tif", ".tiff")
_LIKE_TIFFFILE = ("L", "LA", "RGB", "RGBA", "F", "I")
"""Modes of Pillow that stand for the numbers in the file, and for no others."""
_NUMBERS = (*_LIKE_TIFFFILE, "P", "1")


def has_image_name(name: str) -> bool:
    """Whether a file, or a folder, of this name is an image, as scan.nii.gz or scene.zarr."""
    return name.lower().endswith(PLAIN) or is_image_file(Path(name))


def name_of_image(path: Path) -> Path:
    """The path without the suffix of its format.

    >>> name_of_image(Path("a/scan.nii.gz")), name_of_image(Path("b.1.png"))
    (PosixPath('a/scan'), PosixPath('b.1'))
    """
    return path.with_name(stem_of(path)) if is_image_file(path) else path.with_suffix("")


def windowed(path: Path, *, numbers: bool = False) -> ImageFile | None:
    """The image, opened, where windows of it are read; None: Pillow or a memory map reads it.

    numbers: of a palette, its numbers are wanted and not its colours, as of masks.
    OSError, ImageFileError: it cannot be opened.
    """
    suffix = path.suffix.lower()
    if suffix in _TIFF:
        if importlib.util.find_spec("tifffile") is None or _mode_of(path) not in (_NUMBERS if numbers else _LIKE_TIFFFILE):
            return None
    elif suffix in PLAIN or not (is_image_file(path) or is_series(path)):
        return None
    return opened_image(path)


def _mode_of(path: Path) -> str:
    """Pillow's mode of a TIFF; "F" for what Pillow does not know, as five channels or doubles."""
    try:
        with Image.open(path) as image:
            return image.mode.partition(";")[0]
    except UnidentifiedImageError:
        return "F"


def read_box(image: ImageFile, window: tuple[Interval, ...] | None) -> Array:
    """(C, H, W), or (C, D, H, W) of a volume; one of a single slice is an image.  window: of these axes, as of `size_of`."""
    if window is not None and len(window) < len(image.info.size):
        window = (Interval(0, 1), *window)
    array = image.read(window)
    return array[:, 0] if _is_slice(image) else array


def size_of(image: ImageFile) -> tuple[int, ...]:
    """(H, W), or (D, H, W) of a volume with more than one slice."""
    return image.info.size[1:] if _is_slice(image) else image.info.size


def spacing_of_file(path: Path) -> tuple[float, ...]:
    """The lengths of a pixel on each axis, in mm; () where the file tells none.

    BadImageError: it tells them in no unit of length.  OSError, ImageFileError: it cannot be opened.
    """
    image = windowed(path)
    try:
        return () if image is None else spacing_in_mm(image.info)
    except ValueError as error:
        raise BadImageError(f"{path}: {error}") from None


def _is_slice(image: ImageFile) -> bool:
    return len(image.info.size) == 3 and image.info.size[0] == 1


def apart(path: Path, other: Path) -> tuple[float, float] | None:
    """How far the pixels of two files of one size lie apart in the world, at most, and the smallest length of a pixel.

    None: one of them has no place in the world, or theirs is another one.  OSError, ImageFileError: one cannot be opened.
    """
    images = windowed(path, numbers=True), windowed(other, numbers=True)
    if images[0] is None or images[1] is None:
        return None
    one, two = (image.info for image in images if image is not None)
    if not one.affine or not two.affine or one.world != two.world or one.size != two.size:
        return None
    corners = np.array([[*corner, 1.0] for corner in itertools.product(*((0, extent - 1) for extent in one.size))])
    distances = np.linalg.norm(corners @ (np.array(one.affine) - np.array(two.affine)).T, axis=1)
    return float(distances.max()), min(one.spacing)
