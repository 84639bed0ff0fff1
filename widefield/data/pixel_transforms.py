"""A recipe's lists of transforms where pixels have labels: image and labels are moved as one, in coordinates of the whole.

All transforms that move pixels, of data.read and of data.augment, become one map with one interpolation (spatial/).  Those of
colour that are listed before the first of them see the source, the others what the map gives.  So a window of the output needs
a window of the source, which is all that is read where the format can read windows.  A transform of colour that looks at more
than one pixel gets the whole image, as does a user's own, unless it has `pointwise = True`; with it, a list goes on as a second
list would on what it gives.

Everything is drawn from a sample's seeds and the size of the whole, so all windows of an image agree.

Volumes go the same way.  What moves their voxels are flips and crops, which are exact (spatial/axis_warp.py).

A target that is an image, of `scale` times as many pixels, is moved as the image is, with its interpolation, by the same map on
its own grid.  Transforms of colour, and a user's own, change the image alone: what they do is a part of its degradation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors

from widefield.data.added_transforms import ClassBalancedCrop
from widefield.data.balanced_crops import BalancedCrops
from widefield.data.batch import Window
from widefield.data.sources import InMemory, Source, everything
from widefield.data.spatial.axis_warp import AxisMap, AxisWarp
from widefield.data.spatial.boxes import moved_points
from widefield.data.spatial.coordinate_map import CoordinateMap, SpatialMove, composed
from widefield.data.spatial.enlarged_maps import moved_target, source_box
from widefield.data.spatial.moves import MOVES, crop_at, drawn
from widefield.data.spatial.volume_moves import CROPS, FLIPS, VOLUME_MOVES, crop_of, drawn_flip
from widefield.data.spatial.warp import Warp
from widefield.data.targets import degraded
from widefield.data.transforms import COLOURS_OF_VOLUMES, KEEP_PIXELS_IN_PLACE, Step, Transforms, seed_of, seeded, seeded_for
from widefield.geometry.box import Box, full_box, slices, within

CPU = torch.device("cpu")
_ORDER = ("nearest", "bilinear", "bicubic")


@dataclass(frozen=True)
class Entry:
    """A step with its list, `read` or `augment`, and its number there."""

    listed: str
    number: int
    step: Step
    labelled: bool = True
    """Whether a user's own transform is called with labels."""


@dataclass
class TransformPhase:
    """Transforms with one map: colours before it, the moves that it is composed of, colours after it, and a user's own."""

    before: list[Entry] = field(default_factory=list)
    moves: list[Entry] = field(default_factory=list)
    after: list[Entry] = field(default_factory=list)
    own: Entry | None = None

    @property
    def ends_whole(self) -> bool:
        """Whether its last transforms need all pixels of the output."""
        return self.own is not None or not all(entry.step.is_pointwise for entry in self.after)


@dataclass(frozen=True)
class View:
    """What is read of a sample.  shape: (C, *pixels) of the whole, of which image and labels are `window`; None: they are it.

    maps: of every phase, in their order.
    """

    image: Tensor
    labels: Tensor
    shape: tuple[int, ...]
    window: Window | None
    maps: tuple[CoordinateMap | AxisMap, ...]


