"""NIfTI-1 and -2: .nii, .nii.gz, and pairs of .hdr and .img; always volumes, (C, Z, Y, X).

A file stores x fastest, then y, z and a fourth dim, which is the channels here, be it time or another; so an array is the one
that nibabel gives with its dims in the reverse order, and the affine has its columns so.  A file of x and y alone has one z.
Files with more than 1 in two dims above the third are refused.  RGB24 and RGBA32 are 3 and 4 channels.

The world is RAS, in mm, by the sform where its code is not 0, or else by the qform; where both are 0 there is no affine, and
the spacing is the header's.  A slope and an intercept make pixels float32, or float64 where stored pixels have 32 bits or more
(nibabel: always float64); without them pixels have the stored dtype.

A .nii.gz can be read from its start alone.  Each process unpacks it once, at its first read, to a temporary file without a
name, which is gone when the image is closed or the process ends.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box, size_of
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import Affine, ImageInfo, one_level, spacing_of
from widefield.image_files.stored_array import check_numbers, rescaled, rescaled_dtype

NAME = "NIfTI"
SUFFIXES = (".nii", ".nii.gz")
EXTRA = "medical"
PRIORITY = 0
GZIP = b"\x1f\x8b"
MOST_DEFLATED = 1032
"""Bytes that one byte of deflate can hold."""
PIECE = 1 << 20
MILLIMETRES = {"meter": 1000.0, "mm": 1.0, "micron": 0.001, "unknown": 1.0}


def claims(path: Path, start: bytes) -> bool:
    if start.startswith(GZIP):
        try:
            start = zlib.decompressobj(31).decompress(start, 544)
        except zlib.error:
            return False
    elif path.suffix == ".img" and (header := path.with_suffix(".hdr")).is_file():
        with header.open("rb") as file:
            start = file.read(544)
    return _version(start) != 0


def open_image(path: Path) -> ImageFile:
    return NiftiFile(path, NiftiFile.read_info(path))


@dataclass(frozen=True)
class NiftiHeader:
    """What is needed of a header.

    data: the file of the pixels, which begin at byte `offset`.  packed: whether the file is a gzip.
    size: (C, Z, Y, X).  stored: the dtype in the file; colours are a field each.  slope, intercept: 1 and 0 for none.
    """

    data: Path
    packed: bool
    offset: int
    size: tuple[int, ...]
    stored: np.dtype[Any]
    slope: float
    intercept: float
    affine: Affine
    spacing: tuple[float, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the pixels as they are read."""
        if self.stored.names:
            return np.dtype("uint8")
        plain = self.stored.newbyteorder("=")
        return plain if (self.slope, self.intercept) == (1.0, 0.0) else rescaled_dtype(plain)

    @property
    def channels(self) -> int:
        return len(self.stored.names) if self.stored.names else self.size[0]

    @property
    def end(self) -> int:
        """The byte behind the last pixel."""
        return self.offset + math.prod(self.size) * self.stored.itemsize


