"""Predicts images with a run's model: reads them, asks the model, and files the answers, on every rank.

Copies of the model share the images; where a copy has several ranks, all of them run every image, each its tile, channels or
stage.  Where copies share weights, each call of the model is collective: a copy that runs out of images asks about a blank one.
A file that cannot be read is left out and named; the others go on.  So is one that the model fails for, unless other ranks wait
in that call: then all ranks end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widefield.comm.mesh import World
from widefield.data import Dataset
from widefield.data.image import read_image, shape_and_dtype_of
from widefield.data.intensity import in_words
from widefield.data.map_style import image_of
from widefield.data.transforms import seed_of
from widefield.inference import loaded_on_ranks
from widefield.parallel.parallelize import evaluates_together
from widefield.prediction.answers import Answer, Asker
from widefield.prediction.boxes import BoxFiles
from widefield.prediction.cases import by_case
from widefield.prediction.filing import Filing
from widefield.prediction.inputs import Input, Left, find_inputs
from widefield.prediction.journal import PLACE
from widefield.prediction.labels import Kinds
from widefield.prediction.restored import RestoredFiles, suffix_of_restored
from widefield.prediction.transformed import Transformed, blank, ignore_label, transforms_of
from widefield.prediction.wide import LeftOutError, WideAsker, suffix_of, wide_file
from widefield.prediction.wishes import PLAIN, Wishes
from widefield.refusal import is_ours
from widefield.tasks import labels_of
from widefield.training.assemble import Parts
from widefield.training.given import NOTHING, Given
from widefield.training.patches import slide_with_tissue
from widefield.training.terminal import ImageProgress

READ_AHEAD = 8
"""How many images are read before they are needed."""


@dataclass(frozen=True)
class Predicted:
    """answers: in the order of the inputs, without pixels where these are in files.  lefts: what was left out, and why.

    output: the folder of the answers, or None.  weights: in words.  earlier: how many answers an earlier command gave.
    ignore: the label of pixels that data.read_evaluate leaves out.
    """

    answers: list[Answer]
    lefts: list[Left]
    output: Path | None
    weights: str
    earlier: int = 0
    ignore: int | None = None


def predict_files(
    run: Path,
    words: Sequence[str | Path],
    overrides: Sequence[str],
    world: World,
    *,
    output: Path | None = None,
    wishes: Wishes = PLAIN,
    weights: str | None = None,
    trust: bool = False,
    given: Given = NOTHING,
) -> Predicted:
    """Predict the files that `words` mean, on the ranks of `world`.  Every rank calls it, and gets all answers.

    output: the folder of the answers; None: none for labels of images, and `predictions` in the run folder for others.
    ValueError: no file is found, the folder cannot be used, or the wishes do not fit the run.
    """
    with loaded_on_ranks(run, overrides, world, weights=weights, trust=trust, given=given) as (parts, chosen):
        mesh, output = parts.mesh, output or (run / "predictions" if _has_files(parts) else None)
        mesh.together(lambda: (wishes.check(parts), transforms_of(parts)))
        images, lefts = mesh.together(lambda: find_inputs(words, beside=output, volumes=parts.dataset.dims == 3))
        if parts.dataset.channel_files:
            images, more = by_case(images, parts.dataset.channel_files)
            lefts = [*lefts, *more]
        images = mesh.gather_objects([_as_wide(image, parts, wishes) for image in images] if mesh.is_main else None)[0]
        kept = [key for key in overrides if not key.startswith(("mesh", "stream", "sharding", "pipeline"))]
        about = {"weights": chosen.sha256, "overrides": kept, "top": wishes.top, "flips": wishes.flips}
        about |= {"probabilities": wishes.probabilities, "overlays": wishes.overlays, "outlines": wishes.outlines}
        about |= {"sliding": wishes.sliding, "overlap": wishes.overlap, "compare": wishes.compare} if wishes.sliding else {}
        filing = None
        if output is not None:
            kinds = _kinds(parts, wishes) if _has_files(parts) else None
            filing, images = Filing.begin(output, kinds, about, images, mesh, overwrite=wishes.overwrite)
        session = _Session(parts, wishes, filing, {"run": str(run), **about})
        answers, more, earlier = session.answer_files(images)
        if filing is not None:
            filing.end(parts, session.about)
        found = [_cut(one, wishes.top) for one in answers]
        return Predicted(found, [*lefts, *more], output, chosen.text, earlier, ignore_label(parts))


def _as_wide(image: Input, parts: Parts, wishes: Wishes) -> Input:
    """The image with the suffix of its labels, or of the image that is its answer; wide where it is predicted by window."""
    if labels_of(parts.task) == "image":
        return replace(image, suffix=suffix_of_restored(image.path, parts.dataset))
    opened = wide_file(image.path, parts, every=wishes.sliding is not None)
    return image if opened is None else replace(image, suffix=suffix_of(opened), is_wide=True)


def _has_files(parts: Parts) -> bool:
    """Whether each answer has files of its own."""
    return parts.dataset.pixels or parts.dataset.labels == "boxes"


def _kinds(parts: Parts, wishes: Wishes) -> Kinds | RestoredFiles | BoxFiles:
    if labels_of(parts.task) == "boxes":
        return BoxFiles(tuple(parts.dataset.classes))
    if labels_of(parts.task) == "image":
        return RestoredFiles()
    layers, is_volume = labels_of(parts.task) == "layers", parts.dataset.dims == 3
    asked = (wishes.probabilities, wishes.overlays)
    return Kinds(parts.dataset.classes, layers, *asked, volumes=is_volume, outlines=wishes.outlines)


def _cut(answer: Answer, top: int) -> Answer:
    """The answer with its first classes only."""
    if answer.values is not None or answer.boxes is not None:
        return answer
    return replace(answer, classes=answer.classes[:top], probabilities=answer.probabilities[:top])


def predict_objects(parts: Parts, images: Sequence[Any], wishes: Wishes) -> list[Answer]:
    """The answers for paths, PIL images or tensors, on this rank alone, with the labels of pixels in memory.

    ValueError, after all others were tried: an image cannot be read, or is of another kind than the run's.
    """
    wishes.check(parts)
    session = _Session(parts, wishes, None)
    paths = [str(one) if isinstance(one, str | Path) else f"image {number}" for number, one in enumerate(images)]
    session.answer([_Asked(number, path, image) for number, (path, image) in enumerate(zip(paths, images, strict=True))])
    if session.lefts:
        raise ValueError("; ".join(left.reason for left in session.lefts[:5]))
    return [_cut(session.answers[number], wishes.top) for number in range(len(paths))]


@dataclass(frozen=True)
class _Asked:
    """An image that is asked about.  thing: a path, the paths of a case, or an object.

    file: where it is one of a command's inputs.
    """

    number: int
    path: str
    thing: Any
    file: Input | None = None


@dataclass
class _Session:
    """One rank's work.  about: the run, its weights and the options.  answers: by number of the image."""

    parts: Parts
    wishes: Wishes
    filing: Filing | None
    about: dict[str, Any] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    lefts: list[Left] = field(default_factory=list)

    def __post_init__(self) -> None:
        wishes, parts = self.wishes, self.parts
        top = wishes.top if labels_of(parts.task) == "class" else len(parts.dataset.classes)  # tables have all of them
        self.asker = Asker(parts, top, wishes.flips, wishes.probabilities is not None)
        parts.model.eval()
        self.together = evaluates_together(parts.model)

    def answer_files(self, images: Sequence[Input]) -> tuple[list[Answer], list[Left], int]:
        """Answers for files, those of all ranks, in the files' order; what was left out; how many answers were there before."""
        mesh, filing = self.parts.mesh, self.filing
        earlier = {} if filing is None else {number: filing.earlier(image) for number, image in enumerate(images)}
        asked = [
            _Asked(number, str(image.path), image.files if len(image.files) > 1 else image.path, image)
            for number, image in enumerate(images)
            if earlier.get(number) is None
        ]
        share = asked[mesh.copy :: mesh.copies]
        progress = ImageProgress(len(asked), each=mesh.copies) if mesh.is_main else None
        done = (lambda: None) if progress is None else progress.add
        self._answer_wide([one for one in share if one.file is not None and one.file.is_wide], done)
        whole = [one for one in share if one.file is None or not one.file.is_wide]
        if self.wishes.sliding is not None:
            self.lefts += [Left(one.path, "it is no image that --sliding can read by window; leave that out") for one in whole]
            whole = []
        self.answer(whole, done=done)
        if progress is not None:
            progress.close()
        found = mesh.gather_objects((self.answers, self.lefts) if mesh.is_first_of_copy else ({}, []))
        answers = {number: answer for number, answer in earlier.items() if answer is not None}
        before = len(answers)
        for of_rank, _ in found:
            answers |= of_rank
        return [answers[number] for number in sorted(answers)], [left for _, lefts in found for left in lefts], before

    def _answer_wide(self, asked: Sequence[_Asked], done: Callable[[], None]) -> None:
        """Answer for images that are predicted by window.  All ranks of a copy call it with the same ones."""
        for one in asked:
            assert self.filing is not None and one.file is not None and isinstance(self.filing.kinds, Kinds)
            files = self.filing.kinds.wide_files_of(one.file.name, one.file.suffix)
            try:
                answer = WideAsker(self.parts, self.filing.folder / PLACE, self.about, self.wishes)(
                    one.file, {kind: self.filing.folder / file for kind, file in files.items()}
                )
            except LeftOutError as error:  # on every rank of the copy
                self.lefts.append(Left(one.path, str(error)))
            else:
                if self.parts.mesh.is_first_of_copy:
                    self.answers[one.number] = self.filing.add(one.file, answer, None)
            done()

    def answer(self, asked: Sequence[_Asked], *, done: Callable[[], None] = lambda: None) -> None:
        """Answer for these images.  done: called after each.  All ranks of a copy call it with the same images."""
        for batch in self._batches(asked, done):
            self._any_copy_asks(True)
            self._answer_batch([one for one, _ in batch], [image for _, image in batch])
            for _ in batch:
                done()
        while self._any_copy_asks(False):
            self.asker([blank(self.parts)], ["a blank image"])

    def _any_copy_asks(self, mine: bool) -> bool:
        """Whether any copy has a batch left, where calls of the model are collective.  mine: whether this one has."""
        mesh = self.parts.mesh
        return self.together and bool(mesh.sum_(torch.tensor(float(mine), device=mesh.device)))

    def _batches(self, asked: Sequence[_Asked], done: Callable[[], None]) -> Iterator[list[tuple[_Asked, Transformed]]]:
        """Batches of images of one size, as they come; the rest at the end."""
        waiting: dict[tuple[int, ...], list[tuple[_Asked, Transformed]]] = {}
        for one, image in self._read(asked):
            if image is None:
                done()
                continue
            size = tuple(image.image.shape)
            batch = waiting.setdefault(size, [])
            batch.append((one, image))
            if len(batch) == self.wishes.batch_size:
                yield waiting.pop(size)
        yield from waiting.values()

    def _read(self, asked: Sequence[_Asked]) -> Iterator[tuple[_Asked, Transformed | None]]:
        """The images, read ahead by threads and transformed; None for one that a rank of this copy could not read."""
        read = partial(_pixels_of, parts=self.parts)
        with ThreadPoolExecutor(4) as pool:
            coming = [pool.submit(read, one.thing, one.path) for one in asked[:READ_AHEAD]]
            for number, one in enumerate(asked):
                if number + READ_AHEAD < len(asked):
                    later = asked[number + READ_AHEAD]
                    coming.append(pool.submit(read, later.thing, later.path))
                image, reason = None, ""
                try:
                    image = self.asker.transformed(coming[number].result())
                except ValueError as error:
                    reason = str(error)
                coming[number] = coming[0]  # so that the image's memory is freed
                yield one, self._agreed(one, image, reason)

    def _agreed(self, one: _Asked, image: Transformed | None, reason: str) -> Transformed | None:
        """The image, if all ranks of this copy could read the same."""
        shape = -1 if image is None else seed_of(*image.image.shape, *image.original.shape)
        least, most = self.parts.mesh.least_of_copy([shape, -shape])
        if least != -most:
            image, reason = None, reason or "another rank could not read it, or read another size"
        if image is None:
            self.lefts.append(Left(one.path, reason))
        return image

    def _answer_batch(self, asked: list[_Asked], images: list[Transformed]) -> None:
        """Answer for a batch; where the model fails, one by one, so that only the image that it fails for is left out."""
        try:
            answers = self.asker(images, [one.path for one in asked])
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if self.together or self.parts.mesh.copy_group is not None:  # other ranks may wait in a message
                raise
            if len(asked) == 1:
                reason = str(error) if is_ours(error) else f"the model fails for it: {type(error).__name__}: {error}"
                self.lefts.append(Left(asked[0].path, reason))
                return
            for one, image in zip(asked, images, strict=True):
                self._answer_batch([one], [image])
            return
        for one, image, answer in zip(asked, images, answers, strict=True):
            if self.filing is not None and one.file is not None and self.parts.mesh.is_first_of_copy:
                answer = self.filing.add(one.file, answer, image.original)
            self.answers[one.number] = answer


