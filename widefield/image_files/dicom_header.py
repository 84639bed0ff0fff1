"""The header of a file of DICOM: its frames, where each is, and whether its pixels are there and can be decoded."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from widefield.image_files.dicom_slices import Slice

SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
INSTALL = {
    "1.2.840.10008.1.2.4.51": "python-gdcm", "1.2.840.10008.1.2.4.57": "python-gdcm", "1.2.840.10008.1.2.4.70": "python-gdcm",
    "1.2.840.10008.1.2.4.80": "pyjpegls", "1.2.840.10008.1.2.4.81": "pyjpegls",
    "1.2.840.10008.1.2.4.90": "pylibjpeg pylibjpeg-openjpeg", "1.2.840.10008.1.2.4.91": "pylibjpeg pylibjpeg-openjpeg",
    "1.2.840.10008.1.2.4.201": "pylibjpeg pylibjpeg-openjpeg", "1.2.840.10008.1.2.4.202": "pylibjpeg pylibjpeg-openjpeg",
    "1.2.840.10008.1.2.4.203": "pylibjpeg pylibjpeg-openjpeg",
}  # fmt: skip
"""By transfer syntax: packages that decode it.  pydicom also names pylibjpeg-libjpeg, which is under the GPL: not here."""

HEADER = (
    "SOPClassUID", "SeriesInstanceUID", "ImageType", "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "BitsAllocated",
    "PhotometricInterpretation", "PixelRepresentation", "BitsStored", "PixelPaddingValue", "PixelPaddingRangeLimit",
    "ModalityLUTSequence", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "ImagerPixelSpacing",
    "RescaleSlope", "RescaleIntercept", "DoseGridScaling", "GridFrameOffsetVector", "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
)  # fmt: skip


@dataclass(frozen=True)
class FrameKind:
    """What all files of a series share."""

    series: str
    rows: int
    columns: int
    samples: int
    dtype: str
    colours: str
    syntax: str = field(compare=False)


def read_header(path: Path) -> tuple[list[Slice], FrameKind]:
    """The slices of a file, one per frame.  ValueError, with the file's name: it is no image that can be read."""
    import pydicom

    try:
        with path.open("rb") as file:
            header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=list(HEADER))
            _refuse(header)
            syntax = str(header.file_meta.TransferSyntaxUID)
            dtype = _check_pixels(file, header, syntax)
        _check_codec(header, syntax)
        kind = FrameKind(
            str(header.get("SeriesInstanceUID", "")), int(header.Rows), int(header.Columns), int(header.SamplesPerPixel), dtype,
            str(header.PhotometricInterpretation), syntax,
        )  # fmt: skip
        return [_slice(path, header, frame) for frame in range(_frame_count(header))], kind
    except Exception as error:  # on damaged files libraries raise many types
        raise ValueError(f"{path.name}: {error}") from None


def other_decoders(path: Path) -> str:
    """The end of a sentence on pixels that could not be decoded: which packages decode more of them, "" for none."""
    from pydicom.filereader import read_file_meta_info

    install = INSTALL.get(str(read_file_meta_info(path).get("TransferSyntaxUID"))) if path.is_file() else None
    return f"; others may decode it: pip install {install}" if install else ""


def _frame_count(header: Any) -> int:
    return int(header.get("NumberOfFrames") or 1)


def _refuse(header: Any) -> None:
    """ValueError: what it holds is no image of pixels that stand for themselves, one after the other."""
    if "Rows" not in header:
        raise ValueError("it has no pixels, as a report or a plan has none; remove it")
    if "TransferSyntaxUID" not in header.file_meta:
        raise ValueError("it does not say how its pixels are stored (transfer syntax); save it again")
    if header.file_meta.TransferSyntaxUID.is_deflated:
        raise ValueError("it is deflated as a whole, so that no part can be read; save it uncompressed")
    if header.get("SOPClassUID") == SLIDE:
        raise ValueError("it is a slide of many tiles; pip install 'widefield[slides]' and open it as a slide")
    if "MOSAIC" in (header.get("ImageType") or ()):
        raise ValueError(
            "its slices lie side by side in one picture (Siemens mosaic); convert the series to NIfTI with dcm2niix"
        )
    if header.get("PhotometricInterpretation") == "PALETTE COLOR":
        raise ValueError("its pixels are places in a table of colours (PALETTE COLOR); convert it to RGB")
    if header.get("ModalityLUTSequence"):
        raise ValueError("a table gives the meaning of its pixels (Modality LUT); apply it, and save the result")


