"""Labels and probabilities as NIfTI: the header of their image, so that they lie on it in every viewer."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.interval import Interval
from widefield.image_files.band_image import BandImage, ReadBand
from widefield.image_files.label_image import LabelImage, ReadLabels

LABEL_SUFFIX, BAND_SUFFIX = ".nii.gz", ".nii"
LEVEL = 4
"""Of the compression: labels compress well, and higher levels take several times as long for little."""


def write_labels(path: Path, labels: LabelImage, read: ReadLabels) -> None:
    """A volume (x, y, z) of whole numbers, slice by slice.  Names of classes have no place in the format."""
    header = _header(labels, _shape(labels))
    header["intent_code"], header["intent_name"] = 1002, b"labels"  # NIFTI_INTENT_LABEL
    with path.open("wb") as plain, gzip.GzipFile(fileobj=plain, mode="wb", filename="", compresslevel=LEVEL, mtime=0) as file:
        file.write(_start(header))
        rows, columns = (Interval(0, extent) for extent in labels.size[-2:])
        for at in range(labels.size[0] if len(labels.size) == 3 else 1):
            first = [Interval(at, at + 1)] if len(labels.size) == 3 else []
            found = read((*first, rows, columns))
            file.write(np.ascontiguousarray(found, dtype=np.dtype(labels.dtype).newbyteorder("<")).tobytes())


def write_bands(path: Path, bands: BandImage, read: ReadBand) -> None:
    """(x, y, z, class), not compressed, so that windows can be read.  Names of classes have no place in the format."""
    header = _header(bands, (*_shape(bands), len(bands.names)))
    header.set_slope_inter(bands.scale, 0)
    rows, columns = (Interval(0, extent) for extent in bands.size[-2:])
    with path.open("wb") as file:
        file.write(_start(header))
        for number in range(len(bands.names)):
            for at in range(bands.size[0] if len(bands.size) == 3 else 1):
                first = [Interval(at, at + 1)] if len(bands.size) == 3 else []
                found = read(number, (*first, rows, columns))
                file.write(np.ascontiguousarray(found, dtype=np.dtype(bands.dtype).newbyteorder("<")).tobytes())


def _start(header: Any) -> bytes:
    """What a file has before its pixels."""
    start = header.binaryblock + bytes(4)  # no extension
    return start + bytes(int(header["vox_offset"]) - len(start))


def _header(labels: LabelImage | BandImage, shape: tuple[int, ...]) -> Any:
    """That of the image where it is NIfTI, else one with its affine."""
    import nibabel

    header = nibabel.Nifti1Header()
    if labels.like.format == "NIfTI":
        theirs = nibabel.load(labels.source).header
        kind = nibabel.Nifti2Header if isinstance(theirs, nibabel.Nifti2Header) else nibabel.Nifti1Header
        header = kind.from_header(theirs).as_byteswapped("<")
    else:
        header.set_xyzt_units("mm")
    header.set_data_dtype(labels.dtype)
    header.set_data_shape(shape)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    if labels.like.format != "NIfTI" and labels.like.affine:
        matrix = np.array(labels.like.affine)[:, [2, 1, 0, 3]]
        header.set_sform(matrix, code="scanner")
        header.set_qform(matrix, code="scanner")
    header["magic"] = b"n+2\0\r\n\x1a\n" if isinstance(header, nibabel.Nifti2Header) else b"n+1"
    header["vox_offset"] = 544 if isinstance(header, nibabel.Nifti2Header) else 352
    header["intent_code"], header["intent_name"] = 0, b""
    return header


def _shape(labels: LabelImage | BandImage) -> tuple[int, ...]:
    """(x, y, z)."""
    size = labels.size if len(labels.size) == 3 else (1, *labels.size)
    return size[::-1]
