"""Tables of samples: CSV, TSV, JSON lines and Parquet, as rows of texts by column."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widefield.naming import did_you_mean

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
Row = dict[str, str]


@dataclass(frozen=True)
class Table:
    """rows: a text for each column, "" where there is nothing; of a list, its items with ; between."""

    path: Path
    columns: list[str]
    rows: list[Row]

    def where(self, number: int) -> str:
        """The row, for errors, counted as an editor counts the lines of a CSV file."""
        return (
            f"{self.path}, row {number + 2}"
            if self.path.suffix.lower() in (".csv", ".tsv")
            else f"{self.path}, row {number + 1}"
        )

    def column(self, name: str | None, *, option: str, usual: Sequence[str] = ()) -> str | None:
        """The column that an option names, or the first usual one that is there; None where there is none.

        ValueError: the option names none.
        """
        if name is None:
            return next((one for one in usual if one in self.columns), None)
        if name not in self.columns:
            raise ValueError(
                f"data.options.{option} is '{name}' and {self.path} has no such column{did_you_mean(name, self.columns)} "
                f"It has: {', '.join(self.columns)}"
            )
        return name


def read_table(path: Path) -> Table:
    """ValueError: no such file, another suffix, not what its suffix says, no rows, or pyarrow is missing for Parquet."""
    if not path.is_file():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"data.path is {path} and there is no such file{did_you_mean(path.name, beside)}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"data.path is {path}; a table is one of {', '.join(SUFFIXES)}")
    try:
        rows = {".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet}.get(suffix, _separated)(path)
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as {suffix} ({error}); save it again, in UTF-8") from None
    if not rows:
        raise ValueError(f"{path} has no rows; give one per image")
    return Table(path, list(dict.fromkeys(key for row in rows for key in row)), rows)


def _separated(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a byte order mark
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"{path} has the columns {names}; give each a name of its own, in the first line")
        rows = []
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                raise ValueError(f"{path}, row {number + 2}, has not the {len(names)} cells of the first line; mend it")
            rows.append({key: value.strip() for key, value in row.items()})
        return rows


def _json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{path}, row {number + 1}, is no object; write one {{...}} per line")
            rows.append({str(key): _text(value) for key, value in row.items()})
    columns = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key, "") for key in columns} for row in rows]


def _parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(f"reading {path} needs pyarrow; pip install 'widefield[parquet]', or save it as CSV") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} cannot be read as .parquet ({error}); save it again") from None
    return [{str(key): _text(value) for key, value in row.items()} for row in rows]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ";".join(map(_text, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def number_in(text: str, *, where: str, column: str) -> float:
    """A finite number.  ValueError: the cell has none.  where: the row."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value - value != 0:
        raise ValueError(f"{where}: '{text}' in the column '{column}' is no finite number; mend it")
    return value


def numbered_fold(text: str) -> str:
    """A fold as data.fold has it: 2.0, as spreadsheets write it, is 2."""
    return text.removesuffix(".0")
