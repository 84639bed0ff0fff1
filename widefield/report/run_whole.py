"""What ran on the whole though the plan asked for tiles, channels or micro-batches: a table of each kind, the largest first."""

from __future__ import annotations

from typing import Any

from widefield.fallback import Fallback, by_kind, head_of, size_text

ROWS_MOST = 50
"""Rows of a table; what is beyond is counted in its last one."""


def tables(start: dict[str, Any]) -> list[dict[str, Any]]:
    """`head` and `rows` (module, operation, times, bytes, why) of each kind, from the start of a record; none in an old one."""
    found = by_kind(Fallback(**row) for row in start.get("fallbacks", []))
    return [{"head": head_of(kind, rows), "rows": _rows(rows)} for kind, rows in found.items()]


def _rows(rows: list[Fallback]) -> list[tuple[str, str, str, str, str]]:
    found = [(row.module or "the model itself", row.operation, f"{row.count:,}", size_text(row.bytes), row.why) for row in rows]
    left = rows[ROWS_MOST:]
    if not left:
        return found
    count, size = sum(row.count for row in left), sum(row.bytes for row in left)
    return [*found[:ROWS_MOST], (f"{len(left)} more", "", f"{count:,}", size_text(size), "")]
