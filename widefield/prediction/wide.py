"""Labels of the pixels of an image that is read and written by window, so that neither is ever in memory as a whole.

The model runs tile after tile as a stream, on each rank of the image's tiles in space, so the labels are those of the whole
image: nothing is blended, and there are no seams.  They go to a plain file first (raw_labels.py), and probabilities with them;
at the end to files in the image's own format, with its place in the world (wide_files.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from widefield.data.intensity import moments_of_bands
from widefield.data.windowed_files import size_of
from widefield.geometry import Interval
from widefield.geometry.box import slices
from widefield.image_files import ImageFile, is_image_file, is_series, open_image
from widefield.image_files.image_file import Array, ImageFileError
from widefield.image_files.opening import has_placed_labels, label_format_of
from widefield.prediction.answers import Answer, mirrors_of
from widefield.prediction.inputs import Input
from widefield.prediction.raw_labels import RawLabels
from widefield.prediction.sliding import SlidingWindows, blended
from widefield.prediction.transformed import ignore_label
from widefield.prediction.wide_files import Apart, WideFiles, apart_of, nothing_of, slabs_of, steps_of
from widefield.prediction.wide_network import Answering
from widefield.prediction.wide_source import WideSource
from widefield.prediction.wishes import PLAIN, Wishes
from widefield.refusal import is_ours
from widefield.streaming.api import stream, stream_to
from widefield.streaming.storage.windowed_image import WindowedImage
from widefield.tasks import labels_of
from widefield.training.assemble import Parts
from widefield.training.terminal import ImageProgress

T = TypeVar("T")
WIDE_PIXELS = 2**26
"""From so many on, an image that can be read by window is; one that has a place in the world is in any case."""
TILE = {2: 1024, 3: 128}
"""Pixels of a tile's side, by the dims of the image, where neither the recipe nor the command says how it is cut."""


HEARD_SECONDS = 10.0
"""How often ranks hear from each other while one of them writes files; a message may take minutes, and files longer."""


class LeftOutError(ValueError):
    """An image is left out, on every rank of a copy of the model; the text says why."""


def wide_file(path: Path, parts: Parts, *, every: bool = False) -> ImageFile | None:
    """The image, opened, where its labels are to be written by window; None: it is read as a whole, and errors show there.

    every: whatever its size and place.
    """
    if labels_of(parts.task) != "pixels" or not (is_image_file(path) or is_series(path)):
        return None
    try:
        image = open_image(path)
    except (ImageFileError, OSError):
        return None
    if parts.dataset.resampling is not None:
        return image
    info = image.info
    if len(size_of(image)) != len(parts.dataset.evaluate.shape) - 1:  # type: ignore[attr-defined]  # slices, or a volume of them
        return None
    is_large = info.by_window and math.prod(info.size) >= WIDE_PIXELS
    return image if every or info.affine or has_placed_labels(image) or is_large else None


def suffix_of(image: ImageFile) -> str:
    """Of the file of labels for an image."""
    return label_format_of(image).LABEL_SUFFIX


