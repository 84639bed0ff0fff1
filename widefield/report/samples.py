"""Evaluated images with labels, predictions, errors and the cuts of the plan, where every pixel has a class.

Where answers are images, these in place of labels, and how far they are from the target.

Of a volume there are several views, each as a picture of its own: its middle plane, and the largest value along each axis.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from widefield.data.image import colours
from widefield.geometry.interval import natural_cut
from widefield.report.class_scores import names_shown
from widefield.report.mistakes import opened

AXES = ("depth", "height", "width")
NAMES = ("plane", "row", "column")
TINY_PX = 400
"""Pictures up to this long are enlarged pixel by pixel."""
WRONG = (255, 64, 48)
AMPLIFIED = 4
"""By how much the difference of images is shown."""
Pixels = np.ndarray[Any, Any]


def samples(folder: Path, evaluation: Mapping[str, Any] | None, space: Sequence[int]) -> list[dict[str, Any]]:
    """Thumbnails of the evaluated images, as data URIs, with the cuts of `space` tiles per dim; missing files are left out."""
    found = [
        _sample(folder, view, evaluation or {}, space)
        for one in (evaluation or {}).get("samples") or []
        for view in (_views(one) if "views" in one else [_as_view(one)])
    ]
    return [one for one in found if one is not None]


@dataclass(frozen=True)
class _View:
    """files: of image, truth and prediction.  axes: of the image, those that go down and across, with their extents in pixels.

    lengths: of a pixel along these.  what: it is, in words, of a volume.
    """

    id: str
    files: Mapping[str, str]
    axes: tuple[int, int]
    size: Sequence[int]
    lengths: tuple[float, float]
    caption: str
    what: str = ""


def _as_view(sample: Mapping[str, Any]) -> _View:
    return _View(sample["id"], sample, (0, 1), sample["size"], (1.0, 1.0), _caption(sample))


def _views(sample: Mapping[str, Any]) -> list[_View]:
    """The views of a volume, in their order."""
    found, spacing = [], [float(length) for length in sample.get("spacing") or (1, 1, 1)]
    for view in sample["views"]:
        axis = AXES.index(view["view"]) if view["view"] in AXES else 0
        down, across = (dim for dim in range(3) if dim != axis)
        depth = int(sample["size"][0])
        what = f"largest along the {AXES[axis]}" if view["view"] in AXES else f"plane {depth // 2:,} of {depth:,}"
        caption = what if found else f"{_caption(sample, 'voxels')}; {what}"
        found.append(_View(sample["id"], view, (down, across), sample["size"], (spacing[down], spacing[across]), caption, what))
    return found


def _caption(sample: Mapping[str, Any], unit: str = "pixels") -> str:
    if "squared_error" in sample:
        error = sample["squared_error"] / max(1, sample["counted"])
        psnr = f"{-10 * math.log10(error):.2f} dB" if error > 0 else "infinite: all values are those of the target"
        return f"{' x '.join(f'{extent:,}' for extent in sample['size'])} px, PSNR {psnr}"
    right = f"{100 * sample['right'] / sample['counted']:.2f} % of" if sample["counted"] else "none of"
    size = " x ".join(f"{extent:,}" for extent in sample["size"])
    return f"{size} {'px' if unit == 'pixels' else unit}, {right} {sample['counted']:,} counted {unit} right"


def _sample(folder: Path, view: _View, evaluation: Mapping[str, Any], space: Sequence[int]) -> dict[str, Any] | None:
    """One picture; None where one of its files is missing, is no picture, or is outside of the run folder."""
    try:
        page, truth, prediction = (_pixels(folder, view.files[key]) for key in ("image", "truth", "prediction"))
        over = _panes(truth, prediction, evaluation)
    except (OSError, ValueError, SyntaxError):  # what Pillow raises for a damaged file
        return None
    height, width = truth.shape[:2]
    panes = [("image", "", None), *((name, "over", uri) for name, uri in over.items())]
    names = NAMES[-len(view.size) :]
    (rows, columns), (down, across) = cuts(view.size, space, axes=view.axes), view.axes
    return {
        "id": view.id, "page": _uri(Image.fromarray(page)), "panes": panes, "rows": rows, "columns": columns,
        "shape": _shape(height, width, view.lengths), "tiny": max(height, width) <= TINY_PX,
        "caption": view.caption, "names": (names[down], names[across]), "what": view.what,
    }  # fmt: skip


def _panes(truth: Pixels, prediction: Pixels, evaluation: Mapping[str, Any]) -> dict[str, str]:
    """What lies over the image, by name, as data URIs.  ValueError: images of several sizes."""
    if evaluation.get("labels") == "image":
        if truth.shape != prediction.shape:
            raise ValueError("target and output differ in size")
        apart = np.minimum(AMPLIFIED * np.abs(truth.astype(np.int16) - prediction), 255).astype(np.uint8)
        images = {"target": truth, "output": prediction, f"difference x {AMPLIFIED}": apart}
        return {name: _uri(Image.fromarray(pixels)) for name, pixels in images.items()}
    classes = len(names_shown(evaluation))
    wrong = (truth != prediction) & (truth < classes)
    return {"truth": _labels(truth, classes), "prediction": _labels(prediction, classes), "errors": _marks(wrong)}


def _shape(height: int, width: int, lengths: tuple[float, float]) -> str:
    """Of a picture, in CSS: width / height."""
    return f"{width * lengths[1]:g} / {height * lengths[0]:g}"


def cuts(
    size: Sequence[int], space: Sequence[int], *, axes: tuple[int, int] = (0, 1)
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Where tiles meet, for rows and for columns: (place in percent of the image, the first pixel beyond).

    axes: of the image, those that go down and across.
    """
    tiles = [*space, *[1] * len(size)][: len(size)]
    inner = [natural_cut(length, parts)[1:-1] for length, parts in zip(size, tiles, strict=True)]
    rows, columns = ([(f"{100 * at / size[axis]:.3f}", f"{at:,}") for at in sorted({*inner[axis]} - {0, size[axis]})]
                     for axis in axes)  # fmt: skip
    return rows, columns


