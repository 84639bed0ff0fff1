"""Tables of fallbacks: operations that ran whole though the plan asks for tiles, channels or micro-batches."""

from __future__ import annotations

from typing import Any

from widefield.fallback import Fallback, by_kind, head_of
from widefield.quantity import size_text

ROWS_MOST = 50
"""The most rows of a table; the last one counts the rest."""


def tables(start: dict[str, Any]) -> list[dict[str, Any]]:
    """`head` and `rows` (module, operation, count, bytes, why) of each kind, the largest first, from a record's start line."""
    found = by_kind(Fallback(**row) for row in start.get("fallbacks", []))
    return [{"head": head_of(kind, rows), "rows": _rows(rows)} for kind, rows in found.items()]


def _rows(rows: list[Fallback]) -> list[tuple[str, str, str, str, str]]:
    found = [(row.module or "the model itself", row.operation, f"{row.count:,}", size_text(row.bytes), row.why) for row in rows]
    left = rows[ROWS_MOST:]
    if not left:
        return found
    count, size = sum(row.count for row in left), sum(row.bytes for row in left)
    return [*found[:ROWS_MOST], (f"{len(left)} more", "", f"{count:,}", size_text(size), "")]