def _pixels_of(image: Any, path: str, *, parts: Parts) -> Tensor:
    """An image as a tensor.  ValueError: the run was trained on images with other channels or another dtype."""
    dataset = parts.dataset
    if dataset.resampling is not None:
        cure = "predict a file that tells its spacing, as NIfTI, with --output"
        if labels_of(parts.task) != "pixels":
            cure = "that is done by window, for one class per pixel alone: train without data.options.spacing to predict it"
        raise ValueError(
            f"{path} is taken as it is, and this run brings images to a spacing of {dataset.resampling.in_words()} mm; {cure}"
        )
    if isinstance(image, tuple):
        return _checked(torch.cat([read_image(file, 1, dataset.dtype, dims=dataset.dims) for file in image]), path, dataset)
    if isinstance(image, str | Path):
        if dataset.floating and not shape_and_dtype_of(image, dims=dataset.dims)[1].is_floating_point:
            raise ValueError(
                f"{path} is a file, and this run was trained on floating-point tensors that a Python program's dataset made of "
                "its images; pass such tensors, (C, H, W) or (C, D, H, W)"
            )
        data = parts.config.data
        if data.tissue is not None and data.patches is None:
            return _checked(slide_with_tissue(path, data.tissue, dataset), path, dataset)
        return _checked(read_image(path, dataset.channels, dataset.dtype, dims=dataset.dims), path, dataset)
    return _checked(image_of(image, path), path, dataset)


def _checked(pixels: Tensor, path: str, dataset: Dataset) -> Tensor:
    """The pixels.  ValueError: the run was trained on images with other dims, other channels or another dtype."""
    if pixels.ndim - 1 != dataset.dims:
        kinds = {2: "images (C, H, W)", 3: "volumes (C, D, H, W)"}
        raise ValueError(
            f"{path} is of shape {tuple(pixels.shape)} and this run was trained on {kinds[dataset.dims]}; pass such ones"
        )
    own, trained = in_words(pixels.dtype), in_words(dataset.dtype)
    if (len(pixels), own) != (dataset.channels, trained):
        raise ValueError(
            f"{path} has {len(pixels)} channels of {own} numbers and this run was trained on "
            f"{dataset.channels} of {trained} ones; pass images as its dataset gives them"
        )
    return pixels
