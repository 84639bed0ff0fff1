"""What pays for large images and weights alone, done for small ones: the programs that are drawn are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from widefield.engine import dispatch, layout, memory_order, mesh, moments, windowed
from widefield.engine.channel import choose
from widefield.engine.strategies import _buckets, _reducer, fully_shard, recompute

LARGE: tuple[tuple[Any, str, Any], ...] = (
    (choose, "WEIGHT_LEAST", 1),
    (choose, "FLOPS_PER_BYTE", 0.01),
    (_buckets, "FIRST_BYTES", 64),
    (_reducer, "LAYOUTS_MOST", 1),
    (fully_shard, "SMALLEST_BYTES", 1),
    (recompute, "SMALLEST_BYTES", 1),
    (mesh, "BROADCAST_BYTES", 64),
    (moments, "CHUNK", 8),
    (windowed, "SMALL_SHARE", 10.0),
    (dispatch, "KNOWN_MOST", 8),
    (memory_order, "KNOWN_MOST", 8),
    (layout, "KEPT_MOST", 64),
)
"""Layers are cut by channels whatever that costs, gradients leave in many buckets, each block is a unit of its own, halos are
computed apart from what lies between them, and what is kept of layouts is forgotten early."""


@contextmanager
def as_if_large(holds: bool) -> Iterator[None]:
    """Inside, if it `holds`, sizes count as large; what was decided before, and will be here, is forgotten."""
    if not holds:
        yield
        return
    before = [(module, name, getattr(module, name)) for module, name, _ in LARGE]
    dispatch._KNOWN.clear()
    for module, name, value in LARGE:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        dispatch._KNOWN.clear()
