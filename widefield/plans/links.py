"""Which axes of a plan send between machines?  Ranks are numbered machine by machine, and the axes inside are neighbours.

Messages inside of a machine are some ten times as fast as those between machines.  Copies of a model meet once a step, and
may be far apart; tiles of an image and channels meet in every layer, and belong on one machine.
"""

from __future__ import annotations

from widefield.plans.plan import Plan

MEETS = {
    "space": "the edges of tiles go between machines in every layer",
    "channel": "the results of every layer that is cut go between machines",
}
"""The axes that belong inside of a machine, and what goes between machines where they do not fit."""


def axes_between_machines(plan: Plan, ranks_per_machine: int) -> list[str]:
    """The axes, outermost first, some of whose groups have ranks on several machines of so many ranks each.

    >>> axes_between_machines(Plan(replicate=4, space=[2, 2]), 8), axes_between_machines(Plan(replicate=2, space=[3]), 2)
    (['replicate'], ['replicate', 'space'])
    """
    if plan.ranks <= ranks_per_machine:
        return []
    inside, found = 1, []
    for axis, size in reversed(plan.axes.items()):
        inside *= size  # a group of this axis lies in a run of so many ranks
        if size > 1 and ranks_per_machine % inside:
            found.append(axis)
    return found[::-1]


def slow_links(plan: Plan, ranks_per_machine: int) -> list[str]:
    """A sentence for each axis that belongs inside of a machine and does not fit there."""
    ranks = "1 rank" if ranks_per_machine == 1 else f"{ranks_per_machine} ranks"
    return [
        f"{_axis(plan, axis)} is on several machines of {ranks} each, so {MEETS[axis]}, which is slow; it fits one machine "
        f"where {_product(plan, axis)} divides {ranks_per_machine}"
        for axis in axes_between_machines(plan, ranks_per_machine)
        if axis in MEETS
    ]


def _product(plan: Plan, axis: str) -> str:
    """As `space 4 x channel 2`: the ranks among which a group of the axis lies."""
    names = list(plan.axes)
    inner = [name for name in names[names.index(axis) :] if name == axis or plan.axes[name] > 1]
    return " x ".join(f"{name} {plan.axes[name]}" for name in inner)


def _axis(plan: Plan, axis: str) -> str:
    return f"mesh.{axis}={list(plan.space) if axis == 'space' else plan.axes[axis]}"
