"""DICOM: a file of one or more frames, or a folder of the files of one series.

One frame is (C, Y, X); several are a volume, (C, Z, Y, X), in the order of their places along the normal of the slices, never
of names or numbers.  They must have one series, one size, one direction, and even distances; otherwise they are refused, with
the names of the files.  The affine leads to RAS.  Only the slices of a window are read.

A slope and an intercept, which each slice may have for itself, make pixels float32, or float64 where stored pixels have 32 bits
or more; without any, pixels have the stored dtype.  Windows for display are not applied, and MONOCHROME1, where large is dark,
is given as it is stored, with advice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box, size_of
from widefield.image_files.dicom_header import FrameKind, other_decoders, read_header
from widefield.image_files.dicom_slices import Slice, affine_of, in_order
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, one_level, spacing_of
from widefield.image_files.stored_array import rescaled, rescaled_dtype

NAME = "DICOM"
SUFFIXES = (".dcm", ".dicom")
EXTRA = "medical"
PRIORITY = 0
MAGIC = b"DICM"


def claims(path: Path, start: bytes) -> bool:
    if not path.is_dir():
        return start[128:132] == MAGIC
    some = itertools.islice((one for one in sorted(path.iterdir()) if one.is_file()), 8)
    return any(_start(one)[128:132] == MAGIC for one in some)


def open_image(path: Path) -> ImageFile:
    slices, kind = _series(path)
    image = DicomFile(path, _info(slices, kind))
    image.slices = tuple(slices)
    return image


class DicomFile(ImageFile):
    """Its handle is the slices, in order; files are opened for each read.  A pickle has none, for there may be many."""

    slices: tuple[Slice, ...] | None = None

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        return _info(*_series(path))

    def open_handle(self) -> tuple[Slice, ...]:
        if self.slices is None:
            self.slices = tuple(_series(self.path)[0])
        return self.slices

    def close_handle(self, handle: tuple[Slice, ...]) -> None:
        """Nothing stays open."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "slices": None}

    def read_box(self, handle: tuple[Slice, ...], box: Box, level: int) -> Array:
        found = np.empty((self.info.channels, *size_of(box)), dtype=self.info.dtype)
        volume = found if len(box) == 3 else found[:, None]
        wanted = [handle[z] for z in box[0]] if len(box) == 3 else list(handle)
        rows, columns = (slice(one.start, one.stop) for one in box[-2:])
        for number, (one, frame) in enumerate(zip(wanted, _frames(wanted), strict=True)):
            part = frame[rows, columns]
            if (one.slope, one.intercept) != (1.0, 0.0):
                part = rescaled(part, one.slope, one.intercept, found.dtype)
            volume[:, number] = np.moveaxis(part, -1, 0) if part.ndim == 3 else part
        return found


def _frames(slices: list[Slice]) -> Iterator[Array]:
    """The stored pixels of each slice: (Y, X) or (Y, X, 3)."""
    from pydicom.pixels import iter_pixels

    for file, group in itertools.groupby(slices, key=lambda one: one.file):
        try:
            yield from iter_pixels(file, indices=[one.frame for one in group])
        except Exception as error:  # on damaged files libraries raise many types
            raise ValueError(f"{file.name}: {error}{other_decoders(file)}") from None


# ---------------------------------------------------------------------------------------------- a series


def _info(slices: list[Slice], kind: FrameKind) -> ImageInfo:
    import pydicom

    stored = np.dtype(kind.dtype)
    frame, advice = (kind.rows, kind.columns), []
    size = frame if len(slices) == 1 else (len(slices), *frame)
    if len(slices) == 1:
        mib = kind.rows * kind.columns * kind.samples * stored.itemsize >> 20
        advice.append(f"one frame of {mib} MiB, decoded whole for each window; save it as a TIFF with tiles")
    if kind.colours == "MONOCHROME1":
        advice.append("large numbers are dark in it (MONOCHROME1), unlike in most images; see that all are of one kind")
    dtype = stored if all((one.slope, one.intercept) == (1.0, 0.0) for one in slices) else rescaled_dtype(stored)
    padding = {one.padding for one in slices}
    affine = affine_of(slices) if len(slices) > 1 else ()
    spacing = spacing_of(affine) if affine else slices[0].spacing
    return ImageInfo(
        format="DICOM", reader=f"pydicom {pydicom.__version__}", axes="ZYX"[-len(size) :], channels=kind.samples,
        dtype=dtype.name, levels=one_level(size, (1, *frame)[-len(size) :]),
        colours="RGB" if kind.samples == 3 else "", spacing=spacing, unit="mm" if spacing else "", affine=affine,
        world="RAS" if affine else "", nodata=_nodata(padding, kind, dtype), compression=_syntax_name(kind.syntax),
        by_window=len(slices) > 1, advice="; ".join(advice),
    )  # fmt: skip


def _nodata(padding: set[float | None], kind: FrameKind, dtype: np.dtype[Any]) -> tuple[float | None, ...]:
    """Per channel, as it is read; of no channel where slices differ in it, or are of colours."""
    if len(padding) != 1 or None in padding or kind.samples != 1:
        return ()
    number = next(iter(padding))
    return (float(dtype.type(number)) if dtype.kind == "f" else number,)


def _syntax_name(syntax: str) -> str:
    from pydicom.uid import UID

    return str(UID(syntax).name) if UID(syntax).is_encapsulated else ""


