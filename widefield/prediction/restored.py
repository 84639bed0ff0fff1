"""Answers that are images: their pixels, of the dtype that images have, and their files.

NAME.tif    of a TIFF
NAME.npy    of an array, and of a volume
NAME.png    of any other image, where a PNG can hold it: 8 bits of one or three channels, 16 bits of one; else NAME.tif
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from widefield.data import Dataset
from widefield.data.image import write_image
from widefield.data.intensity import limits_of
from widefield.prediction.inputs import Input

_TIFF = (".tif", ".tiff")


def pixels_of(image: Tensor, of: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """Pixels of `dtype` from values of a model.  of: the pixel values that are 0 and 1.

    Of whole numbers, the nearest one that the dtype has.
    """
    low, high = of
    values = image.double() * (high - low) + low
    if dtype.is_floating_point:
        return values.to(dtype)
    least, most = limits_of(dtype)
    return values.round().clamp(least, most).to(torch.int32).to(dtype)


def suffix_of_restored(path: Path, dataset: Dataset, *, channels: int | None = None) -> str:
    """The suffix of the answer for the image at `path`; see the top.  channels: of the answer; None: those of targets."""
    suffix, channels, tiff = (
        path.suffix.lower(),
        channels or len(dataset.classes),
        importlib.util.find_spec("tifffile") is not None,
    )
    if dataset.dims == 3 or suffix == ".npy":
        return ".npy"
    fits_png = (dataset.dtype, channels) in ((torch.uint8, 1), (torch.uint8, 3), (torch.uint16, 1))
    if tiff and (suffix in _TIFF or not fits_png):
        return ".tif"
    return ".png" if fits_png else ".npy"


@dataclass(frozen=True)
class RestoredFiles:
    """The file of each answer, in place of label files."""

    def files_of(self, name: Path, suffix: str = ".png") -> list[Path]:
        """The path, below the folder of answers, of the image for the input of that name."""
        return [name.with_name(name.name + suffix)]

    def write(self, folder: Path, image: Input, pixels: Tensor) -> Path:
        """Write (K, *pixels), whole or not at all; returns the path.  OSError: the disk refuses it."""
        path = folder / self.files_of(image.name, image.suffix)[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name("." + path.name)  # the suffix says the format
        try:
            _write(pixels, beside)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        return path


def _write(pixels: Tensor, path: Path) -> None:
    if path.suffix == ".npy":
        np.save(path, pixels.numpy())
    elif path.suffix == ".tif":
        _write_tiff(pixels.numpy(), path)
    elif pixels.dtype == torch.uint8:
        write_image(pixels, path)
    else:
        Image.fromarray(pixels[0].numpy()).save(path)


def _write_tiff(pixels: np.ndarray[Any, Any], path: Path) -> None:
    import tifffile

    about: dict[str, Any] = {"compression": "zlib", "metadata": None}
    if len(pixels) == 3 and pixels.dtype.kind == "u":
        tifffile.imwrite(path, np.moveaxis(pixels, 0, -1), photometric="rgb", **about)
        return
    planar = {"planarconfig": "separate"} if len(pixels) > 1 else {}
    tifffile.imwrite(path, pixels if len(pixels) > 1 else pixels[0], photometric="minisblack", **planar, **about)
