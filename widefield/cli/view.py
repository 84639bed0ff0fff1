"""`widefield view`: a page that shows images with their labels, at any zoom."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.cli._arguments import count, given_text, sizes
from widefield.quantity import bytes_text, count_of
from widefield.refusal import printable

if TYPE_CHECKING:
    from widefield.viewer.folder import Written
    from widefield.viewer.sources import ScenesFound

ORDER = 75
SUMMARY = "write a page that shows images and their labels at any zoom"
HELP = """\
Write a page that shows images of any size, what was predicted for their pixels, the truth, and where the two
differ.  It opens from disk, and needs no server and no network.

  widefield view answers                            a folder that widefield predict wrote
  widefield view answers --labels truth=masks/      and the truth, in files of the images' stems
  widefield view scene.tif --labels prediction=answers/scene.tif --labels truth=labels.tif
  widefield view scene.tif --bands 4,3,2 --level 1
  widefield view scans/ --labels truth=masks/       images in a folder

Images are read by window and never as a whole.  overview.png in the folder shows all at one look.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="images, or folders of them; or one folder of predictions, or their run's")
    labels = "truth or prediction: a file of class numbers, or a folder with a file for each image"
    add("--labels", action="append", default=[], type=_named, metavar="NAME=PATH", help=labels)
    add(
        "--probabilities",
        type=given_text,
        metavar="FILE",
        help="a .npy file of (classes, height, width), or bands as predict writes",
    )
    add("--output", type=given_text, metavar="DIR", help="folder for the page (viewer, in that of the predictions)")
    add("--classes", type=_names, default=[], metavar="NAMES", help="names of the classes 0, 1, ...: road,field,water")
    add("--ignore", type=_whole, metavar="NUMBERS", help="numbers of labels that are no class (255)")
    add("--bands", type=_whole, metavar="BANDS", help="which bands are red, green and blue, as 4,3,2; or one for grey")
    add("--range", type=_limits, metavar="LOW,HIGH", help="what is black and what is white; percentiles if left out")
    add("--level", type=_level, default=0, metavar="N", help="leave out the N finest levels: pixels of 2^N x 2^N (0)")
    add("--planes", action="store_true", help="cut volumes along all three axes")
    add("--space", type=sizes, metavar="RxC", help="draw the cut of an image into R x C tiles; the run's if left out")
    add("--first", type=count, metavar="N", help="show the first N images only")
    add("--most-tiles", type=count, default=4000, metavar="N", help="allow N files of tiles (4000)")


def run(options: Namespace) -> int:
    from widefield.data.image import colours
    from widefield.training.terminal import ImageProgress
    from widefield.viewer import Settings, Viewer, open_scene
    from widefield.viewer.folder import check_place

    found, output = _found(options)
    check_place(output)
    sources = found.sources[: options.first]
    scenes = [open_scene(one.name, one.image, one.labels, one.probabilities) for one in sources]
    names = ("bands", "level", "planes", "most_tiles")
    settings = Settings(
        colours(256), options.classes or found.classes, limits=options.range, ignored=options.ignore,
        space=options.space or found.space, **{name: getattr(options, name) for name in names},
    )  # fmt: skip
    viewer = Viewer(scenes, settings)
    cost = viewer.estimate(output)
    print(f"{count_of(len(scenes), 'image')}, at most {cost}")
    progress = ImageProgress(viewer.steps, noun="tiles")
    written = viewer.write(output, progress.add)
    progress.close()
    _print(written, left=len(found.sources) - len(sources))
    return 0


def _found(options: Namespace) -> tuple[ScenesFound, Path]:
    """The files that are meant, and the folder of the page.  ValueError: they are no images, or are named amiss."""
    from widefield.viewer.sources import check_names, folder_of_predictions, named_sources, predicted_sources

    labels = {name: Path(path) for name, path in options.labels}
    check_names(labels)
    folder = folder_of_predictions(Path(options.files[0]))
    if folder is None:
        likely = Path(options.probabilities) if options.probabilities else None
        return named_sources(_images(options.files), labels, likely), Path(options.output or "viewer")
    if len(options.files) > 1:
        raise ValueError(f"{folder} is a folder of predictions, and {options.files[1]} is named too; give a command for each")
    return predicted_sources(folder, labels), Path(options.output) if options.output else folder / "viewer"


def _images(words: list[str]) -> dict[Path, Path]:
    """The images that words mean, each with the relative path by which it is called.  ValueError: a word means none."""
    from widefield.prediction.inputs import find_inputs

    inside = [word for word in words if Path(word.partition("#/")[0]).is_file() and "#/" in word]  # as scan.h5#/raw
    others = [word for word in words if word not in inside]
    images, lefts = find_inputs(others) if others else ([], [])
    if lefts:
        raise ValueError(f"{lefts[0].path} is left out: {lefts[0].reason}; mend the name, or leave it out")
    return {Path(word): Path(word) for word in inside} | {image.path: image.name for image in images}


def _print(written: Written, *, left: int) -> None:
    for scene in written.scenes[:20]:
        wrong, of = scene["wrong"], scene["compared"]
        if of:
            print(printable(f"{scene['name']}: {wrong:,} of {of:,} compared pixels differ, {100 * wrong / of:.2f} %"))
    if left:
        print(f"{count_of(left, 'image')} more left out by --first")
    print(printable(f"{count_of(written.tiles, 'tile')}, {bytes_text(written.size)}: {written.page}"))


# ---------------------------------------------------------------------------------------------- types of arguments


def _named(text: str) -> tuple[str, str]:
    name, is_named, path = text.partition("=")
    if not is_named or not path:
        raise ArgumentTypeError(f"{text!r} names no file; write truth=FILE or prediction=FILE")
    return name, path


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _whole(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no list of whole numbers; write them with commas, as 4,3,2") from None


def _limits(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no range; write two numbers, as 0,3000") from None
    if not low < high:
        raise ArgumentTypeError(f"{text!r} is no range; write the lower number first")
    return low, high


def _level(text: str) -> int:
    if not text.isdecimal() or int(text) > 30:
        raise ArgumentTypeError(f"{text!r} is no level; write a whole number from 0 to 30")
    return int(text)


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["scene.tif"], {"files": ["scene.tif"], "labels": [], "level": 0, "bands": None, "most_tiles": 4000}),
    (
        ["scene.tif", "--labels", "truth=labels.tif", "--labels", "prediction=answers/scene.tif", "--output", "page"],
        {"labels": [("truth", "labels.tif"), ("prediction", "answers/scene.tif")], "output": "page"},
    ),
    (["scene.tif", "--bands", "4,3,2", "--range=-50,400"], {"bands": [4, 3, 2], "range": (-50.0, 400.0)}),
    (["answers", "--classes", "road, field", "--space", "2x1"], {"classes": ["road", "field"], "space": [2, 1]}),
    (["scene.tif", "--labels", "truth"], "'truth' names no file; write truth=FILE or prediction=FILE"),
    (["scene.tif", "--bands", "red"], "'red' is no list of whole numbers"),
    (["scene.tif", "--range", "9,1"], "'9,1' is no range; write the lower number first"),
    (["scene.tif", "--level", "x"], "'x' is no level; write a whole number from 0 to 30"),
    ([], "the following arguments are required: FILE"),
]
