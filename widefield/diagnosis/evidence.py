"""The files of a run as text: record.jsonl, logs of launchers, tracebacks, batch scripts.  Nothing in them runs.

A run folder is searched for files that are called like logs.  Of a large file the beginning and the end are read.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from widefield.redaction import redacted

LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".sh", ".sbatch", ".slurm")
LOG_NAMES = ("stdout", "stderr")
NOT_LOGS = ("checkpoints", "tensorboard", "wandb", "mlruns")
"""Folders of a run in which no logs are."""
HEAD_BYTES, TAIL_BYTES = 16 * 2**20, 48 * 2**20
"""Read of a file: its first and its last bytes."""
FILES_MOST, ALL_BYTES_MOST = 4096, 2**30
"""Of all files of a run that are read."""
RECORD = "record.jsonl"
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"\[rank ?(\d+)\]|\bRank (\d+)\]|\[default(\d+)\]:|\brank(?: |\s*: )(\d+)\b", re.IGNORECASE)


@dataclass(frozen=True)
class LogFile:
    """A file's text.  skipped: lines left out, after the first `head` ones."""

    name: str
    text: str
    head: int = 0
    skipped: int = 0

    @cached_property
    def starts(self) -> list[int]:
        """Where each line begins."""
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def line_at(self, position: int) -> LogLine:
        """The line in which a character is; of what a progress bar wrote over itself, the part with the character."""
        index = bisect_right(self.starts, position) - 1
        end = self.text.find("\n", position)
        begin = max(self.starts[index], self.text.rfind("\r", 0, position) + 1)
        text = self.text[begin : len(self.text) if end < 0 else end].partition("\r")[0]
        return LogLine(self.name, index + 1 + (self.skipped if index >= self.head else 0), text)


@dataclass(frozen=True)
class LogLine:
    """One line that something was concluded from.  number: counted from 1."""

    file: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"

    def __str__(self) -> str:
        """With what is secret in it left out, and no longer than a paragraph."""
        text = redacted(self.text.strip())
        return f"{self.where}: {text[:297] + '...' if len(text) > 300 else text}"


@dataclass(frozen=True)
class Sighting:
    """Where a pattern was found.  groups: its named groups."""

    line: LogLine
    groups: dict[str, str] = field(default_factory=dict)
    detail: str = ""
    """A sentence with the figures of this run."""

    @property
    def rank(self) -> int | None:
        """The rank that the pattern's group `rank` or the line names; None where they name none."""
        return int(self.groups["rank"]) if "rank" in self.groups else rank_in(self.line.text)


@dataclass(frozen=True)
class Evidence:
    """All files of a run.  record: the lines of record.jsonl, which is also among `files`, as text.

    left_out: how many files were not read, since the others are so many or so large.
    """

    files: tuple[LogFile, ...]
    record: tuple[dict[str, Any], ...] = ()
    left_out: int = 0

    @property
    def lines(self) -> int:
        return sum(len(file.starts) + file.skipped for file in self.files)

    def first(self, *patterns: str) -> Sighting | None:
        """The first place, in the order of files and lines, where one of the patterns fits; None where none does."""
        return next(self.all(*patterns), None)

    def all(self, *patterns: str) -> Iterator[Sighting]:
        """Every place where a pattern fits, by file and then by line; the line is that of its group `seen`, if it has one."""
        for file in self.files:
            found = [match for pattern in patterns for match in re.finditer(pattern, file.text, re.MULTILINE)]
            for match in sorted(found, key=lambda match: match.start()):
                groups = {name: text for name, text in match.groupdict().items() if text is not None}
                yield Sighting(file.line_at(match.start("seen") if "seen" in groups else match.start()), groups)

    def has(self, *patterns: str) -> bool:
        return self.first(*patterns) is not None


def rank_in(text: str) -> int | None:
    """The rank that a line of a log names first, as `[rank3]:` or `rank 3`."""
    match = _RANK.search(text)
    return None if match is None else int(next(number for number in match.groups() if number is not None))


def evidence_of_text(text: str, name: str = "log") -> Evidence:
    """A text as if it were a log file."""
    return Evidence((LogFile(name, _plain(text)),))


def read_evidence(paths: Sequence[str | Path]) -> Evidence:
    """The files, and the logs in folders.  ValueError: one is not there, or a folder has neither a record nor a log."""
    named = [(file, name) for path in map(Path, paths) for file, name in _files_of(path)]
    files: list[LogFile] = []
    record: list[dict[str, Any]] = []
    size = 0
    for file, name in named[:FILES_MOST]:
        if size > ALL_BYTES_MOST:
            break
        read = _read(file, name)
        size += len(read.text)
        if file.name == RECORD:
            rows = [_decoded_row(row) for row in read.text.split("\n")]
            record += [row for row in rows if row]
            read = LogFile(name, "\n".join(map(_record_in_words, rows)), read.head, read.skipped)
        files.append(read)
    return Evidence(tuple(files), tuple(record), len(named) - len(files))


def _files_of(path: Path) -> list[tuple[Path, str]]:
    """A file, or the logs of a folder, with the names to tell them by.  ValueError: the folder has none."""
    if not path.is_dir():
        return [(path, str(path))]
    found = sorted(_logs_in(path))
    if not found:
        raise ValueError(
            f"{path} has no {RECORD} and no file that is called like a log ({', '.join(LOG_SUFFIXES)}, stdout, stderr); "
            "name the log files themselves, or the folder of a run"
        )
    return [(file, file.relative_to(path).as_posix()) for file in found]


def _logs_in(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        inner = path.relative_to(folder).parts
        if set(inner[:-1]) & set(NOT_LOGS) or len(inner) > 8 or not path.is_file():
            continue
        if path.name == RECORD or path.suffix in LOG_SUFFIXES or path.stem in LOG_NAMES:
            yield path


def _read(path: Path, name: str) -> LogFile:
    """ValueError: it cannot be read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= HEAD_BYTES + TAIL_BYTES:
                return LogFile(name, _plain(file.read().decode("utf-8", "replace")))
            head = file.read(HEAD_BYTES)
            skipped = _newlines_until(file, size - TAIL_BYTES)
            tail = file.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; name a log file or a run folder") from None
    first, last = (_plain(part.decode("utf-8", "replace")) for part in (head, tail))
    return LogFile(name, f"{first}\n{last}", head=first.count("\n") + 1, skipped=max(0, skipped - 1))


def _newlines_until(file: Any, stop: int) -> int:
    """Newlines from where the file stands to byte `stop`."""
    count = 0
    while (left := stop - file.tell()) > 0:
        count += file.read(min(left, 2**20)).count(b"\n")
    return count


def _plain(text: str) -> str:
    """Without colours."""
    return _COLOURS.sub("", text.replace("\0", "")).replace("\r\n", "\n")


def _decoded_row(row: str) -> dict[str, Any] | None:
    try:
        decoded = json.loads(row)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def _record_in_words(row: dict[str, Any] | None) -> str:
    """A line of the record as a line of a log: what a run said of itself; empty for numbers of a step."""
    if row is None:
        return ""
    kind, text = row.get("kind"), str(row.get("text", "")).replace("\n", " ")
    if kind == "step" and not _is_number(row.get("loss")):
        return f"step {row.get('step')} loss {row.get('loss')}"
    return f"{kind}: {row.get('reason', '')} {text}" if kind in ("warning", "end", "guard", "restart", "stall") else ""


def _is_number(value: Any) -> bool:
    """A finite one: the record has others as text."""
    return isinstance(value, int | float)
