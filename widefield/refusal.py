"""Whose error is it, and how is it told?  What widefield raises is words for the user; anything else wants its traceback."""

from __future__ import annotations

import traceback

FOLLOWED = 3
"""Status of a rank that ends because another failed; a launcher looks for that one."""


def is_ours(error: BaseException) -> bool:
    """Whether widefield itself raised it, in words meant for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("widefield")


def printable(text: str) -> str:
    """`text` with control characters (as file names may hold) spelled out."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
