"""The loader that reads the samples of each rank, in the order of order.py."""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from widefield import cores
from widefield.config import DataConfig
from widefield.data import BadImageError, Images, WindowedImages
from widefield.data.batch import Batch, Window
from widefield.data.boxed import BoxedSource, moved_rows
from widefield.data.image_moments import MeasuredImages, measured
from widefield.data.intensity import Intensity
from widefield.data.mixing import mixed
from widefield.data.order import Key
from widefield.data.pixel_transforms import PixelTransforms, without_labels
from widefield.data.sources import OfImages, Source, read_seeded
from widefield.data.targets import check_target, check_target_image, part_of
from widefield.data.transforms import Transforms
from widefield.detection.targets import stacked
from widefield.geometry.box import full_box, slices
from widefield.image_files.bytes_read import bytes_read
from widefield.private_torch.loaders import shutdown_workers


@dataclass(frozen=True)
class _Sample:
    """One sample as read.  shape: (C, *pixels) of the whole image."""

    key: Key
    image: Tensor
    target: int | Tensor
    shape: tuple[int, ...]
    window: Window | None
    moments: Tensor | None = None
    """See Batch.moments."""


@dataclass(frozen=True)
class SampleReader(Dataset):
    """Reads the samples of a list of keys into a Batch.  Runs in worker processes."""

    images: Images
    transforms: Transforms
    augment: Transforms
    """Random augmentation, where it does not run on the device; see `reader_of`."""
    num_classes: int
    seed: int
    mixup: float = 0.0
    cutmix: float = 0.0
    bad_images: Literal["stop", "skip"] = "stop"
    window: Callable[[tuple[int, ...]], Window] | None = None
    """From the size of an image, (H, W) or (D, H, W), the window to read; None reads the whole.

    Random transforms of images with one label get the whole image anyway.
    """
    ignore: int | None = None
    """A label besides the classes, of pixels that do not count."""
    intensity: Intensity = Intensity()
    moves: PixelTransforms | None = None
    """All transforms, where pixels have labels; the fields `transforms` and `augment` are not used then."""
    image_scale: int | None = None
    """Of targets that are images, how many of their pixels an image's pixel is along each dim; None of other targets."""
    visible: float | None = None
    """Of targets that are boxes, see `moved_rows`; None of other targets."""
    views: int = 1
    """How often each image is drawn, with transforms of its own; the views are joined by their channels."""

    def __post_init__(self) -> None:
        if self.intensity.each_image is not None and not isinstance(self.images, MeasuredImages):
            object.__setattr__(self, "images", measured(self.images, self.intensity.each_image))

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        """The batch of these samples.  Errors are returned as its `problem`, so that all ranks can stop together.

        Without keys it is idle: a pass in which no rank has a sample.
        """
        before = bytes_read()
        return replace(self._batch_or_problem(keys), read=bytes_read() - before)

    def _batch_or_problem(self, keys: Sequence[Key]) -> Batch:
        nothing, asked = torch.zeros(0), [key.index for key in keys]
        if not keys:
            return Batch(nothing, nothing, nothing, idle=True)
        try:
            return self._batch(keys)
        except ValueError as error:
            problem = str(error)
        except Exception:  # of a transform, for example; its traceback helps the user
            problem = f"reading a batch failed:\n{traceback.format_exc()}"
        return Batch(nothing, nothing, nothing, problem=problem, asked=asked, readable=[False] * len(keys))

    def _images_of(self, key: Key) -> Images:
        """The images as they are in the key's epoch: patches lie elsewhere in each."""
        of_epoch = getattr(self.images, "of_epoch", None)
        return self.images if of_epoch is None else of_epoch(key.epoch)

    def _batch(self, keys: Sequence[Key]) -> Batch:
        skipped: list[str] = []
        tried = [self._read(key, skipped) for key in keys]
        read = [sample for sample in tried if sample is not None]
        real = bool(read) and keys[0].real
        if not read:
            read = [self._dummy(keys[0])]
        keys_read = [sample.key for sample in read]
        batch = Batch(
            image=self._stack(read),
            target=self._targets(read),
            index=torch.tensor([key.index for key in keys_read]),
            seeds=[key.seed(self.seed, "augment") for key in keys_read],
            samples=len(read) if real else 0,
            skipped=skipped,
            asked=[key.index for key in keys],
            readable=[sample is not None for sample in tried],
            whole_shape=None if self.window is None else read[0].shape,
            window=read[0].window,
            shown=getattr(self.images, "shown", None) or self.intensity.shown(read[0].image.dtype),
            moments=None if read[0].moments is None else torch.stack([cast(Tensor, sample.moments) for sample in read]),
        )
        if not self.mixup and not self.cutmix:
            return batch
        where = [(key.epoch, key.position) for key in keys_read]
        return mixed(batch, where, seed=self.seed, mixup=self.mixup, cutmix=self.cutmix)

    def _targets(self, read: list[_Sample]) -> Tensor:
        targets = [torch.as_tensor(sample.target) for sample in read]
        return torch.stack(targets) if self.visible is None else stacked(targets, [sample.shape[1:] for sample in read])

    def _read(self, key: Key, skipped: list[str]) -> _Sample | None:
        try:
            return joined([self._view(key, number) for number in range(self.views)])
        except BadImageError as error:
            if self.bad_images == "stop":
                raise BadImageError(
                    f"{error}; mend or remove it, or set data.bad_images=skip to leave such images out"
                ) from None
            if key.real:  # a dummy is another rank's sample, which counts it
                skipped.append(self.images.name_of(key.index))
            return None

    def _view(self, key: Key, number: int) -> _Sample:
        """View number `number` of an image; the first one is what there is without further ones."""
        purposes = [f"{step} of view {number}" if number else step for step in ("read", "augment")]
        return self._sample(key, *(key.seed(self.seed, purpose) for purpose in purposes))

    def _sample(self, key: Key, read_seed: int, augment_seed: int) -> _Sample:
        """The image, or this rank's window of it, with the moments of the image as it is in its file where they are wanted."""
        if self.visible is not None:
            sample = self._boxed(self.visible, key, {"read": read_seed, "augment": augment_seed})
        elif self.moves is not None:
            sample = self._moved(self.moves, key, {"read": read_seed, "augment": augment_seed})
        else:
            sample = self._plain(key, read_seed, augment_seed)
        known = isinstance(self.images, MeasuredImages)
        return replace(sample, moments=self.images.moments(key.index)) if known else sample  # type: ignore[attr-defined]

    def _plain(self, key: Key, read_seed: int, augment_seed: int) -> _Sample:
        """A sample whose transforms see the image alone.  They may depend on all pixels, so with any the whole is read."""
        images, plain = self._images_of(key), not self.transforms.steps and not self.augment.steps
        if self.window is not None and plain and isinstance(images, WindowedImages):
            shape = tuple(images.shape(key.index))
            window = self.window(shape[1:])
            image, target = images.read_window(key.index, window)
            self._check_labels(key, image, target)
            return _Sample(key, image, target, shape, window)
        image, target = read_seeded(images, key.index, key.seed(self.seed, "dataset"))
        self._check_labels(key, image, target)
        image = self.augment(self.transforms(image, read_seed), augment_seed)
        shape = tuple(image.shape)
        if self.window is None:
            return _Sample(key, image, target, shape, None)
        window = self.window(shape[1:])
        return _Sample(key, image[..., *slices(window)], part_of(target, window, scale=self.image_scale or 1), shape, window)

    def _moved(self, moves: PixelTransforms, key: Key, seeds: dict[str, int]) -> _Sample:
        """The image and its labels, or this rank's window of them, moved as one."""
        seed = key.seed(self.seed, "dataset")
        check, scale = partial(self._check_labels, key), self.image_scale or 1
        source: Source | OfImages = OfImages(self._images_of(key), key.index, seed=seed, check=check, scale=scale)
        target, index = None, None if hasattr(self.images, "of_epoch") else key.index  # what is kept is of the same pixels
        try:
            if not moves.labelled:
                image, target = source.sample()
                source = without_labels(image)
            view = moves(source, seeds, window_of=self.window, index=index)
        except BadImageError:
            raise
        except ValueError as error:
            raise ValueError(f"{self.images.name_of(key.index)}: {error}") from None
        return _Sample(key, view.image, view.labels if target is None else target, view.shape, view.window)

    def _boxed(self, visible: float, key: Key, seeds: dict[str, int]) -> _Sample:
        """The image, or this rank's window of it, and all its boxes, moved as one."""
        name, seed = self.images.name_of(key.index), key.seed(self.seed, "dataset")
        source = BoxedSource(self._images_of(key), key.index, seed=seed, classes=self.num_classes)
        if self.moves is None:
            size = source.size
            window = None if self.window is None else self.window(size)
            image, _ = source.read(full_box(size) if window is None else window)
            return _Sample(key, image, source.rows, (len(image), *size), window)
        try:
            view = self.moves(source, seeds, window_of=self.window)
        except BadImageError:
            raise
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return _Sample(key, view.image, moved_rows(source.rows, view.maps, visible=visible), view.shape, view.window)

    def _check_labels(self, key: Key, image: Tensor, target: int | Tensor) -> None:
        name, classes = self.images.name_of(key.index), self.num_classes
        if self.image_scale is None:
            check_target(name, image, target, num_classes=classes, ignore=self.ignore)
        else:
            check_target_image(name, image, target, channels=classes, scale=self.image_scale)

    def _dummy(self, key: Key) -> _Sample:
        """The next image that can be read, for its shape."""
        for offset in range(len(self.images)):
            near = replace(key, index=(key.index + offset) % len(self.images), real=False)
            try:
                return joined([self._sample(near, 0, 0)] * self.views)
            except BadImageError:
                continue
        raise BadImageError(f"none of the {len(self.images)} images can be read; the first is {self.images.name_of(0)}")

    def _stack(self, read: list[_Sample]) -> Tensor:
        first = read[0]
        for other in read:
            if other.shape != first.shape:
                a, b = self.images.name_of(first.key.index), self.images.name_of(other.key.index)
                axes = "C, H, W" if first.image.ndim == 3 else "C, D, H, W"
                raise ValueError(
                    f"images of one batch differ in size ({axes}): {a} is {first.shape} and {b} is {other.shape}; "
                    f"{_same_size(first)}"
                )
        return torch.stack([sample.image for sample in read])


