"""What tables of images have in common: the image, its split, fold, group and weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from widefield.data.records import FileRecord, Target
from widefield.data.splits import Item
from widefield.data.tables import Table, number_in, numbered_fold

_USUAL = {
    "image": ("image", "path", "file", "filename", "file_name"),
    "split": ("split",),
    "fold": ("fold",),
    "group": ("group", "patient"),
    "weight": ("weight",),
}
Columns = Mapping[str, str | None]


def columns_of(table: Table, **options: str | None) -> Columns:
    """The columns for image, split, fold, group and weight: those that options name, or usual ones.

    ValueError: a named one is not there, or none is for images.
    """
    found = {key: table.column(options.get(key), option=key, usual=usual) for key, usual in _USUAL.items()}
    if found["image"] is None:
        raise ValueError(f"{table.path} has no column for images; name it: data.options.image={table.columns[0]}")
    return found


def record_of_row(
    table: Table, number: int, columns: Columns, folder: Path, *, target: Target, stratum: str | None = None
) -> FileRecord:
    """ValueError, with the row: no image or group, or a weight that is none.  folder: which paths are relative to."""
    row, where = table.rows[number], table.where(number)
    cells = {key: None if column is None else row[column] for key, column in columns.items()}
    path, weight, fold = cells["image"], cells["weight"], cells["fold"]
    if not path:
        raise ValueError(f"{where}, names no image; fill the column '{columns['image']}'")
    if cells["group"] == "":
        raise ValueError(f"{where}, has no group, and others have one; fill the column '{columns['group']}'")
    drawn = None if weight is None else number_in(weight, where=where, column=columns["weight"] or "")
    if drawn is not None and drawn < 0:
        raise ValueError(f"{where}: the weight {drawn:g} is below 0; give 0 or more")
    item = Item(path, stratum, cells["group"], cells["split"], None if fold is None else numbered_fold(fold))
    return FileRecord((folder / path,), target, item, drawn)


def check_images(table: Table, records: Sequence[FileRecord]) -> None:
    """ValueError: an image is missing, or is in two rows."""
    seen: dict[Path, str] = {}
    for number, record in enumerate(records):
        file, where = record.files[0], table.where(number)
        if file in seen:
            raise ValueError(f"{where}, and {seen[file]}, are of the same image, {file}; leave one out")
        seen[file] = where
        if not file.is_file():
            raise ValueError(
                f"{where}, is of the image {file}, and there is no such file; mend the path, or set data.options.root to the "
                "folder that paths are relative to"
            )
