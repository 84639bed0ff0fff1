"""torchvision.transforms.v2 by name, those of added_transforms.py, and users' own, with a seed for each sample.

A list in a recipe, `[RandomCrop: {size: 8, padding: 1}, RandomHorizontalFlip]`, becomes one function of an image and a
seed.  The seed depends on the run's seed, the epoch and the sample, so a transformed image does not depend on ranks, workers
or batches.  Where pixels have labels, pixel_transforms.py carries out the list.

A transform of a user's own is `package.module:callable`, called with the image tensor (C, H, W), and with (image, mask) as
torchvision's tv_tensors where pixels have labels; it returns the like.  Arguments in the recipe are passed as keywords; a class
is constructed with them first.

Torchvision knows no volumes (C, D, H, W): its transforms of colour get one as planes, (D, C, H, W), and those that move voxels
are spatial/volume_moves.py.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from widefield.data.added_transforms import ADDED
from widefield.data.intensity import limits_of
from widefield.data.spatial.volume_moves import CROPS
from widefield.naming import did_you_mean
from widefield.own_code import code_named, is_code

_KNOWN: dict[str, type] = {
    name: found for name in dir(v2) if isinstance(found := getattr(v2, name), type) and issubclass(found, v2.Transform)
} | ADDED

_OF_FUNCTIONS = ("Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder", "Transform")

KEEP_PIXELS_IN_PLACE = (
    "ColorJitter", "GaussianBlur", "GaussianNoise", "Grayscale", "Identity", "RGB", "RandomAdjustSharpness",
    "RandomAutocontrast", "RandomChannelPermutation", "RandomEqualize", "RandomGrayscale", "RandomInvert",
    "RandomPhotometricDistort", "RandomPosterize", "RandomSolarize",
)  # fmt: skip
"""Transforms of colour only, which move no pixel."""

_LOOK_AT_ALL = (
    "GaussianBlur", "GaussianNoise", "RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize",
    "RandomPhotometricDistort",
)  # fmt: skip
"""Those of them in which a pixel depends on others, or on the number of pixels."""


def names() -> list[str]:
    """The names that data.read, data.read_evaluate and data.augment can have."""
    return sorted(name for name in _KNOWN if name not in _OF_FUNCTIONS)


_OF_ANY_NUMBERS = ("GaussianBlur", "Grayscale", "Identity", "RGB", "RandomChannelPermutation", "RandomGrayscale")
"""Those of them that do not take pixels to be between 0 and 1: the others clip to that, or subtract from 1."""
_SAME_IN_PLANES = ("GaussianNoise",)
"""Those that look at all pixels, and do to the planes of a volume what they do to the whole."""
COLOURS_OF_VOLUMES = tuple(
    name for name in KEEP_PIXELS_IN_PLACE if name not in (*_LOOK_AT_ALL, "ColorJitter") or name in _SAME_IN_PLANES
)
"""Those that volumes can have, besides ColorJitter without contrast."""
OF_256_LEVELS = ("RandomEqualize",)
"""Those of them that compute with 8 bits, whatever the dtype."""


@dataclass(frozen=True)
class Step:
    """One entry of a list.  arguments: as in the recipe.  run: torchvision's object, one of ours, or a user's callable."""

    name: str
    arguments: dict[str, Any]
    run: Callable[..., Any]
    is_own: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """ValueError: floating-point pixels outside of 0 to 1, where they are taken to be inside."""
        if self.is_own or not self.keeps_pixels_in_place:
            return self.run(image)
        if image.is_floating_point() and self.name not in _OF_ANY_NUMBERS:
            _check_range(self.name, image)
        run = self.run if image.ndim == 3 else partial(_on_planes, self.run)
        return run(image) if image.dtype == torch.uint8 else in_floats(run, image)

    @property
    def keeps_pixels_in_place(self) -> bool:
        return self.name in KEEP_PIXELS_IN_PLACE

    @property
    def is_pointwise(self) -> bool:
        """Whether what becomes of a pixel depends on no other pixel; a user's own says so by `pointwise = True`."""
        if self.is_own:
            return getattr(self.run, "pointwise", False) is True
        looks_at_mean = self.name == "ColorJitter" and self.run.contrast is not None  # type: ignore[attr-defined]
        return self.keeps_pixels_in_place and self.name not in _LOOK_AT_ALL and not looks_at_mean

    @property
    def colours_volumes(self) -> bool:
        """Whether it changes the colours of a volume as those of an image."""
        return self.name in COLOURS_OF_VOLUMES or (self.name == "ColorJitter" and self.is_pointwise)


