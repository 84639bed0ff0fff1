"""What a file of an image says of itself, without its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Affine = tuple[tuple[float, ...], ...]
MILLIMETRES = {
    "nm": 1e-6, "um": 1e-3, "mm": 1.0, "m": 1e3, "angstrom": 1e-7, "centimeter": 10.0, "kilometer": 1e6, "inch": 25.4,
    "foot": 304.8, "US survey foot": 1200e3 / 3937,
}  # fmt: skip
"""Of the units of length in which formats tell a spacing."""


@dataclass(frozen=True)
class Level:
    """An image at one resolution.

    size: the extents of the spatial dims, in the order of the image's axes.  block: of these dims, what is decoded at once.
    scale: pixels of level 0 per pixel of this one, on each dim; they need not be integers.
    """

    size: tuple[int, ...]
    block: tuple[int, ...]
    scale: tuple[float, ...]


@dataclass(frozen=True)
class ImageInfo:
    """The kind, size and place of an image.

    format: its name in the field.  reader: the library and its version, for libraries do not decode alike.
    axes: of the spatial dims, "YX" or "ZYX"; every array is (C, *axes).
    dtype: of the pixels as they are read, in NumPy's words and the machine's byte order.
    levels: the full resolution first.
    colours: what the channels are where the file says so: L, LA, RGB or RGBA.
    palette: where the pixels are numbers of colours, these: red, green and blue of 0 to 255, and alpha where some have it.
    spacing: the size of a pixel on each axis, in `unit`: "mm", "um", "m", "deg" or as the file says.
    affine: from the index of a pixel's centre, in the order of `axes`, to the world; rows of n + 1 numbers, and a last row
        (0, ..., 0, 1).  world: the names and directions of the world's axes, as "RAS", or the coordinate system as WKT.
    nodata: the number of pixels that hold nothing, per channel; None: every pixel of it counts.  Empty: of no channel.
    compression: as the file names it; "" for none.
    by_window: whether a window costs about its own bytes.  advice: if not, why, and what to do.
    """

    format: str
    reader: str
    axes: str
    channels: int
    dtype: str
    levels: tuple[Level, ...]
    colours: str = ""
    palette: tuple[tuple[int, ...], ...] = ()
    channel_names: tuple[str, ...] = ()
    spacing: tuple[float, ...] = ()
    unit: str = ""
    affine: Affine = ()
    world: str = ""
    nodata: tuple[float | None, ...] = ()
    compression: str = ""
    by_window: bool = True
    advice: str = ""

    @property
    def size(self) -> tuple[int, ...]:
        """The extents of the spatial dims at full resolution."""
        return self.levels[0].size

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, *size) at full resolution."""
        return (self.channels, *self.size)


def spacing_in_mm(info: ImageInfo) -> tuple[float, ...]:
    """The size of a pixel on each axis, in millimetres; () where the file tells none.

    ValueError: the file tells one, but not in a unit of length.

    >>> from dataclasses import replace
    >>> zarr = ImageInfo("Zarr", "", "ZYX", 1, "uint8", one_level((2, 3, 4)), spacing=(2.0, 0.5, 0.5), unit="um")
    >>> spacing_in_mm(zarr)
    (0.002, 0.0005, 0.0005)
    >>> spacing_in_mm(replace(zarr, unit=""))
    Traceback (most recent call last):
    ValueError: its spacing of 2 x 0.5 x 0.5 is in no unit, and lengths in mm are wanted; save it with a unit of length
    """
    if not info.spacing:
        return ()
    if info.unit not in MILLIMETRES:
        lengths = " x ".join(f"{length:g}" for length in info.spacing)
        raise ValueError(
            f"its spacing of {lengths} is in {info.unit or 'no unit'}, and lengths in mm are wanted; save it with a unit of "
            "length"
        )
    return tuple(length * MILLIMETRES[info.unit] for length in info.spacing)


def one_level(size: Sequence[int], block: Sequence[int] | None = None) -> tuple[Level, ...]:
    """The levels of an image without smaller ones.  block: None where all of it is decoded at once.

    >>> one_level((4, 6)), one_level((4, 6), (1, 6))[0].block
    ((Level(size=(4, 6), block=(4, 6), scale=(1.0, 1.0)),), (1, 6))
    """
    size = tuple(int(extent) for extent in size)
    return (Level(size, size if block is None else tuple(int(extent) for extent in block), (1.0,) * len(size)),)


def spacing_of(affine: Affine) -> tuple[float, ...]:
    """The size of a pixel on each axis, from the affine: the lengths of its columns.

    >>> spacing_of(((0.0, 2.0, 5.0), (3.0, 0.0, 7.0), (0.0, 0.0, 1.0)))
    (3.0, 2.0)
    """
    dims = len(affine) - 1
    return tuple(sum(affine[row][column] ** 2 for row in range(dims)) ** 0.5 for column in range(dims))