def joined(views: list[_Sample]) -> _Sample:
    """The views of an image as one sample, joined by their channels.  ValueError: they differ in size."""
    first = views[0]
    if len(views) == 1:
        return first
    odd = next((view for view in views if view.shape != first.shape), None)
    if odd is not None:
        raise ValueError(
            f"two views of an image are {first.shape} and {odd.shape} (C, *pixels) and one size is wanted; let data.read end "
            "in a transform that gives all images one size, as RandomResizedCrop: {size: [H, W]}"
        )
    shape = (len(views) * first.shape[0], *first.shape[1:])
    return replace(first, image=torch.cat([view.image for view in views]), shape=shape)


def _same_size(sample: _Sample) -> str:
    """What gives all images of a batch one size."""
    alone = "set data.batch_size and data.evaluate_batch_size to 1"
    if sample.image.ndim == 4:
        crops = "RandomCrop: {size: [D, H, W], pad_if_needed: true} to data.read and CenterCrop: {size: [D, H, W]}"
        return f"add {crops} to data.read_evaluate, or {alone}"
    if isinstance(sample.target, int):
        return "add RandomResizedCrop: {size: [H, W]} to data.read and Resize: {size: [H, W]} to data.read_evaluate"
    crops = "RandomCrop: {size: [H, W], pad_if_needed: true} or Resize: {size: [H, W]}"
    return f"add {crops} to data.read, and one of them to data.read_evaluate, or {alone}"


