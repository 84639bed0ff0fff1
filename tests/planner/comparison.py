"""A step as it was measured beside the same step as it was emulated, rank by rank: bytes held, messages, FLOPs."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from planner.measured_step import MeasuredStep
from planner.truth_cases import Case, TruthCase

from widefield.planner.emulation import emulated_step
from widefield.planner.step_record import StepRecord


@dataclass(frozen=True)
class PeakRow:
    """The largest number of bytes that one rank held within a step, and what the emulation says.  case: or its name."""

    case: TruthCase | str
    rank: int
    measured: int
    emulated: int

    @property
    def error(self) -> float:
        """Relative, positive where the emulation says more than there is."""
        return self.emulated / self.measured - 1

    def __str__(self) -> str:
        return f"{self.case}, rank {self.rank}: {self.emulated:,} of {self.measured:,} bytes, {self.error:+.2%}"


@dataclass(frozen=True)
class Gates:
    """What the errors of many peaks are held to: their median, the worst, and how far below the truth one may lie."""

    median: float = 0.01
    worst: float = 0.05

    def failures(self, rows: Sequence[PeakRow]) -> list[str]:
        """In words, what does not hold; nothing where all does."""
        errors = [abs(row.error) for row in rows]
        found = [f"{row} is off by more than {self.worst:.0%}" for row in rows if abs(row.error) > self.worst]
        found += [f"{row} times 1.05 is under the truth" for row in rows if row.emulated * 1.05 < row.measured]
        if errors and statistics.median(errors) > self.median:
            found.append(f"the median error is {statistics.median(errors):.2%}, more than {self.median:.0%}")
        return found


def emulated(case: Case) -> list[StepRecord] | str:
    """The record of each rank, or the words in which the plan is refused."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks of tests have
    try:
        config = case.config
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # of a real one that torch copies
            return [
                emulated_step(config, ranks=case.ranks, rank=rank, given=case.given, on_cpu=case.on_cpu)
                for rank in range(case.ranks)
            ]
    except (ValueError, NotImplementedError) as error:
        return str(error)
    finally:
        torch.set_num_threads(threads)


def peak_rows(case: TruthCase, steps: Sequence[MeasuredStep], records: Sequence[StepRecord]) -> list[PeakRow]:
    return [
        PeakRow(case, record.rank, max(step.peaks), record.allocator_peak_bytes)
        for step, record in zip(steps, records, strict=True)
    ]


def messages_of(record: StepRecord) -> Counter:
    """The number of the emulated rank's messages by kind, bytes and the size of the group."""
    return Counter((message.kind, message.bytes, len(message.ranks)) for message in record.messages)


def difference_of_messages(step: MeasuredStep, record: StepRecord) -> str:
    """What was sent and not emulated, and the other way round; empty where both are the same."""
    sent, told = Counter(step.messages), messages_of(record)
    parts = [("sent", sent - told), ("emulated", told - sent)]
    return "; ".join(f"only {what}: {_listed(rest)}" for what, rest in parts if rest)


def _listed(messages: Counter) -> str:
    return ", ".join(f"{count} x {kind} of {size} bytes among {ranks}" for (kind, size, ranks), count in messages.items())


def summary(rows: Iterable[PeakRow]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    if not errors:
        return "no rows"
    exact = sum(error == 0 for error in errors)
    return (
        f"{len(errors)} peaks: median error {statistics.median(errors):.2%}, worst {errors[-1]:.2%}, {exact} exact to the byte"
    )
