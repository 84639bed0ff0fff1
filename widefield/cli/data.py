"""`widefield data`: what is in the data of a recipe, or in a folder or table; and built-in volumes as files."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widefield.cli._arguments import given_text

if TYPE_CHECKING:
    from widefield.config import DataConfig
    from widefield.data import Dataset
    from widefield.data.statistics import SplitStatistics

ORDER = 7
SUMMARY = "print statistics of images and labels"
HELP = """\
Print what the images to train on are: sizes, dtypes, percentiles, mean and
standard deviation of each channel, and how often each class occurs.
Every image is read once.

  widefield data stats recipes/page.yaml
  widefield data stats cells/
  widefield data stats table.csv
  widefield data stats 'train-{0000..0146}.tar'

Write the volumes of a recipe, as the built-in ones, as a folder of nnU-Net:
NIfTI files in imagesTr and labelsTr, those to evaluate in imagesTs and
labelsTs, and dataset.json.

  widefield data write volume 'data.options.size=[24,64,64]' --output Dataset1
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=["stats", "write"], metavar="stats|write")
    parser.add_argument("source", metavar="RECIPE|PATH", help="a recipe, or a folder, a table or tars of images")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument(
        "--output", type=given_text, metavar="DIR", help="of write: a folder that is not there yet, or is empty"
    )
    parser.add_argument(
        "--fingerprint",
        action="store_true",
        help="of stats: write dataset_fingerprint.json and nnUNetPlans.json into a folder of nnU-Net",
    )


def run(options: Namespace) -> int:
    """ValueError: an option of the other action."""
    if options.what == "write":
        if options.output is None or options.fingerprint:
            raise ValueError("data write makes a folder of files: name it, as --output scans, and leave --fingerprint out")
        return _write(options)
    if options.output is not None:
        raise ValueError("--output is of data write, and data stats prints; leave it out")
    return _stats(options)


def _write(options: Namespace) -> int:
    from widefield.data import open_dataset
    from widefield.data.nnunet_writer import write_nnunet

    dataset = open_dataset(_config_of(options.source, options.overrides))
    print(write_nnunet(dataset, Path(options.output)))
    return 0


def _stats(options: Namespace) -> int:
    from widefield.data import open_dataset
    from widefield.data.statistics import statistics_of
    from widefield.training.terminal import ImageProgress

    config = _config_of(options.source, options.overrides)
    dataset = open_dataset(config)
    skip = config.bad_images == "skip"
    kind = {"channels": dataset.channels, "dtype": dataset.dtype, "labels": dataset.labels}
    progress = ImageProgress(len(dataset.train))
    found = statistics_of(dataset.train, **kind, skip=skip, done=progress.add)
    progress.close()
    print(*_lines(dataset, found), sep="\n")
    if options.fingerprint:
        from widefield.first_recipe.fingerprint import write_fingerprint

        print(*(f"written to {path}" for path in write_fingerprint(Path(options.source), config)), sep="\n")
    return 0


def _config_of(source: str, overrides: list[str]) -> DataConfig:
    """The section data of a recipe, or one for a folder or table with the format that reads it."""
    from widefield.config import DataConfig, read_config
    from widefield.data.nnunet import SPLITS
    from widefield.section import parse_section

    path = Path(source)
    if path.suffix.lower() in (".yaml", ".yml") or not path.exists() and not source.endswith(".tar"):
        return read_config(source, overrides, builds=("data",)).data
    some = [override.removeprefix("data.") for override in overrides]
    if not any(override.startswith("name=") for override in some):
        some.append(f"name={_format_of(path)}")
    config = parse_section(DataConfig, f"path: '{source}'", some, name=source)
    if config.model_fields_set & {"hold_out", "fold"} or "val" in config.options or not _is_undivided(path):
        return config
    return config.model_copy(update={"fold": 0} if (path / SPLITS).is_file() else {"hold_out": 0.1})


def _format_of(path: Path) -> str:
    from widefield.data.mask_layouts import find_folders
    from widefield.data.nnunet import is_nnunet
    from widefield.data.shards.patterns import is_shards
    from widefield.data.tables import read_table

    if is_shards(path):
        return "webdataset"
    if path.is_file():
        return "masks" if "mask" in read_table(path).columns else "manifest"
    if is_nnunet(path):
        return "masks"
    try:
        find_folders(path)
    except ValueError:
        return "imagefolder"
    return "masks"


def _is_undivided(path: Path) -> bool:
    """Whether nothing in a folder or table says what is evaluated, so that something has to be held out."""
    from widefield.data.mask_layouts import TRAIN, VAL
    from widefield.data.shards.patterns import is_shards, shards_of, sides_by_name
    from widefield.data.tables import read_table

    if is_shards(path):
        root = path if path.is_dir() else path.parent
        return sides_by_name(shards_of(str(path), Path(), option="data.path"), root) is None
    if path.is_file():
        return not {"split", "fold"} & set(read_table(path).columns)
    places = [path, *(entry for entry in path.iterdir() if entry.is_dir())]
    return not any(any((place / name).is_dir() for name in TRAIN) and any((place / name).is_dir() for name in VAL)
                   for place in places)  # fmt: skip


def _lines(dataset: Dataset, found: SplitStatistics) -> list[str]:
    sizes = [" x ".join(map(str, size)) for size in sorted(found.sizes)]
    span = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}, {len(sizes)} sizes"
    axes = "depth x height x width" if dataset.dims == 3 else "height x width"
    lines = [
        *([dataset.about] if dataset.about else []),
        f"{found.images:,} images to train on, {', '.join(found.dtypes)}, {span} ({axes})",
        *([f"{len(found.skipped)} unreadable left out: {', '.join(found.skipped[:5])}"] if found.skipped else []),
    ]
    percents = list(found.channels[0].percentiles)
    lines.append("channel         mean          std  " + "".join(f"{percent:>11g}%" for percent in percents))
    for number, channel in enumerate(found.channels):
        values = "".join(f"{value:>12.6g}" for value in channel.percentiles.values())
        lines.append(f"{number:>7} {channel.mean:>12.6g} {channel.std:>12.6g}  {values}")
    return lines + _class_lines(dataset, found)


def _class_lines(dataset: Dataset, found: SplitStatistics) -> list[str]:
    if dataset.labels == "values":
        return [f"values: {', '.join(dataset.classes)}"]
    what = "pixels" if dataset.pixels else "boxes" if dataset.labels == "boxes" else "images"
    total = sum(found.labels.values())
    width = max(map(len, dataset.classes))
    lines = [f"{'class':{width}}  {what:>14}   share"]
    for number, name in enumerate(dataset.classes):
        count = found.labels.get(number, 0)
        lines.append(f"{name:{width}}  {count:>14,}  {100 * count / max(1, total):>5.2f} %")
    other = sum(count for number, count in found.labels.items() if not 0 <= number < len(dataset.classes))
    return lines + ([f"{'ignored':{width}}  {other:>14,}  {100 * other / total:>5.2f} %"] if other else [])


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["stats", "cells"], {"what": "stats", "source": "cells", "overrides": [], "fingerprint": False}),
    (["write", "volume", "--output", "scans"], {"what": "write", "source": "volume", "output": "scans"}),
    (["count", "cells"], "invalid choice"),
]
