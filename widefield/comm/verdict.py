"""Which ranks do the others wait for?  Pure functions of what every rank reports of itself, see stand.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from widefield.comm.stand import Stand


def missing(found: Mapping[int, Stand], *, ranks: int, frozen: Sequence[int]) -> list[int]:
    """The ranks that the others wait for, by the first of these that tells ranks apart; empty where none does.

    Those that do not report; those whose messages are not as in the step before; those that owe messages and wait for none;
    those that wait for data; those behind in steps or collectives; those that do not wait.
    """
    silent = sorted({*(rank for rank in range(ranks) if rank not in found), *frozen})
    ahead = max(((stand.step, stand.begun) for stand in found.values()), default=(0, 0))
    others = (
        [rank for rank, stand in found.items() if stand.odd],
        _debtors(debts(found)),
        [rank for rank, stand in found.items() if stand.doing == "data"],
        [rank for rank, stand in found.items() if (stand.step, stand.begun) < ahead],
        [rank for rank, stand in found.items() if not stand.waits],
    )
    return silent or next((sorted(some) for some in others if 0 < len(some) < ranks), [])


@dataclass(frozen=True)
class Debt:
    """Messages that a rank waits for and another has not sent: `awaited` of them by now, `sent` of those."""

    waits: int
    owes: int
    awaited: int
    sent: int

    def __str__(self) -> str:
        return f"rank {self.owes} has sent rank {self.waits} {self.sent} of the {self.awaited} messages that it waits for"


def debts(found: Mapping[int, Stand]) -> list[Debt]:
    """Every pair of ranks of which one has posted more receives than the other has posted sends."""
    owed = []
    for rank, stand in found.items():
        for other, awaited in stand.awaited.items():
            peer = found.get(int(other))
            sent = peer.sent.get(str(rank), 0) if peer is not None else awaited
            if sent < awaited:
                owed.append(Debt(rank, int(other), awaited, sent))
    return owed


def _debtors(owed: Sequence[Debt]) -> list[int]:
    """The ranks that owe messages and are owed none; where all are owed some, all of them."""
    waiting, owing = {debt.waits for debt in owed}, {debt.owes for debt in owed}
    return sorted(owing - waiting or owing)


def sentence(
    found: Mapping[int, Stand], *, ranks: int, frozen: Sequence[int], seconds: float, longest: float, ends: bool = False
) -> str:
    """What is said of a step that does not end.  ends: whether the run ends for it."""
    late = missing(found, ranks=ranks, frozen=frozen)
    step = min((stand.step for stand in found.values()), default=0) + 1
    before = f" (the longest before it took {longest:.1f} s)" if longest else ""
    opening = f"step {step} has not ended after {seconds:.0f} s{before}"
    if ends:
        spun = max((stand.spun for stand in found.values()), default=0.0)
        opening = f"nothing has changed on any rank for {seconds:.0f} s, in step {step}"
        if spun:
            opening = f"nothing has brought step {step} on for {spun:.0f} s: no message and no pass, though a rank runs on"
    there = {rank: stand.in_words(rank) for rank, stand in found.items()}
    closing = "" if ends else ". The run goes on once they come; log.stall_seconds sets when to warn"
    if not late:
        owed = "".join(f". {str(debt).capitalize()}" for debt in debts(found))
        return f"{opening}. No rank is behind the others: {'; '.join(there.values())}{owed}{_ended(ends)}"
    words = {rank: there.get(rank, f"rank {rank} has not reported yet") for rank in late}
    words |= {rank: f"rank {rank} does not answer; it was last seen at {found[rank].place}" for rank in frozen if rank in found}
    evidence = [found[rank].odd for rank in late if rank in found and found[rank].odd]
    evidence += [str(debt) for debt in debts(found) if debt.owes in late]
    why = f" ({'; '.join(evidence)})" if evidence else ""
    waiting = next((text for rank, text in there.items() if rank not in late), None)
    others = f". The others wait: {waiting}" if waiting else ""
    return (
        f"{opening}. {len(late)} of {ranks} ranks {'has' if len(late) == 1 else 'have'} not arrived: "
        f"{'; '.join(words.values())}{why}{others}{closing}{_ended(ends)}"
    )


def _ended(ends: bool) -> str:
    return ". So the run ends on all ranks; log.hang_seconds sets after how long" if ends else ""


# ---------------------------------------------------------------------------------------------- stragglers

SLOWER = 1.5
"""How many times the others' time a rank takes, without its waits, to be called slow."""
LEAST_WAIT = 0.1
"""The share of their time that the others must wait in the mean, for the slow rank to matter."""


@dataclass(frozen=True)
class Spent:
    """Where a rank's time went in some steps: seconds per step for data, at work, and waiting for messages."""

    steps: int
    data: float
    work: float
    message: float

    @property
    def busy(self) -> float:
        """Seconds per step in which the rank does not wait for others."""
        return self.data + self.work

    @property
    def share_waited(self) -> float:
        return self.message / max(self.busy + self.message, 1e-9)


def stragglers(spent: Mapping[int, Spent]) -> list[int]:
    """The ranks that take SLOWER times as long as the others do, where these wait for them."""
    found = []
    for rank, one in spent.items():
        others = [other for each, other in spent.items() if each != rank]
        usual = median(other.busy for other in others) if others else one.busy
        waited = sum(other.share_waited for other in others) / max(1, len(others))
        if one.busy > SLOWER * usual and waited > LEAST_WAIT:
            found.append(rank)
    return found if len(found) < len(spent) else []


def stragglers_in_words(spent: Mapping[int, Spent], slow: Sequence[int]) -> str:
    """`rank 1 is slow: a step takes it 0.83 s (0.02 s for data, 0.81 s at work); the others 0.21 s, and they wait 70 % ...`."""
    rest = [one for rank, one in spent.items() if rank not in slow]
    usual = median(one.busy for one in rest)
    names = "; ".join(
        f"rank {rank} is slow: a step takes it {spent[rank].busy:.3g} s ({spent[rank].data:.2g} s for data, "
        f"{spent[rank].work:.2g} s at work)"
        for rank in slow
    )
    waited = sum(one.share_waited for one in rest) / len(rest)
    return (
        f"{names}; the others {usual:.3g} s, and they wait {100 * waited:.0f} % of their time. Seen over "
        f"{min(one.steps for one in spent.values())} steps; look at the machine and the disk of a slow rank, and at its "
        "share of the work"
    )
