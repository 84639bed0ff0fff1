"""Images with masks that say the class of every pixel: folders paired by the stems of names, nnU-Net's folders, or a table.

data/images  data/masks          and data.hold_out or data.fold; also labels/ or annotations/ in place of masks/
data/train/images  data/train/masks  data/val/images  data/val/masks          or images/train, masks/train ...
data/masks/CLASS                 one folder per class, for pixels with any number of classes
data/imagesTr  data/labelsTr  data/dataset.json                               of nnU-Net; splits_final.json too
data/masks/NAME.geojson          polygons with their class as a property, in place of pixels
table.csv                        with the columns image and mask, or several columns of masks, one per class
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from widefield.config import DataConfig
from widefield.data import Dataset, Labels
from widefield.data.image import size_of
from widefield.data.mask_classes import coding_of, numbers_in
from widefield.data.mask_layouts import Folders, Pair, classes_of_folders, find_folders, pair, pair_layers
from widefield.data.masks import LOSSY, Coding, Layers, Mask, mask_size
from widefield.data.nnunet import is_nnunet, nnunet_pairs, sides_of_cases
from widefield.data.records import FileRecord, Target, dataset_of_records
from widefield.data.resampled import with_spacing
from widefield.data.splits import Item, group_in
from widefield.data.table_records import check_images, columns_of, record_of_row
from widefield.data.tables import read_table
from widefield.data.vector_masks import BACKGROUND, ClassesOfPolygons, PolygonMask, classes_of_polygons, is_vector
from widefield.data.windowed_files import apart


def open_dataset(
    config: DataConfig,
    *,
    classes: Any = None,
    ignore: Any = None,
    ending: str | None = None,
    missing: str = "stop",
    group: str | None = None,
    mask: str | Sequence[str] | None = None,
    image: str | None = None,
    split: str | None = None,
    fold: str | None = None,
    weight: str | None = None,
    root: str | None = None,
    property: str | None = None,
    outside: str = BACKGROUND,
    channels: int | None = None,
    dtype: str | None = None,
    spacing: str | Sequence[float] | None = None,
    interpolation: str = "linear",
) -> Dataset:
    """classes: names; names with their numbers in masks, or colours; or a file of them; None: as found in masks.

    ignore: the number or colour of pixels that do not count; None: 255, where no class has it.
    ending: of the stems of masks, as _mask; None: any usual one.
    missing: what to do with an image without mask: "stop", "skip" it or, of one folder per class, take it as "empty".
    group: of folders, a regular expression whose match in a name is the group; of a table, a column.
    property, outside: of polygons: which property has the class, and what pixels in none are, "background" or "ignore".
    mask (several are one per class), image, split, fold, weight, root: of a table.  channels, dtype: None: the first image's.
    spacing: bring all images to one, a length per dim in mm, or "median".  interpolation: "linear" or "cubic".
    ValueError, which names the file: folders, partners, sizes, numbers or classes that do not fit.
    """
    source, on_grid = _existing(config.path, missing), partial(_on_grid, spacing=spacing, order=interpolation)
    kind, coding = {"channels": channels, "dtype": dtype}, Codings(classes, ignore, property, outside)
    finish = partial(_dataset, config, source, codings=coding, **kind)
    columns = {"image": image, "split": split, "fold": fold, "group": group, "weight": weight}
    if source.is_file():
        return on_grid(_of_table(finish, source, columns, mask, root))
    folders = partial(_of_folders, finish, source, ending, missing, group)
    return on_grid(_of_nnunet(config, source, group, **kind) if is_nnunet(source) else folders())


def _on_grid(dataset: Dataset, *, spacing: Any, order: str) -> Dataset:
    """ValueError: an interpolation without a spacing, and what `with_spacing` refuses."""
    if spacing is None and order != "linear":
        raise ValueError(f"data.options.interpolation is {order!r} and spacing is not set; set it, or leave this out")
    return dataset if spacing is None else with_spacing(dataset, spacing, order)


def _of_nnunet(config: DataConfig, folder: Path, group: str | None, **kind: Any) -> Dataset:
    pairs, labels, make, names = nnunet_pairs(folder)
    sides = sides_of_cases(folder, [one.name for one in pairs], config.fold)
    if sides is not None:
        pairs, config = [one for one in pairs if one.name in sides], config.model_copy(update={"fold": None})
    records = _checked([_record(one, make(one), group, sides and sides[one.name]) for one in pairs], pairs)
    found = dataset_of_records(records, config, source=str(folder), classes=names, labels=labels, **kind)
    return replace(found, channel_files=len(pairs[0].images))


def _existing(path: str | None, missing: str) -> Path:
    """The folder or table.  ValueError: there is none, or `missing` is none of its values."""
    if missing not in ("stop", "skip", "empty"):
        raise ValueError(f"data.options.missing is {missing!r}; it is stop, skip or empty")
    if path is None:
        raise ValueError("data.name=masks reads a folder or a table and data.path is not set; add data.path=DIR")
    if not Path(path).exists():
        raise ValueError(f"data.path is {path} and there is no such folder or table; mend the path")
    return Path(path)


def _of_folders(finish: Callable[..., Dataset], root: Path, ending: str | None, missing: str, group: str | None) -> Dataset:
    train, val, single = find_folders(root)
    some = [folders for folders in (train, val, single) if folders is not None]
    layers = classes_of_folders(some[0])
    if missing == "empty" and not layers:
        raise ValueError("data.options.missing=empty is for masks in one folder per class; set stop or skip")
    found = [_paired(folders, layers, ending, missing) for folders in some]
    skipped = sum(count for _, count in found)
    more = [f"{skipped} images without mask left out"] if skipped else []
    if single is not None:
        return finish(found[0][0], names=layers, group=group, more=more)
    return finish(found[1][0], names=layers, group=group, more=more, train=found[0][0])


def _paired(folders: Folders, layers: list[str], ending: str | None, missing: str) -> tuple[list[Pair], int]:
    return pair_layers(folders, layers, missing=missing) if layers else pair(folders, ending=ending, missing=missing)


@dataclass(frozen=True)
class Codings:
    """The options that say which classes masks have; see `open_dataset`."""

    classes: Any
    ignore: Any
    key: str | None
    outside: str

    def of(self, files: Sequence[Path], folder: Path) -> tuple[list[str], str, Callable[[Pair], Target]]:
        """The names of the classes in masks, where they are known from, and what makes the target of a pair.

        ValueError: some masks are polygons and others are not, or options do not fit them.
        """
        vectors = [is_vector(file) for file in files]
        if any(vectors):
            self._check_polygons(files, vectors)
            polygons, why = classes_of_polygons(self.classes, files, self.key, self.outside)
            return list(polygons.names), why, partial(_polygons_of, polygons)
        if self.key is not None or self.outside != BACKGROUND:
            raise ValueError("data.options.property and outside are for masks that are polygons, as .geojson; leave them out")
        coding, why = coding_of(self.classes, self.ignore, partial(numbers_in, files), folder=folder)
        return list(coding.names), why, partial(_mask_of, coding)

    def _check_polygons(self, files: Sequence[Path], vectors: Sequence[bool]) -> None:
        if not all(vectors):
            both = files[vectors.index(True)], files[vectors.index(False)]
            raise ValueError(f"the mask {both[0]} is polygons and {both[1]} is pixels; keep them in datasets of their own")
        if self.ignore is not None:
            raise ValueError(
                "data.options.ignore is for masks of pixels; of polygons, outside=ignore leaves out what is in none"
            )


def _dataset(
    config: DataConfig,
    source: Path,
    pairs: list[Pair],
    *,
    names: list[str],
    codings: Codings,
    channels: int | None,
    dtype: str | None,
    group: str | None = None,
    train: list[Pair] | None = None,
    more: Sequence[str] = (),
    make_record: Callable[[Pair, Target, str | None], FileRecord] | None = None,
) -> Dataset:
    """names: of the classes where each has a mask of its own, else empty."""
    every = [*(train or []), *pairs]
    _check_lossy(every)
    labels: Labels = "layers" if names else "pixels"
    if names:
        _check_layers(codings)
        make: Callable[[Pair], Target] = _layers_of
    else:
        files = [mask for one in every for mask in one.masks if mask is not None]
        names, why, make = codings.of(files, source if source.is_dir() else source.parent)
        more = [*more, why]
    if train is not None:
        _refuse_split(config, source)
    records, to_train = (
        None if some is None else _checked([(make_record or _record)(one, make(one), group) for one in some], some)
        for some in (pairs, train)
    )
    return dataset_of_records(
        records or [], config, source=str(source), classes=names, labels=labels, channels=channels, dtype=dtype, train=to_train,
        more=more,
    )  # fmt: skip


def _mask_of(coding: Coding, one: Pair) -> Mask:
    (file,) = one.masks
    assert file is not None
    return Mask(file, coding)


def _polygons_of(classes: ClassesOfPolygons, one: Pair) -> PolygonMask:
    (file,) = one.masks
    assert file is not None
    return PolygonMask(file, one.images[0], classes)


def _layers_of(one: Pair) -> Layers:
    return Layers(one.masks, size_of(one.images[0]))


def _check_layers(codings: Codings) -> None:
    if codings != Codings(None, None, None, BACKGROUND):
        raise ValueError(
            "data.options.classes, ignore, property and outside are for masks of several classes; here each class has masks of "
            "its own, and the folders or columns are the classes; leave them out"
        )


def _check_lossy(pairs: Sequence[Pair]) -> None:
    for file in (mask for one in pairs for mask in one.masks if mask is not None):
        if file.suffix.lower() in LOSSY:
            raise ValueError(f"the mask {file} is {file.suffix}, which changes the numbers of pixels; save masks as PNG")


def _refuse_split(config: DataConfig, source: Path) -> None:
    for key in ("hold_out", "fold"):
        if getattr(config, key) is not None:
            raise ValueError(
                f"{source} has folders to train on and to evaluate, so leave data.{key}={getattr(config, key)} out"
            )


def _record(one: Pair, target: Target, group: str | None, split: str | None = None) -> FileRecord:
    return FileRecord(one.images, target, Item(one.name, group=group_in(one.name, group), split=split))


def _checked(records: list[FileRecord], pairs: Sequence[Pair]) -> list[FileRecord]:
    """ValueError: a mask has another size than its image.  Only headers are read."""

    def check(one: Pair, record: FileRecord) -> str | None:
        if isinstance(record.target, PolygonMask):
            return record.target.problem()
        size = size_of(one.images[0])
        for file in (*one.images[1:], *one.masks):
            other = size if file is None else mask_size(file) if file in one.masks else size_of(file)
            if other != size:
                sizes = [" x ".join(map(str, pair)) for pair in (other, size)]
                axes = "depth x height x width" if len(size) == 3 else "height x width"
                return f"{file} is {sizes[0]} pixels and {one.images[0]} is {sizes[1]} ({axes}); mend one of them"
            if file is not None and (problem := _misplaced(file, one.images[0])):
                return problem
        return None

    with ThreadPoolExecutor(8) as pool:
        problem = next((problem for problem in pool.map(check, pairs, records) if problem), None)
    if problem is not None:
        raise ValueError(problem)
    return records


def _misplaced(file: Path, image: Path) -> str | None:
    """What is wrong where pixels of a file lie elsewhere in the world than those of its image, as where one is mirrored."""
    found = apart(file, image)
    if found is None or found[0] <= found[1] / 2:
        return None
    return (
        f"{file} lies up to {found[0]:.6g} away from {image} (by the affine of both headers), and a pixel is {found[1]:.6g}: "
        "they may be turned, moved or of another spacing; save one on the grid of the other"
    )


def _of_table(
    finish: Callable[..., Dataset],
    path: Path,
    options: dict[str, str | None],
    mask: str | Sequence[str] | None,
    root: str | None,
) -> Dataset:
    table = read_table(path)
    columns, folder = columns_of(table, **options), path.parent if root is None else Path(root)
    wanted = [mask] if isinstance(mask, str) else mask
    masks = (
        [table.column(name, option="mask") for name in wanted]
        if wanted
        else [table.column(None, option="mask", usual=("mask", "label"))]
    )
    if masks == [None]:
        raise ValueError(f"{path} has no column 'mask'; name it: data.options.mask={table.columns[-1]}")
    rows = {f"row {number}": number for number in range(len(table.rows))}
    pairs = []
    for name, number in rows.items():
        files = [table.rows[number][column or ""] for column in masks]
        if "" in files and len(files) == 1:
            raise ValueError(f"{table.where(number)}, names no mask; fill the column '{masks[0]}', or leave the row out")
        given = tuple(folder / file if file else None for file in files)
        lost = next((file for file in given if file is not None and not file.is_file()), None)
        if lost is not None:
            raise ValueError(f"{table.where(number)}, is of the mask {lost}, and there is no such file; mend the path")
        pairs.append(Pair(name, (folder / table.rows[number][columns["image"] or ""],), given))

    def make(one: Pair, target: Target, _: str | None) -> FileRecord:
        return record_of_row(table, rows[one.name], columns, folder, target=target)

    check_images(table, [make(one, Layers((), (0, 0)), None) for one in pairs])
    return finish(pairs, names=[name or "" for name in masks] if len(masks) > 1 else [], make_record=make)


def _sample_masks(place: Path, write: Callable[[Path], None]) -> Path:
    import numpy as np
    from PIL import Image

    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            write(place / split / "images" / f"{number}.png")
            (place / split / "masks").mkdir(parents=True, exist_ok=True)
            height, width = size_of(place / split / "images" / f"{number}.png")
            labels = (np.arange(height * width) % 3).astype(np.uint8).reshape(height, width)
            Image.fromarray(labels).save(place / split / "masks" / f"{number}_mask.png")
    return place


CASES = [({"path": _sample_masks}, 4, 2, 3)]
"""As in imagefolder.py."""
