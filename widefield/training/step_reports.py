"""What all ranks have to know of each step, where replicas take steps of their own: told after some steps, not in each.

Between two exchanges a step sends nothing but what its replica's own ranks send each other, and what an average of weights
takes.  So a replica that is slow for a moment holds up nobody, and a slow link carries weights alone.

A replica whose data cannot be read, or whose loss or gradient is not finite, takes no further step and keeps the weights and
statistics that it had before; averages go on with these.  At the next exchange all ranks hear of it, and the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from widefield.comm.mesh import AgreedError, Mesh
from widefield.config import GuardConfig
from widefield.data.batch import Batch
from widefield.training.guard import Refusal, RefusedStepError, refused

MOST_STEPS, MOST_SECONDS = 32, 5.0
"""Between two exchanges: what a log says may be so late, and a signal to stop waits so long, or for the step that runs."""


@dataclass(frozen=True)
class StepLine:
    """A step's line in the record, see Record.step.  loss and losses: of this replica, and after the exchange of all."""

    step: int
    epoch: float
    loss: float
    lr: float
    samples: int
    seconds: float
    data_seconds: float
    memory_bytes: int
    losses: dict[str, float]


@dataclass(frozen=True)
class Held:
    """Why a replica takes no step from this one on, counted from 1, and what it had read for it."""

    step: int
    error: AgreedError
    passes: Sequence[Batch]


class StepReports:
    """The steps since the last exchange.  Every rank makes one and calls each method, in the same order.

    mesh: of all ranks.  replica: of this rank's replica.  number: of this replica.
    sums: of each turn of the current step the loss and its count, of this replica.
    """

    def __init__(self, mesh: Mesh, replica: Mesh, number: int) -> None:
        self.mesh, self.replica, self.number = mesh, replica, number
        self.sums: list[tuple[float, float]] = []
        self.held: Held | None = None
        self._lines: list[tuple[StepLine, Sequence[str], list[tuple[float, float]]]] = []
        self._between = 1

    @contextmanager
    def catching(
        self,
        step: int,
        passes: Sequence[Batch],
        buffers: Iterable[tuple[str, Tensor]],
        undo: Callable[[dict[str, Tensor]], None],
    ) -> Iterator[None]:
        """Inside, an error that the ranks of a replica raise together holds it back, and is raised by all later.

        step: counted from 1.  undo: gives the model's buffers back what they had.
        """
        self.sums, before = [], {name: buffer.clone() for name, buffer in buffers}
        try:
            yield
        except AgreedError as error:
            undo(before)
            self.held = Held(step, error, passes)

    def add(self, line: StepLine, turns: Sequence[str]) -> None:
        """A step was done, with so many turns; see turns.py."""
        self._lines.append((line, turns, [*self.sums, *[(0.0, 0.0)] * (len(turns) - len(self.sums))]))

    @property
    def are_due(self) -> bool:
        """Whether it is time to exchange, the same on every rank."""
        return len(self._lines) >= self._between

    def exchange(self, *, stop: bool) -> tuple[list[StepLine], float, bool]:
        """(the lines since the last exchange with the losses of all; seconds of a step; whether any rank has `stop`).

        On every rank, AgreedError: a replica was held back, RefusedStepError: by the guard; or no image of a step counted.
        """
        own = [number for _, _, sums in self._lines for pair in sums for number in pair]
        if self.replica.rank:
            own = [0.0] * len(own)
        seconds = sum(line.seconds for line, _, _ in self._lines) / max(1, len(self._lines))
        message = torch.tensor([*own, seconds, stop, self.held is not None], dtype=torch.float64, device=self.mesh.device)
        *totals, seconds, stops, held = self.mesh.start_sum(message)()
        if held:
            self._raise()
        lines, seconds = list(self._agreed(totals)), seconds / self.mesh.size
        self._between = max(1, min(MOST_STEPS, int(MOST_SECONDS / max(seconds, 1e-9))))
        self._lines.clear()
        return lines, seconds, stops > 0

    def _agreed(self, totals: list[float]) -> Iterator[StepLine]:
        pairs = iter(zip(totals[::2], totals[1::2], strict=True))
        for line, turns, _ in self._lines:
            means = {}
            for member, (loss, count) in zip(turns, pairs, strict=False):
                if not count:
                    raise AgreedError(nothing_counted(line.step))
                means[member] = loss / count
            named = {member: mean for member, mean in means.items() if member}
            yield replace(line, loss=sum(means.values()), losses=named)

    def _raise(self) -> None:
        """What the first replica that was held back met."""
        own = self.held
        refusal = own.error.refusal if own is not None and isinstance(own.error, RefusedStepError) else None
        told = None if own is None else (own.step, self.number, str(own.error), refusal)
        found: list[tuple[int, int, str, Refusal | None]] = [one for one in self.mesh.gather_objects(told) if one is not None]
        step, number, text, refusal = min(found, key=lambda one: one[:2])
        if own is not None and (own.step, self.number) != (step, number):
            self.held = None  # its batch is not the one that is kept
        about = f"; replica {number} of {self.mesh.plan.replicate} met it, and the others did not wait for it"
        if refusal is not None:
            error = refused(refusal)
            raise type(error)(f"{error}{about}", refusal=refusal)
        raise AgreedError(f"{text}{about}")

    def kept(self) -> list[Batch]:
        """What this rank had read for the step that ended the run; nothing on ranks of other replicas."""
        return [] if self.held is None else list(self.held.passes)


def tells_later(guard: GuardConfig) -> bool:
    """Whether the guard's answers can wait for an exchange: those that end the run."""
    return guard.non_finite == "stop" and guard.spike == "off"


def nothing_counted(step: int) -> str:
    """Why a step, counted from 1, has no loss."""
    return (
        f"no image of step {step} could be read, or none has a pixel that counts, so there is nothing to learn from; see "
        "data.path"
    )