@dataclass(frozen=True)
class WideAsker:
    """A function from an open image to its files.  Every rank of a copy of the model calls it with the same one.

    folder: where labels are while they are made.  about: the weights and options, which make them what they are.
    """

    parts: Parts
    folder: Path
    about: Mapping[str, Any]
    wishes: Wishes = PLAIN

    def check(self, image: ImageFile) -> None:
        """ValueError: the run's recipe, or the plan, wants the image as a whole."""
        parts, mesh = self.parts, self.parts.mesh
        steps = [step if isinstance(step, str) else next(iter(step)) for step in parts.config.data.read_evaluate]
        if steps:
            raise ValueError(
                f"{image.path} is predicted by window, and data.read_evaluate has {steps[0]}, which wants it as a whole; add "
                "data.read_evaluate=[] where the model takes images as they are"
            )
        cut = [name for name in ("shard", "channel", "stage") if getattr(mesh.plan, name) > 1]
        if cut:
            raise ValueError(
                f"{image.path} is predicted by window, tile after tile, which mesh.{cut[0]}={getattr(mesh.plan, cut[0])} "
                "does not do; leave it out, and set 'mesh.space=[2,1]' for two ranks"
            )

    def __call__(self, asked: Input, files: Mapping[str, Path]) -> Answer:
        """Write the files of an image; returns the answer with the path of its labels, on the first rank of the copy complete.

        files: by kind, as `Kinds.wide_files_of` has them.
        LeftOutError, on every rank of the copy: the image does not fit the run, it cannot be opened, or the disk refuses.
        """
        mesh = self.parts.mesh
        image = self._agreed(lambda: open_image(asked.path))
        self._agreed(lambda: self.check(image))
        source = self._agreed(lambda: self._source(image, asked.files or (asked.path,)))
        sliding, wishes = self.wishes.sliding, self.wishes
        raw = self._made(image, source, self._raw("wide", image, asked.name), sliding)
        exact = self._raw("exact", image, asked.name, likely=False) if wishes.compare else None
        exact = None if exact is None else self._made(image, source, exact, None)
        counts, apart = self._meanwhile(
            lambda: self._filed(raw, exact, image, source, files) if mesh.is_first_of_copy else (None, None)
        )
        image.close()
        if counts is None:
            return Answer(str(asked.path), [], [])
        return replace(self._answer(asked, files["labels"], counts), apart=apart)

    def _source(self, image: ImageFile, files: Sequence[Path]) -> WideSource:
        """ValueError: files that do not fit each other or the run, or blended windows on another grid than the file's."""
        source = WideSource.of(image, files, self.parts.dataset)
        if self.wishes.sliding is not None and not source.map.is_identity:
            raise ValueError(
                f"{image.path} is brought to the run's spacing, on whose grid --sliding does not blend; leave it out: labels "
                "are those of the whole image then"
            )
        return source

    def _made(self, image: ImageFile, source: WideSource, raw: RawLabels, sliding: tuple[int, ...] | None) -> RawLabels:
        """Labels in a plain file, by all ranks of the copy: blended ones of windows, or the whole image's."""
        mesh = self.parts.mesh
        self._agreed(lambda: raw.begin(self._fingerprint(image, source, sliding)) if mesh.is_first_of_copy else None)
        self._agreed(raw.open)
        try:
            if sliding is None:
                self._fill(raw, image, source)
            else:
                windows = SlidingWindows(sliding, self.wishes.overlap)
                self._meanwhile(lambda: self._fill_blended(raw, image, source, windows))
        except (ValueError, OSError, RuntimeError) as error:
            if mesh.copy_group is not None:  # other ranks may wait in a message
                raise
            raise LeftOutError(_reason(error)) from None
        self._agreed(lambda: None)  # all ranks have written theirs
        return raw

    def _answer(self, asked: Input, output: Path, counts: Array) -> Answer:
        """counts: how many pixels have each number."""
        classes = self.parts.dataset.classes
        counted = counts[: len(classes)]
        shares = counted / max(1, int(counted.sum()))
        order = np.argsort(-shares, kind="stable")
        names, left_out = [classes[number] for number in order], int(counts.sum() - counted.sum())
        return Answer(str(asked.path), names, shares[order].tolist(), labels=str(output), left_out=left_out)

    def _agreed(self, work: Callable[[], T]) -> T:
        """What `work` gives.  LeftOutError on every rank of the copy where it fails on one."""
        problem, result = "", None
        try:
            result = work()
        except (ValueError, OSError) as error:
            problem = _reason(error)
        if self.parts.mesh.least_of_copy([int(not problem)])[0] == 0:
            raise LeftOutError(problem or "another rank, which shares the image, has an error with it")
        return result  # type: ignore[return-value]

    def _meanwhile(self, work: Callable[[], T]) -> T:
        """As `_agreed`, of work that sends no message and may take longer than a message may: ranks hear from each other."""
        mesh = self.parts.mesh
        if mesh.copy_group is None:
            return self._agreed(work)
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(work)
            while not mesh.least_of_copy([len(wait([coming], timeout=HEARD_SECONDS).done)])[0]:
                continue
        return self._agreed(coming.result)

    # ------------------------------------------------------------------------------------------ labels

    def _raw(self, place: str, image: ImageFile, name: Path, *, likely: bool = True) -> RawLabels:
        kinds = {None: None, "npy": "float32", "png": "uint16"}
        kind = kinds[self.wishes.probabilities] if likely else None
        planes = None if kind is None else (len(self.parts.dataset.classes), kind)
        return RawLabels(self.folder / place / name, size_of(image), self._dtype, self.parts.mesh.rank, planes)

    @property
    def _dtype(self) -> str:
        return "uint8" if len(self.parts.dataset.classes) <= 255 else "uint16"

    @property
    def _nothing(self) -> int:
        """The label of pixels without an answer: where the image says that it has no pixels, or nodata."""
        label = ignore_label(self.parts)
        return label if label is not None and label >= 0 else int(np.iinfo(self._dtype).max)

    def _fingerprint(self, image: ImageFile, source: WideSource, sliding: tuple[int, ...] | None) -> dict[str, Any]:
        stamp = [number for file in source.files for number in (file.stat().st_size, file.stat().st_mtime_ns)]
        tiles = self._tiles_in_words(image) if sliding is None else "blended"  # whose blocks do not depend on ranks
        about_labels = {
            key: value for key, value in self.about.items() if key not in ("top", "overlays", "outlines", "compare")
        }
        return {**about_labels, "stamp": stamp, "reader": image.info.reader, "tiles": tiles}

    def _tiles_in_words(self, image: ImageFile) -> str:
        """What the windows depend on."""
        asked = self.parts.config.stream
        settings = self._tiles(image) if asked is None else asked.model_dump(exclude_defaults=True)
        return f"{settings} on {self.parts.mesh.plan.space}"

    def _tiles(self, image: ImageFile) -> list[int]:
        size = size_of(image)
        spread = self.parts.mesh.plan.space or [1] * len(size)
        return [max(1, -(-extent // (TILE[len(size)] * ranks))) for extent, ranks in zip(size, spread, strict=True)]

    def _fill(self, raw: RawLabels, image: ImageFile, source: WideSource) -> None:
        """Write this rank's windows of the labels, those that are not written yet."""
        asked, parts, wishes = self.parts.config.stream, self.parts, self.wishes
        settings: dict[str, Any] = {"tiles": self._tiles(image)} if asked is None else asked.model_dump(exclude_defaults=True)
        mirrors = mirrors_of(len(raw.size)) if wishes.flips else [()]
        likely, size = raw.likely is not None, None if source.map.is_identity else raw.size
        answering = Answering(parts.model, parts.task.answers, self._dtype, mirrors, probabilities=likely, size=size).eval()
        streamed = stream(answering, **settings)
        tiles = settings.get("tiles")
        progress = ImageProgress(math.prod(tiles), noun="tiles") if parts.mesh.is_main and tiles else None

        def write(window: tuple[slice, ...], tile: Tensor) -> None:
            self._write(raw, image, window[-len(raw.size) :], tile[0].cpu().numpy())
            if progress is not None:
                progress.add()

        with torch.no_grad(), parts.arithmetic.autocast():
            stream_to(write, streamed, self._reader(source), is_written=raw.has)
        if progress is not None:
            progress.close()

    def _fill_blended(self, raw: RawLabels, image: ImageFile, source: WideSource, windows: SlidingWindows) -> None:
        """Write this rank's blocks of the labels, those that are not written yet; no message is sent."""
        parts, mesh, reader = self.parts, self.parts.mesh, self._reader(source)
        answering = Answering(nn.Identity(), parts.task.answers, self._dtype, probabilities=raw.likely is not None)
        blocks = windows.blocks(raw.size)[mesh.grid.index :: max(1, mesh.grid.size)]
        progress = ImageProgress(len(blocks), noun="blocks") if mesh.is_main else None
        for block in blocks:
            window = slices(block)
            if not raw.has(window):
                with torch.no_grad(), parts.arithmetic.autocast():
                    found = answering(blended(parts.model, reader, block, windows))
                self._write(raw, image, window, found[0].cpu().numpy())
            if progress is not None:
                progress.add()
        if progress is not None:
            progress.close()

    def _write(self, raw: RawLabels, image: ImageFile, window: tuple[slice, ...], found: Array) -> None:
        """found: what `Answering` gives for the window: numbers, or probabilities and numbers."""
        labels = found if raw.likely is None else found[-1].astype(self._dtype)
        valid = image.valid(_of_file(image, window))
        valid = None if valid is None else valid.reshape(labels.shape)
        if raw.likely is not None and raw.probabilities is not None:
            likely, dtype = steps_of(found[:-1], raw.likely[1]), raw.likely[1]
            likely = likely if valid is None else np.where(valid, likely, np.array(nothing_of(dtype), dtype=dtype))
            raw.probabilities.write(window, likely)
        raw.write(window, labels if valid is None else np.where(valid, labels, labels.dtype.type(self._nothing)))

    def _reader(self, source: WideSource) -> WindowedImage:
        """The image as the network gets it, by window."""
        parts, dataset, mesh = self.parts, self.parts.dataset, self.parts.mesh
        preparation = parts.preparation(train=False)
        moments = None if dataset.intensity.each_image is None else self._moments(source)

        def read(window: tuple[slice, ...]) -> Tensor:
            pixels = source.read(tuple(Interval(one.start, one.stop) for one in window[2:]))
            return preparation.scaled(pixels[None].to(mesh.device), moments)[:, window[1]]

        shape = torch.Size((1, dataset.channels, *source.size))
        return WindowedImage(read, shape, parts.arithmetic.dtype, mesh.device, mesh.grid)

    def _moments(self, source: WideSource) -> Tensor:
        """(1, C, 2): mean and deviation of the whole image."""
        area = self.parts.dataset.intensity.each_image
        assert area is not None
        bands = partial(_bands_of, source)
        return moments_of_bands(bands, area)[None]

    # ------------------------------------------------------------------------------------------ the file

    def _filed(
        self, raw: RawLabels, exact: RawLabels | None, image: ImageFile, source: WideSource, files: Mapping[str, Path]
    ) -> tuple[Array, Apart | None]:
        """Make the files, and give the plain ones' place back; returns how many pixels have each number.

        exact: labels to compare with; also returned: at how many pixels they are others.
        """
        dataset = self.parts.dataset
        apart = None if exact is None else apart_of(raw, exact, self._nothing)
        kind = {"source": source.as_stored(), "notes": self._notes()}
        counts = WideFiles(files, image, tuple(dataset.classes), self._nothing, **kind).write(raw)
        for one in (raw, exact):
            if one is not None:
                one.end()
        return counts, apart

    def _notes(self) -> dict[str, str]:
        sliding = self.wishes.sliding
        words = "x".join(map(str, sliding or ()))
        how = {} if sliding is None else {"made": f"windows of {words} pixels, overlap {self.wishes.overlap:g}, blended"}
        return {key: str(value) for key, value in self.about.items() if key in ("run", "weights")} | how


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if is_ours(error) or isinstance(error, OSError) else f"the model fails for it: {type(error).__name__}: {text}"


def _bands_of(source: WideSource) -> Iterator[Tensor]:
    """The image as the network gets it, some rows or slices at a time."""
    return map(source.read, slabs_of(source.size, source.channels * source.dtype.itemsize))


def _of_file(image: ImageFile, window: tuple[slice, ...]) -> tuple[slice, ...]:
    """The window of an image that its file has as a volume of one slice."""
    return (slice(0, 1), *window) if len(image.info.size) > len(window) else window
