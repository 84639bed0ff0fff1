"""Reading image files as uint8 tensors, as far as Pillow can, and writing images and labels."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from widefield.data import BadImageError

_PROGRAMS = ("EPS", "IPTC")
"""Formats that may hold PostScript, which is a program."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp")


def read_image(path: str | Path, channels: int) -> Tensor:
    """The image at `path` as (channels, H, W) uint8, 1 grey or 3 RGB, rotated as its EXIF orientation says.

    16-bit images keep their upper 8 bits.  BadImageError: the file is missing, damaged or no image, has more than 16 bits per
    channel, or may hold a program (PostScript).
    """
    try:
        with Image.open(path) as image:
            if image.format in _PROGRAMS:
                raise ValueError(f"{image.format} may hold a program, which Pillow would have Ghostscript run; save it as PNG")
            upright = ImageOps.exif_transpose(image)
            pixels = bytes_of(upright, "L" if channels == 1 else "RGB")
    except Exception as error:  # on damaged files decoders raise many types, OverflowError and MemoryError among them
        size = Path(path).stat().st_size if Path(path).is_file() else None
        reason = "there is no such file" if size is None else f"{size} bytes; {str(error) or type(error).__name__}"
        raise BadImageError(f"cannot read the image {path} ({reason})") from None
    return pixels


def bytes_of(image: Image.Image, mode: str) -> Tensor:
    """A PIL image as (C, H, W) uint8.  mode: L for grey, RGB for colour.  ValueError: floating-point or above 16 bits."""
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

Image.MAX_IMAGE_PIXELS = None
"""Pillow refuses images above 179 million pixels as an attack; here they are expected."""
