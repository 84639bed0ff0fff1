"""Random numbers that are hashes of a place, so that a window of generated data is that part of the whole, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from widefield.data.transforms import seed_of
from widefield.geometry import Interval

Array = np.ndarray[Any, Any]


def place_hashes(key: int, *at: Array, purpose: int) -> Array:
    """A 32-bit hash for each place: the finalizer of MurmurHash3 (Appleby) after each input.

    key: of the image.  at: a coordinate along each dim, as y and x, which broadcast.
    purpose: what the numbers are for, so that two purposes have others.
    """
    first, *further = at
    state = _mixed(np.uint32(seed_of(key, purpose) % 2**32) ^ first.astype(np.uint32))
    for one in further:
        state = _mixed(state * np.uint32(0x9E3779B1) ^ one.astype(np.uint32))
    return state


def _mixed(state: Array) -> Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return state ^ (state >> np.uint32(16))


def smooth_noise(key: int, purpose: int, step: int, rows: Interval, columns: Interval) -> Array:
    """Numbers of 0 to 255, bilinear between points `step` pixels apart, with a smooth slope there."""
    down, across = (np.arange(run.start // step, (run.stop - 1) // step + 2) for run in (rows, columns))
    points = (place_hashes(key, down[:, None], across[None], purpose=16 + purpose) >> np.uint32(24)).astype(np.int64)
    (y, dy), (x, dx) = (_eased(run, step) for run in (rows, columns))
    lines = points[:, x] * (_ONE - dx) + points[:, x + 1] * dx
    return (lines[y] * (_ONE - dy)[:, None] + lines[y + 1] * dy[:, None]) // _ONE**2


_ONE = 1024


def _eased(run: Interval, step: int) -> tuple[Array, Array]:
    """For each pixel: the point before it, counted from the first, and 3 t^2 - 2 t^3 of its distance t, in 1/_ONE."""
    pixels = np.arange(run.start, run.stop, dtype=np.int64)
    t = pixels % step * _ONE // step
    return pixels // step - run.start // step, (3 * _ONE - 2 * t) * t * t // _ONE**2
