"""The patches that a recipe asks for, and the tissue of slides: what is drawn of large images, and what of them counts.

Where the foreground is, and what is tissue, is found by window, once: each rank looks at its share of the images, and all get
what all have found, some kilobytes an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from widefield.comm.mesh import Mesh
from widefield.config import RunConfig
from widefield.config.patches import PatchesConfig
from widefield.data import Dataset, Images, WindowedImages
from widefield.data.added_transforms import ClassBalancedCrop
from widefield.data.patch_places import CoverPlaces, Places, RandomPlaces
from widefield.data.patches import PatchImages
from widefield.data.records import FileImages, FileRecord, Known, PixelKind
from widefield.data.sources import OfImages
from widefield.data.spatial.class_pixels import ClassPixels, class_pixels_of
from widefield.data.splits import Item
from widefield.data.tissue import Tissue, TissueImages, tissue_of
from widefield.geometry import even_cut, parts_of
from widefield.geometry.cover import num_windows, shifts

T = TypeVar("T")
PER_IMAGE, FOREGROUND = 8, 0.33
"""What is used where the recipe says nothing.  A third of the patches, as nnU-Net has it (F. Isensee et al. 2021)."""


@dataclass(frozen=True)
class Sampled:
    """dataset: of patches, or of slides with their tissue.  reasons: for the log.  tissue: of each slide, by its name."""

    dataset: Dataset
    reasons: tuple[str, ...] = ()
    tissue: dict[str, Tissue] | None = None


def sampled(config: RunConfig, dataset: Dataset, mesh: Mesh, *, ignore: int | None, trains: bool = True) -> Sampled:
    """What data.patches and data.tissue make of a dataset.  Every rank calls it.

    ignore: the task's label of pixels that do not count.  trains: False where the images to train on are not read, so that
        nothing need be known of their foreground.
    ValueError, NotImplementedError, AgreedError, on every rank: they do not fit the images.
    """
    data = config.data
    if data.patches is None and data.tissue is None and not config.model.options.get("tissue"):
        return Sampled(dataset)
    if not len(dataset.train):  # only a run's metadata is known; its channels are those of the model
        return Sampled(dataset)
    _check(config, dataset)
    tissue: list[list[Tissue]] | None = None
    if data.tissue is not None:
        tissue = [_tissue(data.tissue, images, mesh) for images in (dataset.train, dataset.evaluate)]
    by_name = None if tissue is None else _by_name(dataset, tissue)
    why = () if by_name is None else (_tissue_in_words(str(data.tissue), by_name),)
    if data.patches is None:
        assert tissue is not None
        return Sampled(_with_channel(dataset, tissue), why, by_name)
    found, reasons = _patched(config, dataset, data.patches, tissue, mesh, ignore, trains=trains)
    return Sampled(found, (*why, *reasons), by_name)


# ---------------------------------------------------------------------------------------------- what does not fit


def _why_no_boxes(key: str, name: str) -> str:
    return (
        f"{key} cuts images up before their boxes are known, and data.name={name} has boxes; use RandomCrop in data.read, "
        "whose boxes follow, or whole images with mesh.space"
    )


def _check(config: RunConfig, dataset: Dataset) -> None:
    data = config.data
    key = "data.patches" if data.patches is not None else "data.tissue"
    if not isinstance(dataset.train, WindowedImages) or not isinstance(dataset.evaluate, WindowedImages):
        raise ValueError(
            f"{key} reads windows of images and data.name={data.name} reads each as a whole; take a format that reads files by "
            "window, as masks or manifest, or leave it out"
        )
    if data.intensity.name == "image":
        raise NotImplementedError(
            f"data.intensity=image takes the mean of whole images, which {key} never reads; set data.intensity=zscore, which "
            "is of all images together"
        )
    if config.model.options.get("tissue") and (data.tissue is None or data.patches is not None):
        raise ValueError(
            "model.options.tissue pools by the last channel and no channel of tissue is there; set data.tissue=otsu, or to a "
            "folder of masks, without data.patches"
        )
    if dataset.labels == "boxes":
        raise NotImplementedError(_why_no_boxes(key, data.name))
    if data.tissue is not None and dataset.dims != 2:
        raise ValueError(f"data.tissue is of slides and data.name={data.name} has volumes; leave it out")
    if data.patches is None:
        _check_channel(config, dataset)
        return
    if len(side := data.patches.size) != dataset.dims:
        raise ValueError(
            f"data.patches.size={side} has {len(side)} numbers and images have {dataset.dims} dims; give one number per dim"
        )
    if data.patches.foreground and not _has_classes(dataset):
        raise ValueError(
            f"data.patches.foreground={data.patches.foreground:g} is a share of patches on labelled pixels and data.name="
            f"{data.name} has {dataset.labels} and no labelled pixels; leave it out, or set data.tissue=otsu for patches on "
            "tissue"
        )
    wrong = [number for number in data.patches.classes or () if number >= len(dataset.classes)]
    if wrong:
        raise ValueError(
            f"data.patches.classes has {wrong[0]} and there are {len(dataset.classes)} classes, numbered from 0; mend it"
        )


def _check_channel(config: RunConfig, dataset: Dataset) -> None:
    data = config.data
    kind = str(dataset.dtype).removeprefix("torch.")
    if dataset.pixels:
        raise ValueError(
            f"data.tissue of whole images is for labels of images, and those of data.name={data.name} are of pixels; set "
            "data.patches, for which tissue is where they are drawn, or leave data.tissue out"
        )
    if kind != "uint8" or data.intensity.name != "range":
        raise NotImplementedError(
            f"data.tissue adds a channel of 0 and 255 to whole slides, of uint8 with data.intensity=range, and here are {kind} "
            f"with data.intensity={data.intensity.name}; set data.patches, for which tissue is where they are drawn"
        )
    for key in ("mean", "std"):
        given = getattr(data, key)
        if given is not None and len(given) != dataset.channels + 1:
            raise ValueError(
                f"data.{key} has {len(given)} numbers and with data.tissue there are {dataset.channels + 1} channels, of which "
                f"the last is the tissue; add {'0' if key == 'mean' else '1'} for it"
            )


def _has_classes(dataset: Dataset) -> bool:
    """Whether pixels have classes, of which patches may be drawn."""
    return dataset.labels in ("pixels", "layers")


def _check_beyond(config: RunConfig, dataset: Dataset, places: Places, ignore: int | None, *, key: str) -> None:
    """ValueError: patches reach beyond their image, and pixels that do not count have no label."""
    if not dataset.pixels or (ignore is not None and dataset.labels == "pixels") or not _reach_beyond(places):
        return
    cure = "data.patches.evaluate=whole" if key == "evaluate" else "data.patches.draw=random"
    raise ValueError(
        f"patches of {_px(places.side)} reach beyond images, and task.name={config.task.name} has no label for pixels that do "
        f"not count; set {cure}, and patches no larger than the smallest image"
    )


def _reach_beyond(places: Any) -> bool:
    if isinstance(places, RandomPlaces):
        return any(extent < side for size in places.sizes for extent, side in zip(size, places.side, strict=True))
    pairs = [(extent, side) for size in places.sizes for extent, side in zip(size, places.side, strict=True)]
    if places.seed is None or places.tissue is not None:
        return any(extent % side for extent, side in pairs)
    return any(num_windows(extent, side) * side != extent or len(shifts(extent, side)) > 1 for extent, side in pairs)


# ---------------------------------------------------------------------------------------------- patches


def _patched(
    config: RunConfig,
    dataset: Dataset,
    asked: PatchesConfig,
    tissue: list[list[Tissue]] | None,
    mesh: Mesh,
    ignore: int | None,
    *,
    trains: bool,
) -> tuple[Dataset, list[str]]:
    train, why = _places(config, dataset, asked, None if tissue is None else tissue[0], mesh, trains=trains)
    _check_beyond(config, dataset, train, ignore, key="draw")
    about = {"pixels": dataset.pixels, "ignore": ignore}
    found = replace(dataset, train=PatchImages(dataset.train, train, **about))  # type: ignore[arg-type]
    if not len(found.train):
        raise ValueError("data.patches finds no patch: no slide to train on has tissue; see data.tissue")
    reasons = [*why, *_slower(dataset.train)]
    if asked.evaluate == "whole":
        return found, reasons
    cover = CoverPlaces(_sizes(dataset.evaluate), tuple(asked.size), tissue=None if tissue is None else tissue[1])
    _check_beyond(config, dataset, cover, ignore, key="evaluate")
    found = replace(found, evaluate=PatchImages(dataset.evaluate, cover, **about))  # type: ignore[arg-type]
    if not len(found.evaluate):
        raise ValueError("data.patches.evaluate=cover finds no patch: no slide to evaluate has tissue; see data.tissue")
    each = "each pixel" if tissue is None else "each pixel of tissue"
    return found, [*reasons, f"evaluated: {len(found.evaluate):,} patches that cover {len(cover.sizes):,} images, {each} once"]


def _places(
    config: RunConfig, dataset: Dataset, asked: PatchesConfig, tissue: list[Tissue] | None, mesh: Mesh, *, trains: bool
) -> tuple[Places, list[str]]:
    images, side = dataset.train, tuple(asked.size)
    sizes = _sizes(images)
    if asked.draw == "cover":
        places = CoverPlaces(sizes, side, config.seed, tissue)
        grid = "on a grid that is shifted every epoch" if tissue is None else "of which each has tissue, the same every epoch"
        return places, [f"data.patches: {sum(places.counts):,} patches of {_px(side)} cover {len(sizes):,} images, {grid}"]
    share = (FOREGROUND if _has_classes(dataset) else 0.0) if asked.foreground is None else asked.foreground
    crop = ClassBalancedCrop(list(side), share, asked.classes)
    each = PER_IMAGE if asked.per_image is None else asked.per_image
    known = _foreground(images, len(dataset.classes), mesh) if share and trains else {}
    random = RandomPlaces(images, sizes, crop, each, config.seed, len(dataset.classes), known, tissue)  # type: ignore[arg-type]
    where = "anywhere" if tissue is None else "on tissue"
    on = f", {100 * share:g} % of them on foreground, which {_with_foreground(known, asked):,} images have" if share else ""
    return random, [f"data.patches: {each} patches of {_px(side)} of each image and epoch, {where}{on}"]


def _with_foreground(known: dict[int, ClassPixels], asked: PatchesConfig) -> int:
    def has(one: ClassPixels) -> bool:
        return any((number or one.layers) if asked.classes is None else number in asked.classes for number in one.blocks)

    return sum(map(has, known.values()))


def _foreground(images: Images, num_classes: int, mesh: Mesh) -> dict[int, ClassPixels]:
    """Which blocks of every image have which class."""

    def found(index: int) -> ClassPixels:
        source = OfImages(images, index, seed=0, check=lambda *sample: None)
        return class_pixels_of(source.size, source.labels, num_classes=num_classes)

    return dict(enumerate(_of_all(found, len(images), mesh)))


def _slower(images: Images) -> list[str]:
    """What it costs where files have no windows, in words."""
    file_of, shape = getattr(images, "image_file", None), getattr(images, "shape", None)
    if file_of is None or shape is None:
        return []
    slow = [number for number in range(len(images)) if (file := file_of(number)) is None or not file.info.by_window]
    if not slow:
        return []
    most = max(slow, key=lambda number: int(np.prod(shape(number))))
    return [
        f"data.patches: {len(slow):,} of {len(images):,} images are files of which no window is read alone, so that each patch "
        f"costs its whole image, as {images.name_of(most)} of {_px(shape(most)[1:])}; save them as tiled TIFF"
    ]


def _sizes(images: Any) -> list[tuple[int, ...]]:
    return [tuple(images.shape(index)[1:]) for index in range(len(images))]


def _px(size: Sequence[int]) -> str:
    return f"{' x '.join(map(str, size))} px"


# ---------------------------------------------------------------------------------------------- tissue


def _tissue(how: str, images: Any, mesh: Mesh) -> list[Tissue]:
    return _of_all(partial(_tissue_of, how, images), len(images), mesh)


def _tissue_of(how: str, images: Any, index: int) -> Tissue:
    return tissue_of(images, index, how)


def _by_name(dataset: Dataset, tissue: list[list[Tissue]]) -> dict[str, Tissue]:
    splits = zip((dataset.train, dataset.evaluate), tissue, strict=True)
    return {images.name_of(index): one for images, found in splits for index, one in enumerate(found)}


def _tissue_in_words(how: str, by_name: dict[str, Tissue]) -> str:
    found = list(by_name.values())
    empty = [name for name, one in by_name.items() if not one.mask.any()]
    scales = [scale for one in found for scale in one.scale]
    shares = [100 * one.share for one in found]
    of = "Otsu's threshold of saturation" if how == "otsu" else f"masks in {how}"
    text = (
        f"data.tissue: {min(shares):.3g} to {max(shares):.3g} % of {len(found):,} slides, by {of}, at {min(scales):.3g} to "
        f"{max(scales):.3g} pixels of a slide per pixel of the mask"
    )
    return text + (f"; {len(empty):,} have none, as {empty[0]}" if empty else "")


def _with_channel(dataset: Dataset, tissue: list[list[Tissue]]) -> Dataset:
    """Slides with their tissue as a last channel, which is not normalized."""
    return replace(
        dataset,
        train=TissueImages(dataset.train, tissue[0]),  # type: ignore[arg-type]
        evaluate=TissueImages(dataset.evaluate, tissue[1]),  # type: ignore[arg-type]
        channels=dataset.channels + 1,
        mean=[*dataset.mean, 0.0],
        std=[*dataset.std, 1.0],
    )


def slide_with_tissue(path: str | Path, how: str, dataset: Dataset) -> Tensor:
    """A slide's file as a run's model wants it, for prediction: with its tissue as a last channel.

    BadImageError, ValueError: it cannot be read, or has no mask in the folder `how`.
    """
    record = FileRecord((Path(path),), Known(0), Item(str(path)))
    images = FileImages([record], PixelKind(dataset.channels - 1, dataset.dtype))
    return TissueImages(images, [tissue_of(images, 0, how)]).read(0)[0]


def tissue_to_tree(tissue: dict[str, Tissue]) -> dict[str, Any]:
    """For JSON: of every slide the share that is tissue, the scale of its mask, and Otsu's threshold, where it made it."""
    return {
        name: {"share": one.share, "scale": list(one.scale), "mask": list(one.mask.shape), "threshold": one.threshold}
        for name, one in tissue.items()
    }


# ---------------------------------------------------------------------------------------------- on ranks


def _of_all(work: Callable[[int], T], count: int, mesh: Mesh) -> list[T]:
    """What `work` gives for every image, in order, on every rank; each rank does an even share.

    AgreedError, on every rank: it fails on one.
    """
    mine = parts_of(even_cut(count, mesh.size))[mesh.rank]
    found: list[T] = []
    problem = None
    try:
        found = [work(index) for index in range(mine.start, mine.stop)]
    except ValueError as error:
        problem = str(error)
    mesh.agree(problem)
    return [one for part in mesh.gather_objects(found) for one in part]
