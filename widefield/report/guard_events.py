"""What the guard of a run did, from its record: a row for each refused step, return and difference of replicas."""

from __future__ import annotations

import os
from typing import Any

from widefield.quantity import count_of
from widefield.training.record import Line

ROWS_MOST = 100
"""Of the newest."""
NAMES_MOST = 3


def guard_rows(lines: list[Line]) -> list[tuple[str, str, str]]:
    """(step, what was seen, what was done) of each event, oldest first."""
    return [_row(line) for line in lines if line.get("kind") == "guard"][-ROWS_MOST:]


def _row(line: Line) -> tuple[str, str, str]:
    action, found = str(line.get("action")), line.get("found")
    if "to" in line:
        return f"{line['left']:,}", "–", f"went back to step {line['to']:,} ({line['checkpoint']})"
    if action == "pass_over":
        return f"{line['batch_step']:,}", "–", f"passed over {count_of(line['samples'], 'sample')}, which count as seen"
    if found == "replicas differ":
        named = "" if line["is_named"] else ", none of which is known to be right"
        ranks = ", ".join(str(rank) for rank in line["ranks"])
        return f"{line['after_step']:,}", f"other bits in {line['part']} on ranks {ranks}{named}", _done(action)
    return f"{line['batch_step']:,}", f"{found}: {_value(line)}{_images(line)}", f"{_done(action)}{_kept(line)}"


def _done(action: str) -> str:
    done = {"stop": "the run ended", "skip": "left out; its samples count as seen", "roll_back": "the run goes back"}
    return done.get(action, action)


def _value(line: Line) -> str:
    value = f"{float(line['value']):.6g}"
    if line.get("usual") is None:
        return value
    return f"{value}, where {float(line['usual']):.6g} is usual (score {float(line['score']):.1f})"


def _images(line: Line) -> str:
    names: list[Any] = line.get("images") or []
    more = f" and {len(line['index']) - NAMES_MOST} more" if len(line["index"]) > NAMES_MOST else ""
    return f"; {', '.join(os.path.basename(str(name)) for name in names[:NAMES_MOST])}{more}" if names else ""


def _kept(line: Line) -> str:
    return f"; widefield replay RUN_DIR {line['batch_step']}" if line.get("batch") else ""