class PixelTransforms:
    """See the top.  ignore: the label of what is outside of the image; None: the task has no such label."""

    def __init__(
        self,
        read: Transforms,
        augment: Transforms,
        *,
        num_classes: int,
        ignore: int | None = None,
        labelled: bool = True,
        dims: int = 2,
        image_scale: int | None = None,
    ) -> None:
        """labelled: False where the image alone is moved, with labels of no meaning.  dims: 3 of volumes.

        image_scale: of targets that are images.

        ValueError, NotImplementedError: transforms that do not move labels, or of which one map cannot be made.
        """
        listed = {"read": read, "augment": augment}
        marked = labelled and image_scale is None
        entries = [
            Entry(name, number, step, marked) for name, given in listed.items() for number, step in enumerate(given.steps)
        ]
        check = _check_moves_labels if dims == 2 else _check_is_of_volumes
        for entry in entries:
            check(entry, listed[entry.listed].field)
        self.phases = _phases(entries)
        self.num_classes, self.ignore, self.labelled, self.dims = num_classes, ignore, labelled, dims
        self.image_scale = image_scale
        self._settings = [_settings(phase.moves if dims == 2 else _crops(phase.moves)) for phase in self.phases]
        self._balanced = BalancedCrops(num_classes)

    @property
    def does_anything(self) -> bool:
        return self.phases != [TransformPhase()]

    @property
    def looks_at_all(self) -> list[str]:
        """The names of transforms for which the whole image is read, even where only a window is wanted."""
        entries = [entry for phase in self.phases for entry in (*phase.before, *phase.after, phase.own) if entry is not None]
        return [entry.step.name for entry in entries if not entry.step.is_pointwise]

    def __call__(
        self, source: Source, seeds: Mapping[str, int], *, window_of: Callable[..., Window] | None, index: int | None = None
    ) -> View:
        """The window that `window_of(size)` says of the transformed whole; all of it for None.

        seeds: of the lists `read` and `augment`.  index: of the image in its split, under which its class pixels are kept.
        """
        view: View | None = None
        maps: tuple[CoordinateMap | AxisMap, ...] = ()
        for number in range(len(self.phases)):
            source = source if view is None else InMemory(view.image, view.labels, self._scale)
            last = number == len(self.phases) - 1
            view = self._phase(number, source, seeds, window_of if last else None, index if number == 0 else None)
            maps += view.maps
        assert view is not None
        return replace(view, maps=maps)

    def _phase(
        self, number: int, source: Source, seeds: Mapping[str, int], window_of: Callable[..., Window] | None, index: int | None
    ) -> View:
        phase = self.phases[number]
        warp = self._warp(number, source, seeds, index)
        whole = full_box(warp.map.output)
        asked = whole if window_of is None else window_of(warp.map.output)
        window = whole if phase.ends_whole else asked
        box = source_box(warp, window, self._scale) if phase.moves else window
        wide = box if all(entry.step.is_pointwise for entry in phase.before) else everything(source)
        image, labels = _coloured(phase.before, *source.read(wide), seeds)
        if phase.moves:
            image, labels = self._moved(warp, image, labels, wide, window)
        elif wide != window:
            image, labels = self._cut(image, labels, within(wide, window))
        image, labels = _coloured(phase.after, image, labels, seeds)
        if phase.own is not None:
            image, labels = _coloured([phase.own], image, labels, seeds)
            whole = full_box(image.shape[1:])
            asked = window = whole if window_of is None else window_of(tuple(image.shape[1:]))
            image, labels = self._cut(image, labels, slices(asked))
        elif window != asked:
            image, labels = self._cut(image, labels, slices(asked))
        shape = (len(image), *(run.stop for run in whole))
        return View(image, labels, shape, None if window_of is None else asked, (warp.map,))

    @property
    def _scale(self) -> int:
        return self.image_scale or 1

    def _cut(self, image: Tensor, labels: Tensor, part: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """The same part of both."""
        by = self._scale
        return image[..., *part], labels[..., *(slice(by * one.start, by * one.stop) for one in part)]

    def _moved(self, warp: Warp | AxisWarp, image: Tensor, labels: Tensor, box: Box, window: Box) -> tuple[Tensor, Tensor]:
        if len(warp.fill) not in (1, len(image)):
            raise ValueError(f"fill has {len(warp.fill)} numbers and images have {len(image)} channels; give one, or one each")
        if self.image_scale is not None:
            moved, _ = warp.view(image, None, box, window, outside=None)
            return moved, moved_target(warp, labels, box, window, self.image_scale)
        moved, marks = warp.view(image, labels, box, window, outside=self.ignore)
        assert marks is not None
        return moved, marks

    def _warp(self, number: int, source: Source, seeds: Mapping[str, int], index: int | None) -> Warp | AxisWarp:
        """The map of a phase, drawn for an image of the source's size."""
        return (
            self._image_warp(number, source, seeds, index)
            if self.dims == 2
            else self._volume_warp(number, source, seeds, index)
        )

    def _volume_warp(self, number: int, source: Source, seeds: Mapping[str, int], index: int | None) -> AxisWarp:
        map = AxisMap.identity(source.size)
        for entry in self.phases[number].moves:
            step, size, seed = entry.step, map.output, seed_of(seeds[entry.listed], "move", entry.number)
            if isinstance(step.run, ClassBalancedCrop):
                map = map.then(self._balanced_map(step.run, source, map, seed, index))
                continue
            with seeded(seed, CPU):
                if step.name in FLIPS:
                    map = map.then(drawn_flip(step.name, step.run, size))
                    continue
                try:
                    map = map.then(crop_of(step.name, step.run, step.arguments).drawn(size))
                except ValueError as error:
                    raise ValueError(f"data.{entry.listed}: {step.name} on {_px(size)}: {error}") from None
        settings = self._settings[number][1]
        return AxisWarp(map, border=settings["border"], fill=settings["fill"])

    def _image_warp(self, number: int, source: Source, seeds: Mapping[str, int], index: int | None) -> Warp:
        moves: list[SpatialMove] = []
        for entry in self.phases[number].moves:
            size, seed = (moves[-1].size if moves else source.size), seed_of(seeds[entry.listed], "move", entry.number)
            if isinstance(entry.step.run, ClassBalancedCrop):
                before = composed(source.size, moves)
                moved = partial(_moved_pixel, before)
                corner = self._balanced.corner(entry.step.run, source, seed, extents=size, moved=moved, index=index)
                moves.append(crop_at(corner[0], corner[1], entry.step.run.sides(2)))
                continue
            with seeded(seed, CPU):
                try:
                    move = drawn(entry.step.run, size, seed)
                except ValueError as error:
                    raise ValueError(f"data.{entry.listed}: {entry.step.name} on {_px(size)}: {error}") from None
            moves += [] if move is None else [move]
        made = composed(source.size, moves)
        shrinks, settings = self._settings[number]
        samples = tuple(max(1, int(np.ceil(by - 1e-6))) for by in made.shrinking) if shrinks else (1, 1)
        return Warp(made, samples=samples, **settings)

    def _balanced_map(self, crop: ClassBalancedCrop, source: Source, before: AxisMap, seed: int, index: int | None) -> AxisMap:
        """The crop as a map of a volume that is the source after the map `before`."""
        moved = before.undone().at
        corner = self._balanced.corner(crop, source, seed, extents=before.output, moved=moved, index=index)
        return AxisMap(before.output, crop.sides(3), (1, 1, 1), tuple(corner))


def without_labels(image_CHW: Tensor) -> InMemory:
    """An image whose labels have no meaning."""
    return InMemory(image_CHW, torch.zeros(image_CHW.shape[1:], dtype=torch.uint8))


def _moved_pixel(map: CoordinateMap, pixel: tuple[int, ...]) -> Sequence[float]:
    return moved_points(map, np.array([pixel], dtype=np.float64))[0].tolist()


def _px(size: Sequence[int]) -> str:
    return f"{' x '.join(map(str, size))} px"


@dataclass(frozen=True)
class OfImagesAlone:
    """The transforms of images whose labels are not known: what prediction sees is what evaluation sees."""

    moves: PixelTransforms

    def __call__(self, image_CHW: Tensor, seed: int) -> View:
        """The view has labels of no meaning."""
        return self.moves(without_labels(image_CHW), {"read": seed, "augment": seed}, window_of=None)


def _phases(entries: Sequence[Entry]) -> list[TransformPhase]:
    phases = [TransformPhase()]
    for entry in entries:
        if entry.step.is_own and not entry.step.is_pointwise:
            phases[-1].own = entry
            phases.append(TransformPhase())
        elif entry.step.is_own or entry.step.keeps_pixels_in_place:
            (phases[-1].after if phases[-1].moves else phases[-1].before).append(entry)
        else:
            phases[-1].moves.append(entry)
    return phases if len(phases) == 1 or phases[-1] != TransformPhase() else phases[:-1]


def _coloured(entries: Sequence[Entry], image: Tensor, labels: Tensor, seeds: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """Run steps that get pixels; those of a list that follow each other share a seed."""
    if not image.numel():
        return image, labels
    for listed, group in groupby(entries, key=lambda entry: entry.listed):
        run = list(group)
        first = run[0].number
        seed = seeds[listed] if first == 0 else seed_of(seeds[listed], "colour", first)
        with seeded_for([entry.step for entry in run], seed, CPU):
            for entry in run:
                image, labels = _users(entry, image, labels) if entry.step.is_own else (entry.step(image), labels)
    return image, labels


def _users(entry: Entry, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a user's transform makes of an image and its labels.  ValueError: no such pair."""
    name = f"data.{entry.listed}: {entry.step.name}"
    if entry.labelled:
        made = entry.step.run(tv_tensors.Image(image), tv_tensors.Mask(labels))
    elif labels.ndim == image.ndim:
        return degraded(entry.step.run(image), image, name), labels
    else:
        changed = entry.step.run(image)
        made = changed, labels.new_zeros(changed.shape[1:]) if isinstance(changed, Tensor) else None
    if not isinstance(made, tuple | list) or len(made) != 2 or not all(isinstance(one, Tensor) for one in made):
        raise ValueError(f"{name} gives a {type(made).__name__}; a pair of tensors is wanted, the image and its labels")
    found, marks = (one.detach().as_subclass(Tensor) for one in made)
    if found.dtype != image.dtype or len(found) != len(image) or found.ndim != image.ndim or marks.ndim != labels.ndim:
        raise ValueError(
            f"{name} makes of an image {tuple(image.shape)} of {image.dtype} one {tuple(found.shape)} of {found.dtype}, and of "
            f"labels {tuple(labels.shape)} such of {tuple(marks.shape)}; keep the dtype, the channels and the kind of labels"
        )
    if marks.shape[-(found.ndim - 1) :] != found.shape[1:] or (entry.step.is_pointwise and found.shape != image.shape):
        raise ValueError(
            f"{name} makes an image {tuple(found.shape)} and labels {tuple(marks.shape)} of an image {tuple(image.shape)}; "
            "give labels the image's size, and where `pointwise = True` keep it"
        )
    return found, marks if marks.dtype in (torch.uint8, torch.int64) else marks.long()


def _check_moves_labels(entry: Entry, where: str) -> None:
    step = entry.step
    if isinstance(step.run, ClassBalancedCrop):
        step.run.sides(2)
        return
    if step.is_own or step.keeps_pixels_in_place or step.name in MOVES:
        return
    raise NotImplementedError(
        f"{where} has {step.name}, which moves or changes pixels in a way that labels of pixels cannot follow; leave it out. "
        f"Image and labels are moved by {', '.join((*MOVES, 'ClassBalancedCrop'))}; only the image is changed by "
        f"{', '.join(KEEP_PIXELS_IN_PLACE)}"
    )


def _check_is_of_volumes(entry: Entry, where: str) -> None:
    """NotImplementedError: a transform that is not made for volumes.  ValueError: arguments that it does not take there."""
    step = entry.step
    if step.name in CROPS and not step.is_own:
        try:
            crop_of(step.name, step.run, step.arguments)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if isinstance(step.run, ClassBalancedCrop):
        step.run.sides(3)
        return
    if step.is_own or step.name in VOLUME_MOVES or step.colours_volumes:
        return
    why = "looks at more than one pixel, of a plane alone" if step.keeps_pixels_in_place else "is made for images (C, H, W)"
    raise NotImplementedError(
        f"{where} has {step.name}, which {why}, and here are volumes (C, D, H, W); leave it out, or use a transform of your "
        f"own, as package.module:callable. Volumes are moved by {', '.join((*VOLUME_MOVES, 'ClassBalancedCrop'))}; only their "
        f"colours are changed by {', '.join(COLOURS_OF_VOLUMES)}, and by ColorJitter without contrast"
    )


def _crops(moves: Sequence[Entry]) -> list[Entry]:
    """The crops among moves of volumes, with what they show outside."""
    named = [(entry, entry.step) for entry in moves if entry.step.name in CROPS]
    crops = [replace(entry, step=replace(step, run=crop_of(step.name, step.run, step.arguments))) for entry, step in named]
    return [*crops, *(entry for entry in moves if isinstance(entry.step.run, ClassBalancedCrop))]


def _settings(moves: Sequence[Entry]) -> tuple[bool, dict[str, Any]]:
    """Whether a map averages where it shrinks, and its interpolation, border and fill, of what its transforms ask for."""
    asked = [_interpolation(entry) for entry in moves if "interpolation" in entry.step.arguments]
    borders = {mode for entry in moves if (mode := getattr(entry.step.run, "padding_mode", "constant")) != "constant"}
    fills = {_numbers(fill) for entry in moves if (fill := getattr(entry.step.run, "fill", 0)) not in (0, None)}
    for what, found in (("padding_mode", borders), ("fill", fills)):
        if len(found) > 1:
            raise ValueError(
                f"data.read and data.augment ask for more than one {what}: {', '.join(map(str, sorted(found)))}; all moves of "
                f"pixels become one, so give one {what}"
            )
    interpolation = max(asked, key=_ORDER.index, default="bilinear")
    shrinks = interpolation != "nearest" and any(getattr(entry.step.run, "antialias", False) for entry in moves)
    border, fill = next(iter(borders), "constant"), next(iter(fills), (0.0,))
    return shrinks, {"interpolation": interpolation, "border": border, "fill": fill}


def _interpolation(entry: Entry) -> str:
    asked = str(entry.step.arguments["interpolation"]).removesuffix("-exact")
    if asked not in _ORDER:
        raise ValueError(
            f"data.{entry.listed}: {entry.step.name} asks for the interpolation '{asked}'; where pixels have labels there are "
            f"{', '.join(_ORDER)}"
        )
    return asked


def _numbers(fill: Any) -> tuple[float, ...]:
    return tuple(map(float, fill)) if isinstance(fill, Sequence) else (float(fill),)