def _series(path: Path) -> tuple[list[Slice], FrameKind]:
    """The slices in order, and what they share.  ValueError: they are no image, or not one."""
    slices: list[Slice] = []
    kinds: dict[FrameKind, Path] = {}
    for file in _files(path):
        found, kind = read_header(file)
        kinds.setdefault(kind, file)
        slices += found
    if len(kinds) > 1:
        (first, file), (other, other_file) = list(kinds.items())[:2]
        differing = [one.name for one in fields(FrameKind) if getattr(first, one.name) != getattr(other, one.name)]
        what = ", ".join(f"{name} {getattr(first, name)} and {getattr(other, name)}" for name in differing)
        raise ValueError(
            f"{file.name} and {other_file.name} differ ({what}), and {len(kinds)} kinds of files are in the folder; put each "
            "series into a folder of its own"
        )
    return in_order(slices), next(iter(kinds))


def _files(path: Path) -> list[Path]:
    """Those of DICOM in a folder, or the file.  ValueError: one has a name or start like DICOM's, and is none."""
    if not path.is_dir():
        return [path]
    found = []
    for one in sorted(path.iterdir()):
        if not one.is_file() or one.name.startswith(".") or one.name.upper() == "DICOMDIR":
            continue
        start = _start(one)
        if start[128:132] == MAGIC:
            found.append(one)
        elif (not start or b"\0" in start) and (one.suffix.lower() in ("", ".ima", *SUFFIXES) or one.suffix[1:].isdigit()):
            raise ValueError(f"{one.name} is no DICOM file (its bytes 128 to 132 are not DICM); copy it again, or remove it")
    if not found:
        raise ValueError("no file in it is DICOM; copy it again")
    return found


def _start(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(132)


# ---------------------------------------------------------------------------------------------- examples


def write_example(path: Path, pixels: Array) -> None:
    """A folder where the name has no suffix.  Words in the name say how: rle, big, implicit, planar, scaled."""
    words = path.name.split(".")[0].split("-")
    volume = pixels if pixels.ndim == 4 else pixels[:, None]
    if path.suffix:
        header = _example_header(volume, words)
        if volume.shape[1] > 1:
            _add_frame_groups(header, volume.shape[1])
        _save(header, path, volume, words)
        return
    path.mkdir()
    count = volume.shape[1]
    for z in range(count):
        header = _example_header(volume, words)
        header.ImagePositionPatient = [10.0, -20.0, 2.5 * z]
        header.InstanceNumber = count - z
        slope = 0.5 * (1 + z % 2)
        if "scaled" in words:
            header.RescaleSlope, header.RescaleIntercept = slope, -10 * slope
        _save(header, path / f"{(z * 7) % count:03d}", volume[:, z : z + 1], words, slope)


def _example_header(volume: Array, words: list[str]) -> Any:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    header, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID = ImplicitVRLittleEndian if "implicit" in words else ExplicitVRLittleEndian
    if "big" in words:
        meta.TransferSyntaxUID = ExplicitVRBigEndian
    header.file_meta = meta
    header.SOPClassUID, header.SOPInstanceUID, header.SeriesInstanceUID = CTImageStorage, "1.2.3.4", "1.2.3"
    header.Rows, header.Columns = volume.shape[2:]
    header.SamplesPerPixel = len(volume)
    header.PhotometricInterpretation = "RGB" if len(volume) == 3 else "MONOCHROME2"
    stored = np.dtype("uint16") if "scaled" in words else volume.dtype
    header.BitsAllocated = header.BitsStored = 8 * stored.itemsize
    header.HighBit, header.PixelRepresentation = header.BitsAllocated - 1, int(stored.kind == "i")
    if len(volume) == 3:
        header.PlanarConfiguration = int("planar" in words)
    header.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    header.PixelSpacing = [0.75, 0.5]
    return header


def _add_frame_groups(header: Any, count: int) -> None:
    """The places of the frames, the last first."""
    from pydicom.dataset import Dataset

    header.NumberOfFrames = count
    groups = []
    for z in range(count):
        position, group = Dataset(), Dataset()
        position.ImagePositionPatient = [10.0, -20.0, 2.5 * (count - 1 - z)]
        group.PlanePositionSequence = [position]
        groups.append(group)
    header.PerFrameFunctionalGroupsSequence = groups


def _save(header: Any, path: Path, volume: Array, words: list[str], slope: float = 1.0) -> None:
    """volume: (C, Z, Y, X); of several z, the last is written first."""
    from pydicom.uid import RLELossless

    stored = (volume / slope + 10).astype(np.uint16) if "scaled" in words else volume
    frames = stored.swapaxes(0, 1)[::-1]
    frames = frames if "planar" in words else np.moveaxis(frames, 1, -1)
    header.PixelData = frames.astype(frames.dtype.newbyteorder(">" if "big" in words else "<")).tobytes()
    header["PixelData"].VR = "OW" if stored.itemsize > 1 else "OB"
    if len(header.PixelData) % 2:
        header.PixelData += b"\0"
    if "rle" in words:
        header.compress(RLELossless, generate_instance_uid=False)
    header.save_as(path, enforce_file_format=True)


CASES = [
    ("series", (1, 5, 21, 30), "int16"),
    ("series-rle", (1, 4, 21, 30), "uint16"),
    ("series-scaled", (1, 5, 21, 30), "float32"),
    ("frames.dcm", (1, 9, 21, 30), "uint8"),
    ("frames-rle.dcm", (1, 5, 21, 31), "int16"),
    ("slice-big.dcm", (1, 37, 50), "uint16"),
    ("slice-implicit.dcm", (1, 37, 51), "uint8"),
    ("colours-planar.dcm", (3, 37, 50), "uint8"),
    ("colours-rle.dcm", (3, 37, 51), "uint8"),
]
"""A file's or a folder's name, the (C, *axes) that `write_example` gets, and their dtype."""
