"""An image with what is said of its pixels: opened, and checked to fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from widefield.image_files import ImageFile, open_image
from widefield.viewer.likely import BandProbabilities
from widefield.viewer.pyramid import Array
from widefield.viewer.reading import extents_of

LABELS = ("prediction", "truth")
"""What labels of pixels may be, in the order in which the page has them."""


@dataclass(frozen=True)
class Scene:
    """name: in the page.  labels: by name, of LABELS.  probabilities: (classes, depth, height, width), mapped, or None."""

    name: str
    image: ImageFile
    labels: Mapping[str, ImageFile] = field(default_factory=dict)
    probabilities: Array | BandProbabilities | None = None

    @property
    def extents(self) -> tuple[int, int, int]:
        """(depth, height, width)."""
        return extents_of(self.image)

    @property
    def layers(self) -> list[str]:
        """The names of its layers, a probability for each class."""
        compared = ["disagreement"] if len(self.labels) == len(LABELS) else []
        count = 0 if self.probabilities is None else len(self.probabilities)
        named = [name for name in LABELS if name in self.labels]
        return ["image", *named, *compared, *(f"probability-{number}" for number in range(count))]

    def close(self) -> None:
        more = [self.probabilities.file] if isinstance(self.probabilities, BandProbabilities) else []
        for file in (self.image, *self.labels.values(), *more):
            file.close()


def open_scene(name: str, image: Path, labels: Mapping[str, Path], probabilities: Path | None = None) -> Scene:
    """Open the files.  ImageFileError: one cannot be read.  ValueError: they do not fit together."""
    opened, files = open_image(image), {key: open_image(path) for key, path in labels.items()}
    for file in files.values():
        _check_labels(file)
        _check_size(extents_of(file), file.path, opened)
    return Scene(name, opened, files, None if probabilities is None else _probabilities(probabilities, opened))


def _check_labels(file: ImageFile) -> None:
    if file.info.channels != 1 or np.dtype(file.info.dtype).kind not in "biu":
        raise ValueError(
            f"{file.path} has {file.info.channels} channels of {file.info.dtype}, and labels are one whole number per pixel; "
            "name a file of class numbers"
        )


def _check_size(size: tuple[int, ...], path: Path, image: ImageFile) -> None:
    if size != extents_of(image):
        of_file, of_image = (" x ".join(f"{extent:,}" for extent in one) for one in (size[-3:], extents_of(image)))
        raise ValueError(
            f"{path} has {of_file} pixels (depth, height, width) and {image.path} has {of_image}; name files of the same pixels"
        )


def _probabilities(path: Path, image: ImageFile) -> Array | BandProbabilities:
    """ValueError: the file is no array of floats, one of the image's size for each class."""
    if path.suffix != ".npy":
        return _bands(path, image)
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path} ({error}); name a .npy file of (classes, height, width)") from None
    if found.dtype.kind != "f" or found.ndim not in (3, 4):
        raise ValueError(f"{path} is {found.dtype} of shape {found.shape}; name floats of (classes, height, width)")
    found = found.reshape(len(found), *(1, *found.shape[1:])[-3:])
    _check_size(found.shape[1:], path, image)
    return found


def _bands(path: Path, image: ImageFile) -> BandProbabilities:
    file = open_image(path)
    if file.info.dtype not in ("float32", "uint16"):
        raise ValueError(f"{path} is {file.info.dtype}; name a file of probabilities, as `widefield predict` writes it")
    _check_size(extents_of(file), path, image)
    return BandProbabilities(file)