class NiftiFile(ImageFile):
    """Its handle is the header, and the file of the pixels, unpacked."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        import nibabel

        header = _header(path)
        advice = ""
        if header.packed:
            advice = (
                f"compressed as one stream: the first read of each process unpacks its {header.end >> 20} MiB to "
                f"{tempfile.gettempdir()} (TMPDIR sets another folder); unpack it once, with gunzip"
            )
        return ImageInfo(
            format="NIfTI", reader=f"nibabel {nibabel.__version__}", axes="ZYX", channels=header.channels,
            dtype=header.dtype.name, levels=one_level(header.size[1:], (1, 1, header.size[-1])),
            colours={3: "RGB", 4: "RGBA"}[len(header.stored.names)] if header.stored.names else "",
            spacing=header.spacing, unit="mm", affine=header.affine, world="RAS" if header.affine else "",
            compression="gzip" if header.packed else "", by_window=not header.packed, advice=advice,
        )  # fmt: skip

    def open_handle(self) -> tuple[NiftiHeader, PixelBytes]:
        header = _header(self.path)
        return header, _unpacked(header) if header.packed else PixelBytes(header.data)

    def close_handle(self, handle: tuple[NiftiHeader, PixelBytes]) -> None:
        handle[1].close()

    def read_box(self, handle: tuple[NiftiHeader, PixelBytes], box: Box, level: int) -> Array:
        """Whole rows of x are read, and cut: those of a plane lie together."""
        header, file = handle
        planes, rows, columns = box
        found = np.empty((header.channels, *size_of(box)), dtype=header.dtype)
        for volume in range(header.size[0]):
            for number, z in enumerate(planes):
                plane = _rows(header, file, (volume * header.size[1] + z) * header.size[2] + rows.start, len(rows))
                part = plane[:, columns.start : columns.stop]
                if header.stored.names:
                    found[:, number] = np.moveaxis(part, 2, 0)
                elif found.dtype == header.stored.newbyteorder("="):
                    found[volume, number] = part
                else:
                    found[volume, number] = rescaled(part, header.slope, header.intercept, found.dtype)
        return found


class PixelBytes(io.FileIO):
    """A file that is closed with the last reference to it, for an image may be left open."""

    def __del__(self) -> None:
        self.close()

    def fill(self, data: bytearray, offset: int) -> int:
        """Read bytes from an offset on, until `data` is full or the file ends; how many there were."""
        self.seek(offset)
        got, part = 0, -1
        while part and got < len(data):
            part = self.readinto(memoryview(data)[got:])
            got += part
        return got


def _rows(header: NiftiHeader, file: PixelBytes, first: int, count: int) -> Array:
    """Rows of x, counted from the first of the file: (count, X), or (count, X, colours)."""
    width = header.size[-1]
    data = bytearray(count * width * header.stored.itemsize)
    got = file.fill(data, header.offset + first * width * header.stored.itemsize)
    if got != len(data):
        raise ValueError(f"it ends {len(data) - got} bytes before row {first + count}; copy it again")
    if header.stored.names:
        return np.frombuffer(data, dtype=np.uint8).reshape(count, width, -1)
    return np.frombuffer(data, dtype=header.stored).reshape(count, width)


# ---------------------------------------------------------------------------------------------- the header


def _version(start: bytes) -> int:
    """1 or 2; 0: these bytes begin no NIfTI."""
    if start[:4] in (b"\x5c\x01\0\0", b"\0\0\x01\x5c") and start[344:348] in (b"n+1\0", b"ni1\0"):
        return 1
    if start[:4] in (b"\x1c\x02\0\0", b"\0\0\x02\x1c") and start[4:8] in (b"n+2\0", b"ni2\0"):
        return 2
    return 0


def _header(path: Path) -> NiftiHeader:
    """ValueError: the pixels are not all there, or are none of an image."""
    import nibabel

    place = path.with_suffix(".hdr") if path.suffix == ".img" else path
    with place.open("rb") as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        start = (gzip.GzipFile(fileobj=file) if packed else file).read(540)
    version, pair = _version(start), start[345:346] == b"i" or start[4:6] == b"ni"
    classes = {1: nibabel.Nifti1Header, 2: nibabel.Nifti2Header}
    if pair:
        classes = {1: nibabel.nifti1.Nifti1PairHeader, 2: nibabel.nifti2.Nifti2PairHeader}
    raw = classes[version](start[: {1: 348, 2: 540}[version]])
    slope, intercept = raw.get_slope_inter()
    affine, spacing = _world(raw)
    header = NiftiHeader(
        data=path.with_suffix(".img") if pair else path, packed=packed, offset=int(raw["vox_offset"]),
        size=_size(raw.get_data_shape()), stored=raw.get_data_dtype(), slope=1.0 if slope is None else slope,
        intercept=intercept or 0.0, affine=affine, spacing=spacing,
    )  # fmt: skip
    _check(header)
    return header


def _check(header: NiftiHeader) -> None:
    if header.stored.names and header.size[0] != 1:
        raise ValueError(f"it has {header.size[0]} volumes of colours; save one file per volume")
    if not header.stored.names:
        check_numbers(header.stored, header.size)
    length = header.data.stat().st_size
    most = length * MOST_DEFLATED if header.packed else length
    if header.end > most or header.offset < 0:
        raise ValueError(
            f"its header says {' x '.join(map(str, header.size))} of {header.stored} from byte {header.offset} on, "
            f"{header.end} bytes in all, and {header.data.name} has {length}; copy it again"
        )


def _size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(C, Z, Y, X) of a stored (x, y, z, ...)."""
    if any(extent < 1 for extent in shape):
        raise ValueError(f"its shape is {shape}, which is no image; copy it again")
    x, y, z = (*shape, 1, 1)[:3]
    above = [extent for extent in shape[3:] if extent > 1]
    if len(above) > 1:
        raise ValueError(
            f"its shape {shape} has {len(above)} dims above the third; save one file of at most four dims for each"
        )
    return (*(above or [1]), z, y, x)


