"""Files of what a model says of an image's pixels: label images, probabilities, overlays.

NAME.png                    class numbers, with a palette of the classes' colours; NAME.npy of a volume
NAME.CLASS.png              0 and 1, a file per class, where a pixel may have several classes; .npy of a volume
probabilities/NAME.npy      (K, H, W) float16; or probabilities/NAME.CLASS.png, 16 bits, 65,535 being 1
overlays/NAME.png           the image with the classes' colours over it; class 0 is transparent
NAME.geojson                the outlines of the labels

Where the image is predicted by window, in its own format; see wide_files.py:

NAME.tif, .zarr, ...                class numbers
probabilities/NAME.tif, .zarr, ...  float32 in place of npy, and uint16 in place of png: 65,534 is 1, and 65,535 no answer
overlays/NAME.png                   of at most 2,048 pixels a side
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from widefield.data.image import colours, write_labels
from widefield.geometry.box import slices
from widefield.outlines.geojson import Legend, write_outlines
from widefield.outlines.tracing import traced
from widefield.training.thumbnails import as_bytes, channels_shown

Probabilities = Literal["npy", "png"]
PLAIN_SUFFIX = {".nii.gz": ".nii"}
"""Of probabilities where labels have another: those of a compressed file could not be read by window."""
STRENGTH = 0.5
"""How much an overlay shows of a class's colour."""


@dataclass(frozen=True)
class Kinds:
    """Which files are written for an image.  layers: whether a pixel may have several classes.  volumes: whether it is one."""

    classes: Sequence[str]
    layers: bool
    probabilities: Probabilities | None = None
    overlays: bool = False
    volumes: bool = False
    outlines: bool = False

    def files_of(self, name: Path, suffix: str = ".png") -> list[Path]:
        """The paths, below the folder of answers, of the files for the image of that name.  suffix: of its labels."""
        if suffix != ".png":
            return list(self.wide_files_of(name, suffix).values())
        more = [self._overlay_of(name)] * self.overlays + [self._outlines_of(name)] * self.outlines
        return [*self._labels_of(name), *self._probabilities_of(name), *more]

    def wide_files_of(self, name: Path, suffix: str) -> dict[str, Path]:
        """Likewise of an image that is predicted by window: labels, and what else is asked for, by kind."""
        found = {"labels": _with(name, suffix)}
        if self.probabilities is not None:
            found["probabilities"] = Path("probabilities") / _with(name, PLAIN_SUFFIX.get(suffix, suffix))
        if self.overlays:
            found["overlay"] = self._overlay_of(name)
        if self.outlines:
            found["outlines"] = self._outlines_of(name)
        return found

    def _outlines_of(self, name: Path) -> Path:
        return _with(name, ".geojson")

    def _labels_of(self, name: Path) -> list[Path]:
        suffix = ".npy" if self.volumes else ".png"
        return self._by_class(name, suffix) if self.layers else [_with(name, suffix)]

    def _probabilities_of(self, name: Path) -> list[Path]:
        if self.probabilities is None:
            return []
        below = Path("probabilities") / name
        return [_with(below, ".npy")] if self.probabilities == "npy" else self._by_class(below)

    def _overlay_of(self, name: Path) -> Path:
        return Path("overlays") / _with(name, ".png")

    def _by_class(self, name: Path, suffix: str = ".png") -> list[Path]:
        plain = [re.sub(r"[^\w-]+", "_", one) or "_" for one in self.classes]
        unique = plain if len(set(plain)) == len(plain) else [f"{number}_{one}" for number, one in enumerate(plain)]
        return [_with(name, f".{one}{suffix}") for one in unique]

    def write(self, folder: Path, name: Path, labels: Tensor, likely: Tensor | None, image: Tensor) -> Path:
        """Write the files of an image, each whole or not at all; returns the path of the (first) label image.

        labels: (*pixels) or (K, *pixels).  likely: (K, *pixels) probabilities.  image: (C, *pixels) as it was read.
        OSError: the disk refuses one.
        """
        parts = list(labels) if self.layers else [labels]
        for path, part in zip(self._labels_of(name), parts, strict=True):
            _write(folder / path, partial(_write_volume if self.volumes else write_labels, part))
        if likely is not None:
            self._write_probabilities(folder, name, likely.numpy())
        if self.overlays:
            picture = overlay(image, labels, len(self.classes))
            _write(folder / self._overlay_of(name), lambda file: picture.save(file, "PNG"))
        if self.outlines:
            _write(folder / self._outlines_of(name), partial(self._write_outlines, labels.numpy()))
        return folder / self._labels_of(name)[0]

    def _write_outlines(self, labels: np.ndarray, path: Path) -> None:
        """In pixels; numbers that are no class's are left out."""
        size, count = (labels.shape[0], labels.shape[1]), len(self.classes)
        regions = traced(lambda box: labels[slices(box)], size, keep=lambda numbers: (numbers >= 0) & (numbers < count))
        write_outlines(path, regions, Legend(tuple(self.classes), tuple(colours(max(count, 2)))))

    def _write_probabilities(self, folder: Path, name: Path, likely: np.ndarray) -> None:
        paths = self._probabilities_of(name)
        if self.probabilities == "npy":
            _write(folder / paths[0], lambda file: file.write_bytes(_npy(likely)))
            return
        for path, one in zip(paths, np.round(65535 * likely.astype(np.float32)).astype(np.uint16), strict=True):
            _write(folder / path, lambda file, one=one: Image.fromarray(one).save(file, "PNG"))  # type: ignore[misc]


def overlay(image_CHW: Tensor, labels: Tensor, classes: int) -> Image.Image:
    """The image with the classes' colours over it.  labels: (H, W), or (K, H, W) of 0 and 1."""
    grey = channels_shown(image_CHW)
    low, high = (0.0, 255.0) if grey.dtype == torch.uint8 else _range(grey)
    values = grey if grey.dtype == torch.uint8 else as_bytes(grey.float(), (low, high))
    pixels = values.expand(3, *values.shape[1:]).permute(1, 2, 0).float().numpy()
    table = np.array(colours(max(classes, 2)), dtype=np.float32)
    if labels.ndim == 2:
        layers = [(number, (labels == number).numpy()) for number in range(1, classes)]
    else:
        layers = [(number, layer.bool().numpy()) for number, layer in enumerate(labels)]
    for number, where in layers:
        colour = table[number if labels.ndim == 2 else (number + 1) % len(table)]
        pixels[where] = (1 - STRENGTH) * pixels[where] + STRENGTH * colour
    return Image.fromarray(pixels.round().astype(np.uint8))


def _range(pixels: Tensor) -> tuple[float, float]:
    """The values that are shown as black and white: all but the lowest and highest half percent."""
    values = pixels.float().flatten()[:: max(1, pixels.numel() // 10**6)]
    low, high = (float(value) for value in torch.quantile(values, torch.tensor([0.005, 0.995])))
    return low, high if high > low else low + 1


def _write_volume(labels_DHW: Tensor, path: Path) -> None:
    path.write_bytes(_npy(labels_DHW.numpy()))


def _with(name: Path, suffix: str) -> Path:
    return name.with_name(name.name + suffix)


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then rename it, so that a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        write(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
