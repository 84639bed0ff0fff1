"""What pays for large images and weights alone, done for small ones: the programs that are drawn are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from widefield.comm import mesh
from widefield.geometry import layout
from widefield.kernels import moments
from widefield.parallel.strategies import _buckets, _offload, _reducer, fully_shard
from widefield.tensor_parallel import search
from widefield.tiled import dispatch, memory_format
from widefield.tiled.executors import windowed

LARGE: tuple[tuple[Any, str, Any], ...] = (
    (search, "WEIGHT_LEAST", 1),
    (search, "FLOPS_PER_BYTE", 0.01),
    (_buckets, "FIRST_BYTES", 64),
    (_reducer, "LAYOUTS_MOST", 1),
    (fully_shard, "SMALLEST_BYTES", 1),
    (_offload, "SMALLEST_BYTES", 1),
    (mesh, "BROADCAST_BYTES", 64),
    (moments, "CHUNK", 8),
    (windowed, "SMALL_SHARE", 10.0),
    (dispatch, "CACHE_SIZE", 8),
    (memory_format, "CACHE_SIZE", 8),
    (layout, "CACHE_SIZE", 64),
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
    dispatch._CACHE.clear()
    for module, name, value in LARGE:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        dispatch._CACHE.clear()