_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of <sys/prctl.h>."""


def _collate(batch: Any) -> Any:
    return batch


def _start_worker(_: int) -> None:
    """Make a worker ignore signals, and die with its rank.

    Launchers send signals to all processes, and the rank still needs its workers until its step is done.  If the rank is
    killed, its workers must die too (on Linux at once, elsewhere torch ends them within 5 s): they inherit its connections, and
    other ranks wait for it as long as these are open.
    """
    torch.set_num_threads(1)
    cores.unbind()  # of its rank, which needs its own itself
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def load_batches(reader: SampleReader, sampler: Sampler[list[Key]], *, workers: int, device: torch.device) -> DataLoader:
    """A loader of this rank's Batches in the sampler's order, with `workers` processes (0: in this process)."""
    return DataLoader(
        reader,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker,
    )


def close(batches: Iterator[Batch]) -> None:
    """End the worker processes of a loader's iterator now, not when it is garbage collected."""
    shutdown_workers(batches)


def augments_on_device(listed: Sequence[Any], device: torch.device, *, cut: bool, moves_as_one: bool) -> bool:
    """Whether data.augment runs on the device, image by image.

    Not on the CPU, which the loader's workers leave free; not where images are cut over ranks, since it may need the whole
    image; nor where it moves labels of pixels or is a user's own, since images go to the device without their labels.
    """
    moves_labels = moves_as_one and not all(
        step.keeps_pixels_in_place for step in Transforms(listed, field="data.augment").steps
    )
    return device.type != "cpu" and not cut and not moves_labels


def reader_of(
    config: DataConfig,
    images: Images,
    *,
    num_classes: int,
    seed: int,
    train: bool,
    device: torch.device,
    window: Callable[[tuple[int, ...]], Window] | None = None,
    ignore: int | None = None,
    intensity: Intensity | None = None,
    pixels: bool = False,
    moves_as_one: bool | None = None,
    dims: int = 2,
    image_scale: int | None = None,
    boxes: bool = False,
) -> SampleReader:
    """The reader that a config asks for; pixels, boxes: what has labels; moves_as_one: see Dataset, None for as `pixels`.

    Random augmentation runs in the reader where `augments_on_device` does not say that it runs in `Preparation`.
    """
    moves_as_one = pixels if moves_as_one is None else moves_as_one
    on_device = augments_on_device(config.augment, device, cut=window is not None, moves_as_one=moves_as_one)
    read = Transforms(config.read if train else config.read_evaluate, field="data.read" if train else "data.read_evaluate")
    augment = Transforms(config.augment if train and not on_device else [], field="data.augment")
    about = {"ignore": ignore if pixels else 0, "labelled": pixels, "dims": dims, "image_scale": image_scale}
    moves = PixelTransforms(read, augment, num_classes=num_classes, **about) if moves_as_one else None
    common: dict[str, Any] = {"num_classes": num_classes, "seed": seed, "window": window, "ignore": ignore}
    return SampleReader(
        images=images,
        transforms=read,
        augment=augment,
        moves=moves if moves is not None and moves.does_anything else None,
        **common,
        **({"mixup": config.mixup, "cutmix": config.cutmix} if train else {}),
        bad_images=config.bad_images,
        intensity=intensity or Intensity(),
        image_scale=image_scale,
        visible=config.visible if boxes else None,
    )
