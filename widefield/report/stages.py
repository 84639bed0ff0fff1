"""The schedule of a pipeline as SVG, whose colours the page sets (see plots)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from widefield import plans
from widefield.pipelining.schedule_view import STAGES_PER_RANK, idle_share, schedule_grid
from widefield.plans import Plan
from widefield.report.plots import FAINT, INK, SERIES, SURFACE, WIDTH_IN, drawn, style

ROW_IN = 0.34
MOST_NAMED = 72
"""The most slots into which the numbers of micro-batches fit."""
MOST_DRAWN = 4096
"""The most micro-batches times stages; larger pictures are unreadable and take minutes to draw."""
_COLOURS = {"F": SERIES[0], "B": SERIES[1], "I": SERIES[1], "W": SERIES[2]}
_MEANINGS = {"F": "forward", "B": "backward", "I": "backward to the input", "W": "backward to the weights"}


def stages(start: dict[str, Any]) -> dict[str, str] | None:
    """`picture` and `caption` of a run's pipeline, from its record's start line; None without one, or if it is too large."""
    plan, count = _plan(start), _micro_batches(start)
    if plan is None or plan.stage == 1 or count is None or plan.stage * count > MOST_DRAWN:
        return None
    grid = schedule_grid(plan.pipeline.schedule, plan.stage, count)
    batches = f"{count} micro-batches" if count > 1 else "One micro-batch"
    second = " A prime marks the second stage of a rank." if STAGES_PER_RANK[plan.pipeline.schedule] > 1 else ""
    caption = (
        f"{batches} by {plan.pipeline.schedule} on {plan.stage} ranks, if stages take equally long, a backward takes twice a "
        f"forward, and messages take no time: {idle_share(grid):.0%} of the time is idle.{second}"
    )
    return {"picture": Markup(_picture(grid, STAGES_PER_RANK[plan.pipeline.schedule])), "caption": caption}


def _plan(start: dict[str, Any]) -> Plan | None:
    try:
        return plans.from_text(start.get("plan", ""))
    except ValueError:
        return None


def _micro_batches(start: dict[str, Any]) -> int | None:
    """The number of micro-batches, from the reasons in the record, which always state it."""
    found = re.search(r"pipeline\.micro_batches=(\d+)", "\n".join(start.get("reasons", [])))
    return int(found[1]) if found else None


def _picture(grid: Sequence[Sequence[str]], per_rank: int) -> str:
    ranks, slots = len(grid), len(grid[0])
    kinds = {slot[0] for row in grid for slot in row if slot}
    with style():
        figure = Figure(figsize=(2 * WIDTH_IN, 0.9 + ROW_IN * ranks))
        axes = figure.subplots()
        for rank, row in enumerate(grid):
            for first, length, slot in _runs(row):
                _draw(axes, rank, first, length, slot, named=slots <= MOST_NAMED)
        for kind in (kind for kind in _COLOURS if kind in kinds):
            axes.barh([0], [0], color=_COLOURS[kind], label=_MEANINGS[kind])
        names = [", ".join(str(rank + ranks * more) for more in range(per_rank)) for rank in range(ranks)]
        axes.set_yticks(range(ranks), [f"stage{'s' if per_rank > 1 else ''} {name}" for name in names])
        axes.tick_params(axis="y", labelcolor=INK)
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_xlim(0, slots)
        axes.set_xticks([])
        axes.set_xlabel("time", color=FAINT)
        axes.grid(visible=False)
        figure.legend(loc="outside upper left", frameon=False, ncols=3, handlelength=1.0, labelcolor=INK, fontsize=10)
        return drawn(figure, "what each stage does when")


def _runs(row: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yields the first slot of each piece of work, how many slots it takes, and what it is."""
    at = 0
    for slot, same in groupby(row):
        length = len(list(same))
        if slot:
            yield at, length, slot
        at += length


def _draw(axes: Axes, rank: int, first: int, length: int, slot: str, *, named: bool) -> None:
    axes.barh([rank], [length], left=first, height=0.8, color=_COLOURS[slot[0]], edgecolor=SURFACE, linewidth=1.2)
    if named:
        axes.annotate(slot[1:], (first + length / 2, rank), ha="center", va="center", fontsize=9, color=SURFACE)
