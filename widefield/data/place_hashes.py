"""Random numbers that are hashes of a place, so that a window of generated data is that part of the whole, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from widefield.data.transforms import seed_of

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
