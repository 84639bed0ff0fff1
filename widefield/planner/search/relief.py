"""How much memory would a run take with what is advised where it ran out?  Each change is priced by emulating its step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from widefield.config import RunConfig, parse_config
from widefield.planner.search.ask import image_of, on_device
from widefield.planner.search.automatic import cluster_here
from widefield.planner.search.layouts import layout_of
from widefield.planner.search.pricing import Pricing
from widefield.plans import plan_of, ranks_of_a_replica
from widefield.quantity import bytes_text
from widefield.section import to_yaml
from widefield.training.given import NOTHING, Given
from widefield.training.out_of_memory import changes

SECONDS = 8.0
"""After so many no further change is priced."""
MOST_WHY = 150
"""Characters of a reason."""


@dataclass(frozen=True)
class Relief:
    """A change of a recipe and the memory of the rank that then takes most; None where that is not known, and why."""

    overrides: tuple[str, ...]
    words: str
    memory_bytes: int | None
    why: str = ""


def reliefs(config: RunConfig, ranks: int, *, seconds: float = SECONDS, given: Given = NOTHING) -> tuple[Relief, list[Relief]]:
    """(the run as it is, each change that takes less), with predicted peaks of memory.

    torch.distributed must not be initialized in this process.  seconds: after which no further change is priced.
    ValueError: the machine's GPU is not known, or the data cannot be opened.
    """
    until = time.monotonic() + seconds
    now = _priced(config, ranks, (), "as it is", given)
    image, _, _ = image_of(config, given)
    found = []
    for overrides, words in changes(config, plan_of(config, ranks), dims=len(image) - 1):
        if time.monotonic() > until:
            found.append(Relief(overrides, words, None, "not priced, for want of time"))
            continue
        changed = parse_config(to_yaml(config), overrides, name="the recipe")
        found.append(_priced(changed, max(ranks, ranks_of_a_replica(changed)), overrides, words, given))
    return now, [one for one in found if now.memory_bytes is None or (one.memory_bytes or 0) < now.memory_bytes]


def _priced(config: RunConfig, ranks: int, overrides: Sequence[str], words: str, given: Given) -> Relief:
    cluster = cluster_here(ranks)
    image, _, _ = image_of(config, given)
    try:
        pricing = Pricing(on_device(config, cluster, dims=len(image) - 1), cluster, given)
        estimate = pricing.estimate(layout_of(config, ranks))
    except NotImplementedError as error:  # CannotEmulate is one
        return Relief(tuple(overrides), words, None, str(error))
    if not estimate.memory:
        return Relief(tuple(overrides), words, None, estimate.reason)
    return Relief(tuple(overrides), words, max(rank.total_bytes for rank in estimate.memory))


def in_words(now: Relief, found: Sequence[Relief]) -> list[str]:
    """A line for each, the run as it is first; none where nothing could be priced."""
    if all(one.memory_bytes is None for one in (now, *found)):
        return []
    lines = ["predicted memory of the fullest rank:"]
    for one in (now, *found):
        size = bytes_text(one.memory_bytes) if one.memory_bytes is not None else "unknown"
        lines.append(f"  {size:>10}  {one.words}{f' ({one.why[:MOST_WHY]})' if one.why else ''}")
    return lines
