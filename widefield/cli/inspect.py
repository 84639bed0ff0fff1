"""`widefield inspect`: what is in image files, and what a window of them costs; what is in tars of samples."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.quantity import bytes_text
from widefield.refusal import printable

if TYPE_CHECKING:
    from widefield.image_files import ImageFile, ImageInfo

ORDER = 8
SUMMARY = "print what is in image files, and what a window of them costs"
HELP = """\
Print what image files are before anything is done with them: format, size, pixels, levels, blocks,
place in the world, and whether a window can be read without the rest.  Of a tar: its samples and members.

  widefield inspect scene.tif
  widefield inspect scans/*.nii.gz volume.zarr
  widefield inspect scene.tif --window 512
  widefield inspect train-0000.tar
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="an image file, or a folder that is one, as image.zarr; a tar")
    parser.add_argument(
        "--window", type=int, default=1024, metavar="PX", help="the side of the window whose cost is told (1024)"
    )


def run(options: Namespace) -> int:
    from widefield.image_files.image_file import ImageFileError

    if options.window < 1:
        raise ValueError(f"--window is {options.window}; write the pixels of its side, 1 or more")
    wrong = 0
    for number, file in enumerate(options.files):
        if number:
            print()
        try:
            print(printable("\n".join(_lines(Path(file), options.window))))
        except (ImageFileError, _ShardError) as error:
            print(printable(f"{file}\n  cannot be read: {error}"))
            wrong += 1
    return 1 if wrong else 0


class _ShardError(ValueError):
    """A tar cannot be read."""


def _lines(file: Path, side: int) -> list[str]:
    from widefield.image_files import open_image

    if file.suffix.lower() == ".tar":
        from widefield.data.shards.inspection import about_shard

        try:
            return about_shard(file)
        except ValueError as error:
            raise _ShardError(str(error)) from None
    with open_image(file) as image:
        return lines_of(image, side)


def lines_of(image: ImageFile, side: int) -> list[str]:
    """What is known of an image.  side: of the window whose cost is told, in pixels."""
    info = image.info
    rows = {
        "format": ", ".join(part for part in (info.format, info.compression) if part),
        "size": f"{_sized(info.size)} ({_axes_in_words(info.axes)})",
        "pixels": _pixels_in_words(info),
        "channels": ", ".join(info.channel_names) if len(info.channel_names) == info.channels else "",
        "spacing": " x ".join(f"{step:.6g}" for step in info.spacing) + (f" {info.unit}" if info.unit else ""),
        "origin": _origin(info),
        "world": _world(info.world),
        "nodata": _nodata(info),
        "levels": "; ".join(f"{_sized(level.size)}" for level in info.levels) if len(info.levels) > 1 else "",
        "blocks": _sized(info.levels[0].block) if math.prod(info.levels[0].block) > 1 else "",
        "reader": info.reader,
        "by window": _by_window(image, side),
    }
    width = max(map(len, rows))
    return [str(image.path), *(f"  {name:{width}}  {text}" for name, text in rows.items() if text.strip())]


def _by_window(image: ImageFile, side: int) -> str:
    info = image.info
    window = tuple(slice((extent - min(side, extent)) // 2, (extent + min(side, extent)) // 2) for extent in info.size)
    asked = math.prod(one.stop - one.start for one in window) * info.channels * _bytes_per_pixel(info)
    size = _sized(tuple(one.stop - one.start for one in window))
    cost = f"{bytes_text(image.cost(window))} are decoded for a window of {size}, which has {bytes_text(asked)}"
    return (
        f"yes: {cost}" if info.by_window and not info.advice else f"{'yes' if info.by_window else 'no'}: {info.advice}; {cost}"
    )


def _bytes_per_pixel(info: ImageInfo) -> int:
    import numpy as np

    return np.dtype(info.dtype).itemsize


def _pixels_in_words(info: ImageInfo) -> str:
    total = math.prod(info.shape) * _bytes_per_pixel(info)
    kind = f" ({info.colours})" if info.colours else ""
    return f"{info.channels} channel{'s' if info.channels > 1 else ''} of {info.dtype}{kind}, {bytes_text(total)} in all"


def _axes_in_words(axes: str) -> str:
    return " x ".join({"Z": "depth", "Y": "height", "X": "width"}.get(axis, axis) for axis in axes)


def _sized(size: tuple[int, ...]) -> str:
    return " x ".join(f"{extent:,}" for extent in size)


def _origin(info: ImageInfo) -> str:
    """The place of the first pixel's centre."""
    return ", ".join(f"{row[-1]:.9g}" for row in info.affine[:-1])


def _world(world: str) -> str:
    """The name of a coordinate system, of its text."""
    if '"' not in world:
        return world
    return world.split('"')[1]


def _nodata(info: ImageInfo) -> str:
    found = ["none" if number is None else f"{number:g}" for number in info.nodata]
    return "" if set(found) <= {"none"} else found[0] if len(set(found)) == 1 else ", ".join(found)


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["scene.tif"], {"files": ["scene.tif"], "window": 1024}),
    (["a.nii", "b.zarr", "--window", "64"], {"files": ["a.nii", "b.zarr"], "window": 64}),
    ([], "the following arguments are required: FILE"),
]
