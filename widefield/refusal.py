"""Whose error is it?  What widefield raises is words for the user; what anything else raises wants its traceback."""

from __future__ import annotations

import traceback


def is_ours(error: BaseException) -> bool:
    """Whether widefield itself raised it, in words meant for the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).startswith("widefield")
