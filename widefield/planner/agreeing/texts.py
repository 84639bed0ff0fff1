"""Stragglers and links as a user writes them: `3x`, `4:2.5x`; `50us,10Gbit/s`.  Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_STRAGGLER = re.compile(r"(?:(\d+):)?(\d+(?:\.\d+)?)x?")
_LINK = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s),(\d+(?:\.\d+)?)([KMGT]?)(B|bit)(?:/s)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def stragglers_of(texts: Sequence[str | float], workers: int) -> dict[int, float]:
    """By worker, how many times longer it takes: the last one for the first text, and so on down.

    >>> stragglers_of(["3x", "2:1.5x"], workers=8)
    {7: 3.0, 6: 1.5, 5: 1.5}

    ValueError: a text that says nothing of it, a factor below 1, more stragglers than workers.
    """
    found: list[float] = []
    for text in texts:
        match = _STRAGGLER.fullmatch(str(text).strip().lower())
        if match is None:
            raise ValueError(
                f"no straggler: {text!r}; write how many times longer it takes, as 3x, and 4:3x for four such workers"
            )
        factor = float(match[2])
        if factor < 1:
            raise ValueError(
                f"a straggler of {factor:g}x would be faster than the others; write 1x or more, and a shorter step for all"
            )
        found += [factor] * int(match[1] or 1)
        if len(found) > workers:
            raise ValueError(f"{len(found)} stragglers of {workers} workers; name fewer, or a longer step for all")
    return {workers - 1 - place: factor for place, factor in enumerate(found)}


def link_text_read(text: str) -> tuple[float, float]:
    """(latency in seconds, bytes per second) of `50us,10Gbit/s`.  ValueError: another text, or no bandwidth.

    >>> link_text_read("2ms,125MB")
    (0.002, 125000000.0)
    """
    match = _LINK.fullmatch(re.sub(r"\s+", "", text))
    rate = 0.0 if match is None else float(match[3]) * _THOUSANDS[match[4]] / (8 if match[5] == "bit" else 1)
    if match is None or not 0 < rate < math.inf:
        raise ValueError(f"no link: {text!r}; write a latency and a bandwidth above 0, as 50us,10Gbit/s or 1ms,125MB/s")
    return float(match[1]) * _SECONDS[match[2]], rate
