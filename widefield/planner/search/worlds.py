"""Which ranks of a world need to be emulated, and in how small a world.

Copies of the model do the same on parts of the batch, so that more than two of them change the size of the groups alone: a
world of 16,384 ranks is emulated as one of two copies, and its groups are then given their true ranks.  Of a copy's ranks only
those are emulated that differ: tiles with neighbours on all sides and tiles in the corner, and every stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from widefield.planner.search.layouts import RunLayout
from widefield.planner.step_record import MessageEvent, StepRecord


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same.  rank: one of them, in the first copy.  ranks: how many they are in the whole world."""

    rank: int
    role: str
    ranks: int


@dataclass(frozen=True)
class SmallWorld:
    """The world to emulate in place of that of `layout`.

    small: the same with at most two replicas.  batch: so that the first copy has as many samples as in the true world.
    samples: of a step in the true world.
    """

    layout: RunLayout
    small: RunLayout
    batch: int
    samples: int


def small_world(layout: RunLayout, batch: int) -> SmallWorld:
    small = dataclasses.replace(layout, replicate=min(layout.replicate, 2))
    if layout.replicate <= 2:
        return SmallWorld(layout, small, batch, batch)
    return SmallWorld(layout, small, -(-batch // layout.copies) * small.copies, batch)


def classes_of(layout: RunLayout, *, corners: bool = True) -> list[RankClass]:
    """The classes of ranks, the one that holds most first, as far as that is known: tiles inside before tiles in a corner.

    corners: also the tile in the corner, which has fewer neighbours, where there are others.
    """
    inside = tuple(min(1, size - 2) if size > 2 else 0 for size in layout.space)
    corner = (0,) * len(layout.space)
    tiles = {inside: "interior tile" if any(inside) else "tile"}
    if corners and inside != corner:
        tiles[corner] = "corner tile"
    found = []
    for tile, stage in itertools.product(tiles, range(layout.stage)):
        name = [tiles[tile]] * bool(layout.space) + [f"stage {stage + 1} of {layout.stage}"] * (layout.stage > 1)
        share = _ranks_alike(tile, layout) if len(tiles) > 1 else layout.tiles
        ranks = layout.copies * layout.channel * share
        found.append(RankClass(_rank(tile, stage, layout), ", ".join(name) or "every rank", ranks))
    return found


def _ranks_alike(tile: tuple[int, ...], layout: RunLayout) -> int:
    """The tiles in corners; of the tile inside all others."""
    corners = 1
    for size in layout.space:
        corners *= min(size, 2)
    return corners if not any(tile) else layout.tiles - corners


def _rank(tile: tuple[int, ...], stage: int, layout: RunLayout) -> int:
    """In the order of a mesh: replicate outermost, then shard, space, channel, stage."""
    number = 0
    for place, size in zip(tile, layout.space, strict=True):
        number = number * size + place
    return number * layout.channel * layout.stage + stage


def at_true_size(record: StepRecord, world: SmallWorld) -> StepRecord:
    """The record with the groups of the true world: a group with ranks of both emulated replicas has those of all."""
    layout, small = world.layout, world.small
    if layout == small:
        return record
    each = layout.ranks_of_a_replica
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def grown(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in known:
            within = sorted({rank % each for rank in ranks})
            both = len({rank // each for rank in ranks}) == small.replicate
            known[ranks] = tuple(r * each + w for r in range(layout.replicate) for w in within) if both else ranks
        return known[ranks]

    events = [
        dataclasses.replace(event, ranks=grown(event.ranks))
        if isinstance(event, MessageEvent) and event.peer is None
        else event
        for event in record.events
    ]
    return dataclasses.replace(record, events=events, ranks=layout.ranks, samples=world.samples)