def _slice(path: Path, header: Any, frame: int) -> Slice:
    spacing = _value(header, frame, "PixelMeasuresSequence", "PixelSpacing") or header.get("ImagerPixelSpacing")
    slope = _value(header, frame, "PixelValueTransformationSequence", "RescaleSlope")
    intercept = _value(header, frame, "PixelValueTransformationSequence", "RescaleIntercept")
    slope = header.get("DoseGridScaling") if slope is None else slope
    if slope is not None and not float(slope):
        raise ValueError("its RescaleSlope is 0, so that all pixels would be the same; correct it")
    slope, intercept = 1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept)
    padding = None if "PixelPaddingRangeLimit" in header else header.get("PixelPaddingValue")
    directions = _numbers(_value(header, frame, "PlaneOrientationSequence", "ImageOrientationPatient"), 6)
    return Slice(
        path, frame, _position(header, frame, directions), directions, _numbers(spacing, 2),
        slope, intercept, None if padding is None else float(padding) * slope + intercept,
    )  # fmt: skip


def _position(header: Any, frame: int, directions: tuple[float, ...]) -> tuple[float, ...]:
    """Of a frame.  A dose has one position, and the distances of its frames from there along their normal."""
    position = _numbers(_value(header, frame, "PlanePositionSequence", "ImagePositionPatient"), 3)
    distances = header.get("GridFrameOffsetVector")
    if not distances or not position or not directions:
        return position
    if float(distances[0]):
        raise ValueError(
            "the distances of its frames (GridFrameOffsetVector) do not begin at 0; save it with those from the first"
        )
    normal = np.cross(directions[:3], directions[3:])
    return tuple(float(number) for number in np.array(position) + float(distances[frame]) * normal)


def _value(header: Any, frame: int, group: str, keyword: str) -> Any:
    """Of a frame: what its own groups say, those of all frames, or the file.  None: nothing does."""
    own, shared = header.get("PerFrameFunctionalGroupsSequence"), header.get("SharedFunctionalGroupsSequence")
    for groups in ([own[frame]] if own else []) + ([shared[0]] if shared else []):
        found = groups.get(group)
        if found and found[0].get(keyword) is not None:
            return found[0].get(keyword)
    return header.get(keyword)


def _numbers(given: Any, count: int) -> tuple[float, ...]:
    """() where nothing is given.  ValueError: not so many finite numbers."""
    if not given:
        return ()
    found = tuple(float(number) for number in given)
    if len(found) != count or not np.isfinite(found).all():
        raise ValueError(f"{found} are to be {count} numbers; correct its position, orientation or spacing")
    return found


def _check_codec(header: Any, syntax: str) -> None:
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    decoder = get_decoder(syntax)
    only_8_bits = syntax == "1.2.840.10008.1.2.4.51" and header.BitsStored != 8 and decoder.available_plugins == ("pillow",)
    if not decoder.is_available or only_8_bits:
        install = INSTALL.get(syntax, "pylibjpeg")
        raise ValueError(f"its pixels are {UID(syntax).name}, which nothing here decodes; pip install {install}")


def _check_pixels(file: BinaryIO, header: Any, syntax: str) -> str:
    """The dtype of the stored pixels, whose tag is next in the file.  ValueError: they are not all there."""
    from pydicom.uid import UID

    order = "<" if UID(syntax).is_little_endian else ">"
    group, element = struct.unpack(f"{order}HH", _exactly(file, 4))
    kinds = {0x0008: "float", 0x0009: "float", 0x0010: "int" if header.get("PixelRepresentation") else "uint"}
    if group != 0x7FE0 or element not in kinds:
        raise ValueError("its header is not followed by pixels; copy it again")
    length = struct.unpack(f"{order}I", _exactly(file, 4 if UID(syntax).is_implicit_VR else 8)[-4:])[0]
    frames = _frame_count(header)
    if UID(syntax).is_encapsulated:
        there, wanted, what = _count_fragments(file), frames, "frames"
    else:
        bits = header.Rows * header.Columns * header.SamplesPerPixel * header.BitsAllocated * frames
        wanted = -(-bits // (12 if header.PhotometricInterpretation == "YBR_FULL_422" else 8))  # 422: 2 of 3 bytes are stored
        here = file.tell()
        there, what = min(length, file.seek(0, 2) - here), "bytes"
    if there < wanted:
        raise ValueError(f"it has {there} {what} of pixels, and its header says {wanted}; copy it again")
    described = header.get("PerFrameFunctionalGroupsSequence") or header.get("GridFrameOffsetVector")
    if described is not None and len(described) != frames:
        raise ValueError(f"it has {frames} frames, and says the places of {len(described)}; save it again")
    return np.dtype(f"{kinds[element]}{max(8, header.BitsAllocated)}").name


def _count_fragments(file: BinaryIO) -> int:
    """Those of compressed pixels, at least one per frame; reads lengths alone.  ValueError: they do not end as they should."""
    for count in itertools.count(-1):  # the first is a table
        tag, length = struct.unpack("<II", _exactly(file, 8))
        if tag == 0xE0DDFFFE:
            return count
        if tag != 0xE000FFFE:
            raise ValueError("its compressed pixels are damaged; copy it again")
        file.seek(length, 1)
    return 0


def _exactly(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) != count:
        raise ValueError("it ends before its pixels do; copy it again")
    return found