def _on_planes(run: Callable[[Tensor], Tensor], volume_CDHW: Tensor) -> Tensor:
    return run(volume_CDHW.transpose(0, 1)).transpose(0, 1)


def in_floats(run: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """`run` on numbers from 0 to 1: integers are scaled by the limits of their dtype and back, rounded and clipped.

    Floating-point images are not scaled; those of 16 bits are computed with in float32.
    """
    if image.is_floating_point():
        return run(image.to(torch.promote_types(image.dtype, torch.float32))).to(image.dtype)
    low, high = limits_of(image.dtype)
    made = run((image.to(torch.float32) - low) / (high - low)) * (high - low) + low
    return made.round_().clamp_(low, high).to(torch.int32).to(image.dtype)


def _check_range(name: str, image: Tensor) -> None:
    least, most = (end.item() for end in image.aminmax())
    if not (least >= 0 and most <= 1):
        raise ValueError(
            f"{name} takes floating-point pixels to be from 0 to 1, and here are {least:g} to {most:g}; scale the images to 0 "
            "to 1, leave it out, or use a transform of your own (after a move with interpolation: bicubic pixels may be "
            "slightly outside: list it before that move)"
        )


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
    """A recipe's list of transforms as a function `(image, seed) -> image`."""

    def __init__(self, listed: Sequence[Any], *, field: str) -> None:
        """field: the recipe's key, for errors.  ValueError: an unknown transform, or arguments that it does not take."""
        self.field = field
        self.steps = [_one(entry, f"{field}[{number}]") for number, entry in enumerate(listed)]

    def __call__(self, image_CHW: Tensor, seed: int) -> Tensor:
        if not self.steps:
            return image_CHW
        with seeded_for(self.steps, seed, image_CHW.device):
            for step in self.steps:
                image_CHW = step(image_CHW)
        return image_CHW


@contextmanager
def seeded_for(steps: Sequence[Step], seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the generators are seeded that these steps may use: torch's, and with a user's own Python's and NumPy's too."""
    with all_seeded(seed) if any(step.is_own for step in steps) else nullcontext(), seeded(seed, device):
        yield


def _one(entry: Any, field: str) -> Step:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ValueError(f"{field} is {entry!r}; write a name, or one name with its arguments: RandomCrop: {{size: 32}}")
    ((name, arguments),) = entry.items()
    if isinstance(name, str) and is_code(name):
        return _users(name, arguments, field)
    if name not in _KNOWN:
        raise ValueError(f"{field}: torchvision.transforms.v2 has no '{name}'{did_you_mean(name, _KNOWN)}")
    if name in _OF_FUNCTIONS:
        raise ValueError(
            f"{field}: {name} takes functions or other transforms, which a recipe cannot give; list transforms alone"
        )
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{field}: {name} is given {arguments!r}; name its arguments: {name}: {{size: 32}}")
    try:
        return Step(name, arguments or {}, _maker(name, arguments or {})(**_arguments(arguments or {})))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}: {name} does not take {arguments}: {error}") from None


def _maker(name: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """What makes the transform: torchvision's crops take no three sizes."""
    size = arguments.get("size")
    return CROPS[name] if name in CROPS and isinstance(size, Sequence) and len(size) == 3 else _KNOWN[name]


def _users(name: str, arguments: Any, field: str) -> Step:
    """A user's callable, or an object of a user's class.  ValueError: there is none, or it does not take the arguments."""
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{field}: {name} is given {arguments!r}; name its arguments: '{name}': {{strength: 2}}")
    found, options = code_named(name, key=field), arguments or {}
    if isinstance(found, type):
        try:
            made = found(**options)
        except TypeError as error:
            raise ValueError(f"{field}: {name} does not take {options}: {error}") from None
        if not callable(made):
            raise ValueError(f"{field}: objects of {name} cannot be called; give the class a method __call__")
        return Step(name, options, made, is_own=True)
    try:
        inspect.signature(found).bind_partial(**options)
    except TypeError as error:
        raise ValueError(f"{field}: {name} does not take {options}: {error}") from None
    run = partial(found, **options) if options else found
    if options and getattr(found, "pointwise", False) is True:
        run.pointwise = True
    return Step(name, options, run, is_own=True)


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """YAML has no enum: `interpolation: bicubic` means InterpolationMode.BICUBIC."""
    return {
        key: v2.InterpolationMode(value) if key == "interpolation" and isinstance(value, str) else value
        for key, value in arguments.items()
    }