def _pixels(folder: Path, name: str) -> Pixels:
    with opened(folder, name) as image:
        return np.asarray(image)


def _labels(labels: Pixels, classes: int) -> str:
    """The classes in their colours; class 0, and pixels that do not count, are transparent."""
    table = np.zeros((max(classes, int(labels.max(initial=0)) + 1), 4), dtype=np.uint8)
    table[1:classes] = [(*colour, 255) for colour in colours(classes)[1:]]
    return _uri(Image.fromarray(table[labels]))


def _marks(wrong: Pixels) -> str:
    """The wrong pixels, marked; transparent elsewhere."""
    return _uri(Image.fromarray(np.where(wrong[:, :, None], (*WRONG, 255), 0).astype(np.uint8)))


def _uri(image: Image.Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def legend(evaluation: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Every class with its colour, number of labelled pixels, IoU and Dice; [] where classes are of images.

    Where a pixel may have several classes, the name and colour alone.
    """
    if evaluation is not None and evaluation.get("labels") == "layers":
        names = names_shown(evaluation)
        pairs = zip(names, colours(len(names)), strict=True)
        return [{"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour)} for name, colour in pairs]
    if evaluation is None or evaluation.get("unit") != "pixels" or not evaluation.get("confusion"):
        return []
    names, matrix = evaluation["classes"], evaluation["confusion"]
    return [
        {"name": name, "colour": "#{:02x}{:02x}{:02x}".format(*colour), **_scores(matrix, number)}
        for number, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True))
    ]


def _scores(matrix: Sequence[Sequence[int]], number: int) -> dict[str, str]:
    right, truth, answered = matrix[number][number], sum(matrix[number]), sum(row[number] for row in matrix)
    either = truth + answered - right
    iou, dice = (right / either, 2 * right / (truth + answered)) if either else (math.nan, math.nan)
    scores = {"iou": iou, "dice": dice}
    return {"pixels": f"{truth:,}"} | {key: f"{100 * one:.2f} %" if either else "–" for key, one in scores.items()}
