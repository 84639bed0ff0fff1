"""The files of an evaluation in a run folder: evaluation.json, evaluation.csv, and the pictures in mistakes/ and samples/."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from widefield.data import Images, spacing_if_told
from widefield.data.image import write_image, write_labels
from widefield.training.disk import replace_text
from widefield.training.drawn_boxes import with_boxes
from widefield.training.evaluation import Evaluation, Mistake
from widefield.training.sample_grid import write_grid
from widefield.training.scores import csv_of
from widefield.training.thumbnails import Thumbnail, shown_in_words
from widefield.training.volume_thumbnails import VIEWS


@dataclass(frozen=True)
class Picture:
    """One of the worst mistakes, as the report shows it."""

    id: str
    picture: str
    truth: str
    prediction: str
    probability: float | None
    loss: float


def write_evaluation(
    folder: Path,
    evaluation: Evaluation,
    *,
    step: int,
    epoch: float,
    classes: list[str],
    images: Images,
    attempt: Callable[[str, Callable[[], Any]], Any] = lambda what, work: work(),
) -> None:
    """Write evaluation.json, with thumbnails of the worst mistakes or, where pixels have labels, of the first images.

    attempt: calls a function that writes, named by the first argument; where it returns None that file is left out.
    """
    pieces = {piece.index: piece for piece in evaluation.pictures}
    values = _values(evaluation)
    values |= {"step": step, "epoch": epoch, "classes": classes, "shown": shown_in_words(evaluation.channels)}
    values["mistakes"] = [
        asdict(_picture(folder, number, mistake, pieces.get(mistake.index), classes, images, attempt))
        for number, mistake in enumerate(evaluation.mistakes)
    ]
    for stale in sorted((folder / "mistakes").glob("*.png"))[len(evaluation.mistakes) :]:
        stale.unlink(missing_ok=True)
    is_made = evaluation.labels == "noise"
    if is_made and evaluation.pieces:
        values["grid"] = attempt("the pictures of samples", partial(write_grid, folder, evaluation.pieces, step=step))
    samples = [
        attempt("the pictures of evaluated images", partial(_write_sample, folder, list(pieces), images, index))
        for index, pieces in groupby([] if is_made else evaluation.pieces, key=lambda piece: piece.index)
    ]
    values["samples"] = [sample for sample in samples if sample is not None]
    attempt("evaluation.json", lambda: replace_text(folder / "evaluation.json", json.dumps(values) + "\n"))
    table = csv_of(replace(evaluation, classes=classes))
    attempt("evaluation.csv", lambda: replace_text(folder / "evaluation.csv", table))


def _values(evaluation: Evaluation) -> dict[str, Any]:
    """What evaluation.json has of the evaluation itself, without its pictures."""
    omitted = ("mistakes", "pieces", "pictures", "channels", "seconds")
    values = {key: value for key, value in vars(evaluation).items() if key not in omitted}
    columns = {name: [_or_none(value) for value in column] for name, column in evaluation.columns.items()}
    curves = {name: [[_or_none(value) for value in row] for row in rows] for name, rows in evaluation.curves.items()}
    return values | {"columns": columns, "curves": curves}


def write_scores(folder: Path, evaluation: Evaluation) -> str:
    """Write evaluated.json and evaluated.csv: of another evaluation than those of training, whose files stay.

    Returns their paths in words.  ValueError: the folder cannot be written.
    """
    try:
        replace_text(folder / "evaluated.json", json.dumps(_values(evaluation)) + "\n")
        replace_text(folder / "evaluated.csv", csv_of(evaluation))
    except OSError as error:
        raise ValueError(
            f"the scores above cannot be written to {folder} ({error}); copy the run folder to where you may write"
        ) from None
    return f"{folder / 'evaluated.json'} and evaluated.csv"


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _picture(
    folder: Path, number: int, mistake: Mistake, piece: Thumbnail | None, classes: list[str], images: Images, attempt: Any
) -> Picture:
    """What the report shows of a mistake; its thumbnail is written to mistakes/, and `picture` is "" where there is none."""
    file = folder / f"mistakes/{number:02}.png"
    written = None if piece is None else attempt("the pictures of mistakes", partial(_write_picture, piece, file, mistake))
    return Picture(
        images.name_of(mistake.index),
        "" if written is None else f"mistakes/{file.name}",
        _words(mistake.truth, classes),
        _words(mistake.prediction, classes),
        mistake.probability,
        mistake.loss,
    )


def _words(answer: int | tuple[int, ...] | tuple[float, ...], classes: list[str]) -> str:
    """A class, several classes, or numbers, each with its name where there are several."""
    if isinstance(answer, int):
        return classes[answer]
    if any(isinstance(value, float) for value in answer):
        names = [f"{name} " for name in classes] if len(classes) > 1 else [""]
        return ", ".join(f"{name}{value:.4g}" for name, value in zip(names, answer, strict=True))
    counted = Counter(classes[int(number)] for number in answer)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counted.items()) or "no class"


def _write_picture(piece: Thumbnail, file: Path, mistake: Mistake) -> Path:
    file.parent.mkdir(exist_ok=True)
    write_image(with_boxes(piece, mistake.boxes) if mistake.boxes else piece.image, file)
    return file


def _write_sample(folder: Path, pieces: list[Thumbnail], images: Images, index: int) -> dict[str, Any]:
    """Write the three thumbnails of an image, or of each view of a volume, to samples/; returns what the report needs."""
    (folder / "samples").mkdir(exist_ok=True)
    about = pieces[-1]  # of a plane alone, right and counted are not those of the volume
    told = {"id": images.name_of(index), "size": list(about.size), "right": about.right, "counted": about.counted}
    if about.truth.ndim == 3:
        told["squared_error"] = about.squared_error
    if not about.view:
        return told | _write_pictures(folder, about)
    spacing = spacing_if_told(images, index)
    views = [{"view": piece.view, **_write_pictures(folder, piece)} for piece in sorted(pieces, key=_by_view)]
    return told | {"spacing": None if spacing is None else list(spacing), "views": views}


def _by_view(piece: Thumbnail) -> int:
    return VIEWS.index(piece.view)


def _write_pictures(folder: Path, piece: Thumbnail) -> dict[str, str]:
    """Write image, truth and prediction; returns their paths in the folder."""
    name = "_".join(filter(None, (f"{piece.index:02}", piece.view)))
    files = {kind: f"samples/{name}_{kind}.png" for kind in ("image", "truth", "prediction")}
    write_image(piece.image, folder / files["image"])
    write = write_image if piece.truth.ndim == 3 else write_labels
    write(piece.truth, folder / files["truth"])
    write(piece.prediction, folder / files["prediction"])
    return files
