"""In what order does each rank work on the micro-batches?  As data for reports; torch's schedules run in the same order.

`F3` is the forward of micro-batch 3, in one slot, and `B3` its backward, in two.  With `zero_bubble` the backward is split into
`I3`, the gradient of the stage's input, and `W3`, the gradient of its weights, in one slot each.  Where a rank has several
stages, `F3` of its second stage is `F3'`, and so on.  An empty slot is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""How many stages every rank has."""

_SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class Action:
    """kind: F forward, B backward, I and W the backward's two halves.  stage: among all stages, from 0."""

    kind: str
    stage: int
    micro_batch: int


def orders(schedule: Kind, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Each rank's actions, in order."""
    if schedule == "gpipe" or (schedule == "1f1b" and micro_batches < ranks):
        return [_gpipe(rank, micro_batches) for rank in range(ranks)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    return [_in_rounds(rank, ranks, micro_batches, schedule) for rank in range(ranks)]


def _gpipe(rank: int, micro_batches: int) -> list[Action]:
    return [Action(kind, rank, number) for kind in "FB" for number in range(micro_batches)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(micro_batches, ranks - rank)
    found = [Action("F", rank, number) for number in range(ahead)]
    for number in range(micro_batches):
        found.append(Action("B", rank, number))
        if number + ahead < micro_batches:
            found.append(Action("F", rank, number + ahead))
    return found


def _in_rounds(rank: int, ranks: int, micro_batches: int, schedule: Kind) -> list[Action]:
    """Megatron's interleaved order (Narayanan et al. 2021, arXiv:2104.04473) and ZB-H1 (Qi et al. 2024, arXiv:2401.10241)."""
    here, splits = STAGES_PER_RANK[schedule], schedule == "zero_bubble"
    a_round = micro_batches // max(1, micro_batches // ranks)
    total = here * micro_batches
    warm = min(total, (here - 1) * a_round + (1 if splits else 2) * (ranks - 1 - rank))
    forwards = _actions("F", lambda step: step // a_round % here, rank, ranks)
    backwards = _actions("I" if splits else "B", lambda step: here - 1 - step // a_round % here, rank, ranks)
    weights = _actions("W", lambda step: here - 1 - step // a_round % here, rank, ranks)
    found = [next(forwards) for _ in range(warm)]
    for step in range(total):
        if step < total - warm:
            found.append(next(forwards))
        found.append(next(backwards))
        if splits and step >= rank:
            found.append(next(weights))
    return found + [next(weights) for _ in range(min(rank, total) if splits else 0)]


def _actions(kind: str, chunk_of: Callable[[int], int], rank: int, ranks: int) -> Iterator[Action]:
    """A rank's actions of a kind: each of its stages takes micro-batches in order.  chunk_of: which of its stages at a step."""
    done: dict[int, int] = {}
    step = 0
    while True:
        stage = chunk_of(step) * ranks + rank
        yield Action(kind, stage, done.get(stage, 0))
        done[stage], step = done.get(stage, 0) + 1, step + 1


def schedule_grid(schedule: Kind, ranks: int, micro_batches: int) -> list[list[str]]:
    """[rank][slot]: the action's name, or `""` if idle, if all stages take the same time and messages take none."""
    left = orders(schedule, ranks, micro_batches)
    stages = ranks * STAGES_PER_RANK[schedule]
    ends: dict[Action, int] = {}
    grid: list[list[str]] = [[] for _ in range(ranks)]
    while any(left):
        progress = False
        for rank, actions in enumerate(left):
            while actions and all(before in ends for before in _before(actions[0], stages)):
                action, progress = actions.pop(0), True
                start = max([len(grid[rank]), *(ends[before] for before in _before(action, stages))])
                grid[rank] += [""] * (start - len(grid[rank])) + [_name(action, ranks)] * _SLOTS[action.kind]
                ends[action] = len(grid[rank])
        assert progress, f"{schedule} of {micro_batches} micro-batches on {ranks} ranks waits for itself"
    longest = max(map(len, grid))
    return [row + [""] * (longest - len(row)) for row in grid]


def _before(action: Action, stages: int) -> Sequence[Action]:
    """The actions, on this rank or others, that must end before this one begins."""
    kind, stage, number = action.kind, action.stage, action.micro_batch
    if kind == "F":
        return [Action("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [Action("I", stage, number)]
    return [Action(kind, stage + 1, number)] if stage < stages - 1 else [Action("F", stage, number)]


def _name(action: Action, ranks: int) -> str:
    return f"{action.kind}{action.micro_batch}" + "'" * (action.stage // ranks)


def idle_share(grid: Sequence[Sequence[str]]) -> float:
    """The bubble: the fraction of idle slots."""
    return sum(not slot for row in grid for slot in row) / sum(map(len, grid))
