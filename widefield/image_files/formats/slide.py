"""Slides whose tiles overlap, or that are no TIFF, by OpenSlide: MRXS, VMS, VMU, BIF, Trestle's, SCN, SVSLIDE, CZI and DICOM.

OpenSlide gives 8 bits of RGBA.  Where nothing was scanned a slide is transparent, and black if alpha is left out; here it has
the slide's own background colour, or white, and `valid` says where it is.  Sizes and places are those of the whole canvas.

OpenSlide takes places in pixels of level 0, in whole numbers, at every level.  Where a level's scale is no whole number, what
it reads is moved by a fraction of a pixel.  There windows are cut of blocks at fixed places, so that no pixel depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from widefield.geometry.box import Box, full_box, meet, within
from widefield.geometry.interval import Interval
from widefield.image_files.image_file import Array, ImageFile
from widefield.image_files.info import ImageInfo, Level
from widefield.image_files.tags import COMPRESSION, SOFTWARE, XMP, check_first_image, is_tiff, number_in, read_tags, text_in

NAME = "slide"
SUFFIXES = (".mrxs", ".vms", ".vmu", ".bif", ".scn", ".svslide", ".czi")
EXTRA = "slides"
PRIORITY = 20
APERIO_YCBCR = 33003
"""A compression whose colours tifffile leaves as they are stored."""
WHOLE_SLIDE_DICOM = b"1.2.840.10008.5.1.4.1.1.77.1.6"
"""DICOM PS3.4, B.5: VL Whole Slide Microscopy Image Storage."""
BLOCK = 512
"""Pixels on each side, of what is read at once; tiles have 240 to 1,024."""
CACHE_BYTES = 16 * 2**20
"""Of decoded tiles, for each open slide; OpenSlide takes twice as much if it is not told, for each slide and process."""
WHITE = (255, 255, 255)
MOST_TILE_PIXELS = 2**26


def claims(path: Path, start: bytes) -> bool:
    if start[128:132] == b"DICM":
        return WHOLE_SLIDE_DICOM in start
    if path.name.lower().endswith(SUFFIXES):
        return bool(start)
    if not is_tiff(start):
        return False
    values = read_tags(path, (COMPRESSION, SOFTWARE, XMP))
    is_trestle, is_ventana = text_in(values, SOFTWARE).startswith(b"MedScan"), b"iScan" in text_in(values, XMP)
    return is_trestle or is_ventana or number_in(values, COMPRESSION) == APERIO_YCBCR


def open_image(path: Path) -> ImageFile:
    return SlideFile(path, SlideFile.read_info(path))


class SlideFile(ImageFile):
    """Its handle is OpenSlide's."""

    @classmethod
    def read_info(cls, path: Path) -> ImageInfo:
        import openslide

        check_first_image(path)
        with _opened(path) as slide:
            said = slide.properties
            _check_tiles(said, slide.level_count)
            levels = tuple(
                Level((height, width), (min(BLOCK, height), min(BLOCK, width)), (float(scale), float(scale)))
                for (width, height), scale in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
            )
            spacing = tuple(_positive(said.get(f"openslide.mpp-{axis}", "")) for axis in "yx")
            return ImageInfo(
                format=said.get("openslide.vendor", NAME), reader=f"openslide {openslide.__library_version__}", axes="YX",
                channels=3, dtype="uint8", levels=levels, colours="RGB", spacing=spacing if all(spacing) else (),
                unit="um" if all(spacing) else "",
            )  # fmt: skip

    def open_handle(self) -> Any:
        return _opened(self.path)

    def read_box(self, handle: Any, box: Box, level: int) -> Array:
        pixels = np.empty((3, *(len(run) for run in box)), dtype=np.uint8)
        background = _background(handle)
        for part, rgba in self._parts(handle, box, level):
            pixels[:, *within(box, part)] = np.moveaxis(_on(background, rgba), -1, 0)
        return pixels

    def valid_box(self, handle: Any, box: Box, level: int, pixels: Array) -> Array:
        """Where the slide is not transparent."""
        found = np.empty(pixels.shape[1:], dtype=bool)
        for part, rgba in self._parts(handle, box, level):
            found[within(box, part)] = rgba[..., 3] > 0
        return found

    def _parts(self, slide: Any, box: Box, level: int) -> Any:
        """For each block that a box touches: the box of both, and its RGBA."""
        about = self.info.levels[level]
        whole, scale = full_box(about.size), about.scale[0]
        for top in range(box[0].start // BLOCK * BLOCK, box[0].stop, BLOCK):
            for left in range(box[1].start // BLOCK * BLOCK, box[1].stop, BLOCK):
                block = meet(whole, (Interval(top, top + BLOCK), Interval(left, left + BLOCK)))
                part = meet(box, block)
                read = part if scale.is_integer() else block
                place = (round(read[1].start * scale), round(read[0].start * scale))
                rgba = np.asarray(slide.read_region(place, level, (len(read[1]), len(read[0]))))
                yield part, rgba[within(read, part)]


def _opened(path: Path) -> Any:
    import openslide

    slide = openslide.OpenSlide(path)
    slide.set_cache(openslide.OpenSlideCache(CACHE_BYTES))
    return slide


def _check_tiles(said: Mapping[str, str], levels: int) -> None:
    """ValueError: tiles are so large that OpenSlide would end the process, which it does where memory is refused to it."""
    for level in range(levels):
        height, width = (int(said.get(f"openslide.level[{level}].tile-{side}", 0)) for side in ("height", "width"))
        if height * width > MOST_TILE_PIXELS:
            raise ValueError(f"level {level} has tiles of {height} x {width} pixels: its header is damaged")


def _background(slide: Any) -> tuple[int, int, int]:
    """Six hexadecimal digits in the slide's properties, or white."""
    said = slide.properties.get("openslide.background-color", "")
    try:
        red, green, blue = bytes.fromhex(said)
    except ValueError:
        return WHITE
    return red, green, blue


def _on(background: tuple[int, int, int], rgba: Array) -> Array:
    """(H, W, 3) of (H, W, 4): transparent pixels show the background, by their alpha."""
    colours, alpha = rgba[..., :3], rgba[..., 3:]
    if (alpha == 255).all():
        return colours
    alpha = alpha.astype(np.uint16)
    mixed = (colours * alpha + np.array(background, dtype=np.uint16) * (255 - alpha) + 127) // 255
    return mixed.astype(np.uint8)


def _positive(text: str) -> float:
    """0.0 where it is no number above it."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def write_example(path: Path, pixels: Array) -> None:
    """pixels: (3, H, W).  A tiled TIFF with two smaller images, which OpenSlide reads whatever its name is.

    Smaller ones have every second and fourth pixel; of 410 columns a fourth are 103, so that the scale is no whole number.
    """
    import tifffile

    whole = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    with tifffile.TiffWriter(path) as writer:
        for step in (1, 2, 4):
            reduced: dict[str, Any] = {"subfiletype": 1} if step > 1 else {}
            part = np.ascontiguousarray(whole[::step, ::step])
            writer.write(part, tile=(64, 64), photometric="rgb", compression="zlib", metadata=None, **reduced)


CASES = [
    ("levels.bif", (3, 310, 410), "uint8"),
    ("blocks.svslide", (3, 600, 1300), "uint8"),
]
