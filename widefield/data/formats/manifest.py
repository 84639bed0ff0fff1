"""A table with a row per image: its file, and its label, its labels or values.  CSV, TSV, JSON lines or Parquet.

Columns by their usual names, or named by options: image; label (one class), labels (several, with ; or | between) or
values (numbers, of a regression); split, fold, group, weight.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from widefield.config import DataConfig
from widefield.data import Dataset, Labels
from widefield.data.records import Known, dataset_of_records
from widefield.data.table_records import check_images, columns_of, record_of_row
from widefield.data.tables import Table, number_in, read_table

_SEPARATORS = re.compile(r"[;|]")


def open_dataset(
    config: DataConfig,
    *,
    image: str | None = None,
    label: str | None = None,
    labels: str | None = None,
    values: Sequence[str] | str | None = None,
    split: str | None = None,
    fold: str | None = None,
    group: str | None = None,
    weight: str | None = None,
    classes: Sequence[str] | None = None,
    root: str | None = None,
    channels: int | None = 3,
    dtype: str | None = None,
) -> Dataset:
    """image, label, labels, values, split, fold, group, weight: names of columns.

    classes: names, in the order of class numbers; None: those in the table, sorted.
    root: the folder that paths are relative to; None: the table's.
    channels: of all images, 3 for RGB; None: those of the first one.  dtype: of all; None: of the first one.
    ValueError: no table, columns, images or classes as asked for.
    """
    if config.path is None:
        raise ValueError("data.name=manifest reads a table and data.path is not set; add data.path=images.csv")
    table = read_table(Path(config.path))
    columns = columns_of(table, image=image, split=split, fold=fold, group=group, weight=weight)
    kind, targets, strata, known = _targets(table, label, labels, values, classes)
    folder = table.path.parent if root is None else Path(root)
    records = [
        record_of_row(table, number, columns, folder, target=target, stratum=stratum)
        for number, (target, stratum) in enumerate(zip(targets, strata, strict=True))
    ]
    check_images(table, records)
    return dataset_of_records(
        records, config, source=str(table.path), classes=known, labels=kind, channels=channels, dtype=dtype
    )


def _targets(
    table: Table, label: str | None, labels: str | None, values: Sequence[str] | str | None, classes: Sequence[str] | None
) -> tuple[Labels, list[Known], list[str | None], list[str]]:
    """Kind of labels, a target and a stratum per row, and the names of classes or values."""
    given = [name for name, column in (("label", label), ("labels", labels), ("values", values)) if column is not None]
    if len(given) > 1:
        raise ValueError(f"data.options has {' and '.join(given)}, which are different kinds of labels; leave all but one out")
    if values is not None:
        columns = [table.column(name, option="values") or "" for name in ([values] if isinstance(values, str) else values)]
        return _values(table, columns)
    several = table.column(labels, option="labels", usual=("labels",) if label is None else ())
    one = table.column(label, option="label", usual=("label", "class", "target") if labels is None else ())
    if several is not None and one is not None:
        raise ValueError(f"{table.path} has the columns '{one}' and '{several}'; set data.options.label or data.options.labels")
    if several is not None:
        return _several(table, several, classes)
    if one is None:
        raise ValueError(
            f"{table.path} has no column of labels; set data.options.label, labels or values. It has: "
            f"{', '.join(table.columns)}"
        )
    return _one(table, one, classes)


def _values(table: Table, columns: list[str]) -> tuple[Labels, list[Known], list[str | None], list[str]]:
    targets = [
        Known(tuple(number_in(row[column], where=table.where(number), column=column) for column in columns))
        for number, row in enumerate(table.rows)
    ]
    return "values", targets, [None] * len(targets), columns


def _one(table: Table, column: str, given: Sequence[str] | None) -> tuple[Labels, list[Known], list[str | None], list[str]]:
    found = [row[column] for row in table.rows]
    if "" in found:
        raise ValueError(f"{table.where(found.index(''))}, has no label; fill the column '{column}', or leave the row out")
    known = _classes(table, found, given, column)
    place = {name: number for number, name in enumerate(known)}
    return "class", [Known(place[name]) for name in found], [*found], known


def _several(table: Table, column: str, given: Sequence[str] | None) -> tuple[Labels, list[Known], list[str | None], list[str]]:
    """The stratum of a row is its rarest class, as far as two rows have that."""
    found = [[name.strip() for name in _SEPARATORS.split(row[column]) if name.strip()] for row in table.rows]
    known = _classes(table, [name for names in found for name in names], given, column)
    counts = Counter(name for names in found for name in set(names))
    rarest = [min(names, key=lambda name: (counts[name], name), default=None) for names in found]
    lone = {name for name, times in Counter(rarest).items() if times < 2}
    targets = [Known(tuple(int(name in names) for name in known)) for names in found]
    return "classes", targets, [None if name in lone else name for name in rarest], known


def _classes(table: Table, found: Sequence[str], given: Sequence[str] | None, column: str) -> list[str]:
    if given is None:
        names = sorted(set(found), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
        if not names:
            raise ValueError(f"the column '{column}' of {table.path} has no class at all; fill it")
        return names
    names = list(map(str, given))
    extra = sorted(set(found) - set(names))
    if extra:
        raise ValueError(
            f"{table.path} has the class '{extra[0]}', which data.options.classes lacks; add it, or mend the table"
        )
    return names


def _sample_table(place: Path, write: Callable[[Path], None]) -> Path:
    rows = [("image", "label", "split")]
    for number in range(8):
        write(place / f"{number}.png")
        rows.append((f"{number}.png", "ab"[number % 2], "train" if number < 6 else "val"))
    with (place / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return place / "images.csv"


CASES = [({"path": _sample_table}, 6, 2, 2)]
"""As in imagefolder.py."""
