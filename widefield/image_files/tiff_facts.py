"""What a TIFF says of its pixels beside their number: colours, names of channels, the size of a pixel, the codec.

Every program has words of its own for the size of a pixel: OME-XML, ImageJ's and Aperio's texts, or the tags of TIFF 6.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from widefield.image_files.tiff_pages import JPEGS

WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, INKS, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
"""Of tag 262."""
_NAMES = {INKS: ("cyan", "magenta", "yellow", "black"), YCBCR: ("Y", "Cb", "Cr"), LAB: ("L*", "a*", "b*")}
_ALPHA = ((1,), (2,))
"""Of tag 338: the one extra sample is alpha, with which the colours are multiplied or not."""
_MICROMETRES = {"nm": 1e-3, "um": 1.0, "µm": 1.0, "μm": 1.0, "\\u00b5m": 1.0, "micron": 1.0, "microns": 1.0, "micrometer": 1.0,
                "mm": 1e3, "cm": 1e4, "inch": 25400.0, "m": 1e6, "Å": 1e-4}  # fmt: skip
_UNITS = {2: "inch", 3: "cm", 4: "mm", 5: "um"}
"""Of tag 296."""
SCREENS = (72.0, 96.0)
"""Pixels per inch that programs write who know of no size."""
MOST_PLANES = 10**7
"""OME-XML that claims more is damaged; tifffile would make a list of them."""
_BUILT_IN = (1, 8, 32773, 32946, 34925, 50013)
"""Compressions that tifffile decodes without imagecodecs: none, deflate, PackBits and LZMA."""


@dataclass(frozen=True)
class Ome:
    """Of the first image of OME-XML.  spacing: in um, by axis.  names: of the channels."""

    spacing: Mapping[str, float]
    names: tuple[str, ...]


def ome_of(xml: str) -> Ome:
    """ValueError: it claims more planes than a file has."""
    root = ElementTree.fromstring(xml)
    pixels = [element for element in root.iter() if _tag(element) == "Pixels"]
    for one in pixels:
        sizes = [int(one.attrib.get(f"Size{axis}", 1)) for axis in "CZT"]
        planes = [int(data.attrib.get("PlaneCount", 1)) for data in one if _tag(data) == "TiffData"]
        if not all(0 < claimed <= MOST_PLANES for claimed in (math.prod(sizes), sum(planes, start=1))):
            raise ValueError(f"its OME-XML claims {' x '.join(map(str, sizes))} planes (C x Z x T): it is damaged")
    if not pixels:
        return Ome({}, ())
    spacing = {}
    for axis in "XYZ":
        number, unit = pixels[0].attrib.get(f"PhysicalSize{axis}"), pixels[0].attrib.get(f"PhysicalSize{axis}Unit", "um")
        if number and unit in _MICROMETRES and float(number) > 0:
            spacing[axis] = float(number) * _MICROMETRES[unit]
    names = tuple(one.attrib.get("Name", "") for one in pixels[0] if _tag(one) == "Channel")
    return Ome(spacing, names)


def _tag(element: Any) -> str:
    return element.tag.rpartition("}")[2]


def spacing_by_axis(file: Any, page: Any, ome: Ome | None) -> dict[str, float]:
    """In um, of the axes of which it is known.  page: the first one."""
    if ome is not None and ome.spacing:
        return dict(ome.spacing)
    if file.is_imagej and file.imagej_metadata:
        return _imagej(page, file.imagej_metadata)
    if found := re.search(r"\bMPP\s*=\s*([0-9.]+)", str(page.description or "")):  # Aperio's and its likes'
        return dict.fromkeys("XY", float(found[1])) if float(found[1]) > 0 else {}
    unit = _UNITS.get(page.tags.valueof(296, default=2))
    per_unit = _resolution(page)
    if unit is None or not per_unit or (unit == "inch" and set(per_unit.values()) <= set(SCREENS)):
        return {}
    return {axis: _MICROMETRES[unit] / number for axis, number in per_unit.items()}


def _imagej(page: Any, said: Mapping[str, Any]) -> dict[str, float]:
    size = _MICROMETRES.get(str(said.get("unit", "")).lower())
    if size is None:
        return {}
    found = {axis: size / number for axis, number in _resolution(page).items()}
    between = said.get("spacing", 0)
    return {**found, "Z": between * size} if isinstance(between, int | float) and between > 0 else found


def _resolution(page: Any) -> dict[str, float]:
    """Pixels per unit, of X and Y; {} where a tag is missing or says nothing."""
    found = {}
    for axis, code in (("X", 282), ("Y", 283)):
        pair = page.tags.valueof(code)
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(pair):
            return {}
        found[axis] = pair[0] / pair[1]
    return found


def colours_of(page: Any, channels: int) -> str:
    """L, LA, RGB or RGBA; "" where the file says something else or nothing."""
    if channels != page.samplesperpixel:
        return ""
    alpha = tuple(page.extrasamples) in _ALPHA
    kind = int(page.photometric)
    if kind in (WHITE_IS_ZERO, BLACK_IS_ZERO):
        return {(1, False): "L", (2, True): "LA"}.get((channels, alpha), "")
    if kind == RGB or (kind == YCBCR and page.compression in JPEGS):  # the codec gives RGB
        return {(3, False): "RGB", (4, True): "RGBA"}.get((channels, alpha), "")
    return ""


def channel_names(page: Any, channels: int, ome: Ome | None) -> tuple[str, ...]:
    """As many as there are channels, or none."""
    if int(page.photometric) == PALETTE and channels == 1:
        return ("palette",)
    names = ome.names if ome is not None else ()
    if not any(names) and not colours_of(page, channels):
        names = _NAMES.get(int(page.photometric), ())
    return names if len(names) == channels and any(names) else ()


def palette_of(page: Any) -> tuple[tuple[int, ...], ...]:
    """(red, green, blue) of 0 to 255 by class number; () where there is none, or one of more than 256."""
    colormap = getattr(page, "colormap", None)
    if int(page.photometric) != PALETTE or colormap is None or colormap.ndim != 2 or colormap.shape[1] > 256:
        return ()
    shift = 8 if colormap.max(initial=0) > 255 else 0  # 16 bits by TIFF 6.0; some programs write 8
    return tuple(map(tuple, (colormap >> shift).T.tolist()))


def compression_of(page: Any) -> str:
    """The name of tag 259; "" for none."""
    return "" if page.compression == 1 else getattr(page.compression, "name", str(page.compression)).lower()


def require_codec(page: Any) -> None:
    """ValueError: only imagecodecs decodes it, and it is not installed."""
    try:
        import imagecodecs  # noqa: F401
    except ModuleNotFoundError:
        if int(page.compression) not in _BUILT_IN or page.bitspersample not in (1, 8, 16, 32, 64) or int(page.predictor) == 3:
            codec = compression_of(page) or f"pixels of {page.bitspersample} bits"
            raise ValueError(f"{codec} needs imagecodecs; pip install 'widefield[tiff]'") from None
