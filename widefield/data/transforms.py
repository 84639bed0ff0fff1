"""torchvision.transforms.v2 by name, with a seed for each sample.

A list in a recipe, `[RandomCrop: {size: 8, padding: 1}, RandomHorizontalFlip]`, becomes one function of an image and a
seed.  The seed depends on the run's seed, the epoch and the sample, so a transformed image does not depend on ranks, workers
or batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from widefield.naming import did_you_mean

_KNOWN = [name for name in dir(v2) if isinstance(getattr(v2, name), type) and issubclass(getattr(v2, name), v2.Transform)]

_OF_FUNCTIONS = ("Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder", "Transform")

KEEP_PIXELS_IN_PLACE = (
    "ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "Identity", "RGB", "RandomAdjustSharpness",
    "RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomGrayscale", "RandomInvert",
    "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize",
)  # fmt: skip
"""Transforms of colour only, after which labels of pixels are still right.  All others may move pixels, but not the labels."""


def moving(listed: Sequence[Any]) -> list[str]:
    """The names in a recipe's list of transforms that may move pixels.

    >>> moving(["RandomHorizontalFlip", {"ColorJitter": {"brightness": 0.2}}])
    ['RandomHorizontalFlip']
    """
    names = [str(next(iter(entry), "") if isinstance(entry, dict) else entry) for entry in listed]
    return [name for name in names if name not in KEEP_PIXELS_IN_PLACE]


def seed_of(*parts: int | str) -> int:
    """A 63-bit hash of `parts`.

    >>> seed_of(0, "augment", 3, 17) == seed_of(0, "augment", 3, 17) != seed_of(0, "augment", 3, 18)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's generators of the CPU and of `device` are seeded; afterwards their states are restored."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Inside, Python's, NumPy's and torch's CPU generators are seeded; afterwards their states are restored."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with seeded(seed, torch.device("cpu")):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


class Transforms:
    """A recipe's list of transforms as a function `(image (C, H, W) uint8, seed) -> image`."""

    def __init__(self, listed: Sequence[Any], *, field: str) -> None:
        """field: the recipe's key, for errors.  ValueError: an unknown transform, or arguments that it does not take."""
        self.steps = [_one(entry, f"{field}[{number}]") for number, entry in enumerate(listed)]

    def __call__(self, image_CHW: Tensor, seed: int) -> Tensor:
        if not self.steps:
            return image_CHW
        with seeded(seed, image_CHW.device):
            for step in self.steps:
                image_CHW = step(image_CHW)
        return image_CHW


def _one(entry: Any, field: str) -> v2.Transform:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(f"{field} is {entry!r}; write a name, or one name with its arguments: RandomCrop: {{size: 32}}")
    ((name, arguments),) = entry.items()
    if name not in _KNOWN:
        raise ValueError(f"{field}: torchvision.transforms.v2 has no '{name}'{did_you_mean(name, _KNOWN)}")
    if name in _OF_FUNCTIONS:
        raise ValueError(
            f"{field}: {name} takes functions or other transforms, which a recipe cannot give; list transforms alone"
        )
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{field}: {name} is given {arguments!r}; name its arguments: {name}: {{size: 32}}")
    try:
        return getattr(v2, name)(**_arguments(arguments or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}: {name} does not take {arguments}: {error}") from None


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """YAML has no enum: `interpolation: bicubic` means InterpolationMode.BICUBIC."""
    return {
        key: v2.InterpolationMode(value) if key == "interpolation" and isinstance(value, str) else value
        for key, value in arguments.items()
    }
