"""Image files to uint8 tensors: JPEG, PNG, TIFF, WebP and whatever else Pillow reads."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from widefield.data import BadImageError

_PROGRAMS = ("EPS", "IPTC")
"""PostScript, and what it can be wrapped into."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp")


def read_image(path: str | Path, channels: int) -> Tensor:
    """The image at `path` as (channels, H, W) uint8: 1 is grey, 3 is RGB; turned upright as its EXIF says.

    16-bit images keep their upper 8 bits.  BadImageError names a file that is missing, empty, cut short, no image, one
    of pixels wider than 16 bits, or in a format that may hold a program (PostScript).
    """
    try:
        with Image.open(path) as image:
            if image.format in _PROGRAMS:
                raise ValueError(f"{image.format} may hold a program, which Pillow would have Ghostscript run; save it as PNG")
            upright = ImageOps.exif_transpose(image)
            pixels = bytes_of(upright, "L" if channels == 1 else "RGB")
    except Exception as error:  # decoders trip over flipped bits in many ways, OverflowError and MemoryError among them
        size = Path(path).stat().st_size if Path(path).is_file() else None
        told = "there is no such file" if size is None else f"{size} bytes; {str(error) or type(error).__name__}"
        raise BadImageError(f"cannot read the image {path} ({told})") from None
    return pixels


def bytes_of(image: Image.Image, mode: str) -> Tensor:
    """A PIL image as (C, H, W) uint8: mode L is grey, RGB is colour.  ValueError: pixels wider than 16 bits."""
    if image.mode.startswith("I"):  # 16 bits in 'I;16' or 'I'; Pillow's own conversion clips them at 255
        wide = np.asarray(image, dtype=np.int64)
        if wide.min(initial=0) < 0 or wide.max(initial=0) > 65535:
            raise ValueError(f"pixels from {wide.min()} to {wide.max()} do not fit 16 bits; save it with 8 or 16 bits")
        image = Image.fromarray((wide >> 8).astype(np.uint8))
    if image.mode == "F":  # Pillow would clip at 0 and 255, and so read 0..1 as black
        raise ValueError("its pixels are floating-point numbers of unknown range; save it with 8 or 16 bits")
    pixels = np.array(image.convert(mode))
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()


def write_image(pixels_CHW: Tensor, path: Path) -> None:
    """Save (C, H, W) uint8, C of 1 or 3, as the format of the path's suffix."""
    array = pixels_CHW.permute(1, 2, 0).cpu().numpy()
    Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(path)


def write_labels(labels_HW: Tensor, path: Path) -> None:
    """Save class numbers as a PNG whose pixels are those numbers, shown in the classes' colours; of 16 bits and grey above 255.

    A negative number becomes the largest one that the file holds.
    """
    if int(labels_HW.max()) > 255:
        wide = labels_HW.cpu().numpy().astype(np.uint16)
        Image.fromarray(wide).save(path, "PNG")
        return
    image = Image.fromarray(labels_HW.to(torch.uint8).cpu().numpy())
    image.putpalette([value for colour in colours(256) for value in colour])
    image.save(path, "PNG")


def colours(count: int) -> list[tuple[int, int, int]]:
    """Red, green and blue of classes 0 to count - 1: dark, ten that are told apart easily, then hues a golden section apart."""
    further = [_bright(number * 0.618034 % 1) for number in range(max(0, count - len(_COLOURS)))]
    return [*_COLOURS, *further][:count]


def _bright(hue: float) -> tuple[int, int, int]:
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.6, 0.95))
    return red, green, blue


_COLOURS = [
    (38, 42, 46), (86, 146, 214), (255, 145, 30), (239, 83, 96), (64, 196, 190), (98, 187, 70),
    (250, 214, 55), (186, 104, 200), (255, 163, 190), (176, 121, 84), (198, 198, 198),
]  # fmt: skip

Image.MAX_IMAGE_PIXELS = None
"""Pillow takes an image above 179 million pixels for an attack; here they are the point."""
