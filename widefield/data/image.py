"""Image files as tensors with the channels and the dtype that are asked for, and writing images and labels."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from widefield.data import BadImageError
from widefield.data.pixel_files import SUFFIXES as SUFFIXES
from widefield.data.pixel_files import Array, Pixels, is_tiff, pixels_of, read_pixels, shape_of, tiff_array
from widefield.data.windowed_files import windowed
from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.image_files.image_file import ImageFileError


def read_image(
    path: str | Path,
    channels: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    narrow: bool = False,
    window: tuple[Interval, ...] | None = None,
    dims: int = 2,
) -> Tensor:
    """The image at `path` as (channels, H, W), rotated as its EXIF orientation says, or a volume as (channels, D, H, W).

    channels, dtype: to convert to; None: those of the file.  Grey becomes RGB and 8-bit RGB becomes grey; alpha is left out
    where it is not asked for.  uint8 becomes uint16 times 257, which has the same place in the range.
    narrow: let 16 bits become 8 by their upper 8 bits.  window: of the pixels, as rows and columns, read alone where the format
        has windows.  dims: of what a .npy file has, 3 for a volume; other files say it themselves.
    BadImageError: the file is missing, damaged or no image, does not become what is asked for without loss, or may hold a
    program (PostScript).
    """
    with _named(path):
        return image_of(_read(Path(path), window, dims), channels, dtype, narrow=narrow)


def image_of(pixels: Pixels, channels: int | None, dtype: torch.dtype | None, *, narrow: bool = False) -> Tensor:
    """Pixels with the channels and the dtype that are asked for, as of `read_image`.  ValueError: not without loss."""
    return torch.from_numpy(np.ascontiguousarray(_converted(_with_channels(pixels, channels), dtype, narrow=narrow)))


def shape_and_dtype_of(path: str | Path, *, dims: int = 2) -> tuple[tuple[int, ...], torch.dtype]:
    """(C, *pixels) and dtype of the file, as `read_image` gives it by itself.  BadImageError: as there."""
    with _named(path):
        shape = shape_of(Path(path), dims)
        by_window = Path(path).suffix.lower() == ".npy" or windowed(Path(path)) is not None
        pixel = tuple(Interval(0, min(1, extent)) for extent in shape[1:]) if by_window else None
        array = _read(Path(path), pixel, dims).array
        return (len(array), *shape[1:]), torch.from_numpy(np.ascontiguousarray(array[:, :1])).dtype


def size_of(path: str | Path) -> tuple[int, ...]:
    """(H, W) of the file, or (D, H, W), from its header.  BadImageError: it cannot be read."""
    with _named(path):
        return shape_of(Path(path))[1:]


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Inside, any error becomes a BadImageError with the file's name and size."""
    try:
        yield
    except ImageFileError as error:
        raise BadImageError(str(error)) from None
    except Exception as error:  # on damaged files decoders raise many types, OverflowError and MemoryError among them
        size = Path(path).stat().st_size if Path(path).is_file() else None
        reason = "there is no such file" if size is None else f"{size} bytes; {str(error) or type(error).__name__}"
        raise BadImageError(f"cannot read the image {path} ({reason})") from None


def _read(path: Path, window: tuple[Interval, ...] | None, dims: int) -> Pixels:
    try:
        return read_pixels(path, window, dims)
    except UnidentifiedImageError as error:
        if not is_tiff(path):
            raise
        array = tiff_array(path, str(error))
        return Pixels(array if window is None else array[:, *slices(window)])


def _with_channels(pixels: Pixels, channels: int | None) -> Array:
    """(channels, *pixels).  ValueError: the file has others, which do not become these."""
    array = pixels.array
    own = len(array)
    if channels in (None, own):
        return array
    if pixels.colours in ("LA", "RGBA") and own == 1 + channels:  # without alpha
        return array[:channels]
    if own in (1, 2) and channels == 3 and pixels.colours != "":
        return np.repeat(array[:1], 3, axis=0)
    if own == 1 and channels == 3:
        return np.repeat(array, 3, axis=0)
    if channels == 1 and pixels.colours in ("RGB", "RGBA") and array.dtype == np.uint8 and array.ndim == 3:
        return np.array(Image.fromarray(np.ascontiguousarray(array[:3].transpose(1, 2, 0))).convert("L"))[None]
    raise ValueError(f"it has {own} channels of {array.dtype} and {channels} are wanted; set data.options.channels={own}")


def _converted(array: Array, dtype: torch.dtype | None, *, narrow: bool) -> Array:
    """ValueError: the conversion would lose bits."""
    own, wanted = array.dtype, np.dtype(own_name(dtype)) if dtype is not None else array.dtype
    if own == wanted:
        return array
    if own.kind == wanted.kind == "f":
        return array.astype(wanted)
    if (own, wanted) == (np.uint8, np.uint16):
        return array.astype(np.uint16) * np.uint16(257)
    if (own, wanted) == (np.uint16, np.uint8) and narrow:
        return (array >> 8).astype(np.uint8)
    if (own, wanted) == (np.uint16, np.int16) and int(array.max(initial=0)) <= 32767:
        return array.astype(np.int16)
    raise ValueError(
        f"its pixels are {own} and those of the others {wanted}, and they do not become these without loss; save all files "
        f"with one dtype, or set data.options.dtype={'uint16' if own == np.uint16 and wanted == np.uint8 else own}"
    )


def own_name(dtype: torch.dtype) -> str:
    """The name of a dtype in NumPy's words."""
    return str(dtype).removeprefix("torch.")


def tensor_of(image: Image.Image) -> Tensor:
    """A PIL image as (1, H, W) where it is grey, else (3, H, W); uint8, uint16, int16 or float32.

    ValueError: integers that do not fit 16 bits.
    """
    pixels = pixels_of(image)
    return torch.from_numpy(np.ascontiguousarray(_with_channels(pixels, 1 if pixels.colours in ("L", "LA") else 3)))


def write_image(pixels_CHW: Tensor, path: Path) -> None:
    """Save (C, H, W) uint8, with C 1 or 3, in the format of the path's suffix."""
    array = pixels_CHW.permute(1, 2, 0).cpu().numpy()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(path)


def write_labels(labels_HW: Tensor, path: Path) -> None:
    """Save class numbers as a PNG whose pixel values are these numbers, with a palette of the classes' colours.

    Where a number is above 255, the PNG is grey with 16 bits.  Negative numbers wrap around, as -1 to 255.
    """
    if int(labels_HW.max()) > 255:
        wide = labels_HW.cpu().numpy().astype(np.uint16)
        Image.fromarray(wide).save(path, "PNG")
        return
    image = Image.fromarray(labels_HW.to(torch.uint8).cpu().numpy())
    image.putpalette([value for colour in colours(256) for value in colour])
    image.save(path, "PNG")


def colours(count: int) -> list[tuple[int, int, int]]:
    """(red, green, blue) of classes 0 to count - 1: dark, ten distinct colours, then hues a golden section apart."""
    further = [_bright(number * 0.618034 % 1) for number in range(max(0, count - len(_COLOURS)))]
    return [*_COLOURS, *further][:count]


def _bright(hue: float) -> tuple[int, int, int]:
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.6, 0.95))
    return red, green, blue


_COLOURS = [
    (38, 42, 46), (86, 146, 214), (255, 145, 30), (239, 83, 96), (64, 196, 190), (98, 187, 70),
    (250, 214, 55), (186, 104, 200), (255, 163, 190), (176, 121, 84), (198, 198, 198),
]  # fmt: skip
