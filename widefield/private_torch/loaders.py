"""Workers of a DataLoader."""

from __future__ import annotations

from typing import Any


def shutdown_workers(batches: Any) -> None:
    """End the worker processes behind a DataLoader's iterator now, where it has any: else they end when it is collected."""
    getattr(batches, "_shutdown_workers", lambda: None)()