def _world(raw: Any) -> tuple[Affine, tuple[float, ...]]:
    """The affine from (z, y, x) to RAS in mm, and the spacing."""
    mm = MILLIMETRES.get(raw.get_xyzt_units()[0], 1.0)
    zooms = (*(abs(float(zoom)) for zoom in raw["pixdim"][1:4]),)
    spacing = tuple(zoom * mm for zoom in zooms[::-1])
    if not int(raw["sform_code"]) and not int(raw["qform_code"]):
        return (), spacing if all(math.isfinite(zoom) and zoom > 0 for zoom in spacing) else ()
    matrix = np.array(raw.get_best_affine(), dtype=np.float64)[:, [2, 1, 0, 3]]
    matrix[:3] *= mm
    if not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix[:3, :3]) < 3:
        raise ValueError(f"its affine {matrix.tolist()} is no place in the world; correct its sform or qform")
    affine = tuple(tuple(float(number) for number in row) for row in matrix)
    return affine, spacing_of(affine)


# ---------------------------------------------------------------------------------------------- .nii.gz


def _unpacked(header: NiftiHeader) -> PixelBytes:
    """A temporary file of the bytes up to the last pixel.  ValueError: there are fewer.  OSError: the disk is full."""
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if free < header.end:
        raise OSError(
            f"unpacked it has {header.end >> 20} MiB, and {place} has {free >> 20} free; set TMPDIR to another folder"
        )
    with tempfile.TemporaryFile() as file, gzip.open(header.data, "rb") as packed:
        left = header.end
        while left:
            piece = packed.read(min(PIECE, left))
            if not piece:
                raise ValueError(f"unpacked it ends {left} of {header.end} bytes early; copy it again")
            file.write(piece)
            left -= len(piece)
        packed.read(1)  # the check sum stands at the end, and is compared there
        file.flush()
        return PixelBytes(os.dup(file.fileno()), "rb")


# ---------------------------------------------------------------------------------------------- examples


def write_example(path: Path, pixels: Array) -> None:
    """The words in the file's name say how: big, scaled, second (NIfTI-2), rgb, pair."""
    import nibabel

    words = path.name.split(".")[0].split("-")
    stored = pixels.T if len(pixels) > 1 else pixels[0].T
    affine = np.diag([0.5, 0.75, 2.0, 1.0])
    if "rgb" in words:
        fields = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
        stored = np.ascontiguousarray(np.moveaxis(pixels, 0, -1)).view(fields)[..., 0].T
    kinds = {"second": nibabel.Nifti2Image, "pair": nibabel.Nifti1Pair}
    kind = kinds.get(words[0], nibabel.Nifti1Image)
    header = kind.header_class(endianness=">" if "big" in words else "<")
    if "scaled" in words:
        header.set_data_dtype(np.int16)
        stored = stored * 2 - 4
    else:
        header.set_data_dtype(stored.dtype)
    image = kind(stored.astype(np.int16) if "scaled" in words else stored, affine, header)
    if "scaled" in words:
        image.header.set_slope_inter(0.5, 2.0)
    nibabel.save(image, path)


CASES = [
    ("volume.nii", (1, 9, 21, 30), "int16"),
    ("packed.nii.gz", (1, 9, 21, 30), "uint8"),
    ("big-channels.nii", (3, 7, 12, 11), "uint16"),
    ("scaled.nii", (1, 9, 21, 30), "float32"),
    ("second.nii.gz", (2, 7, 12, 11), "float64"),
    ("rgb.nii", (3, 5, 12, 11), "uint8"),
    ("flat.nii", (1, 1, 37, 50), "float32"),
    ("pair.img", (1, 9, 21, 30), "int32"),
]
"""A file's name, the (C, *axes) that `write_example` gets, and their dtype."""
