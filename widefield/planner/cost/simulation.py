"""The events of ranks on a clock: what runs beside what, and who waits for whom.

A rank has a host, which starts operations in their order, and a device.  On a GPU the host runs ahead: an operation starts when
it is launched and its predecessor is done, t = max(launch, kernel), and messages run beside it.  On a CPU the host computes
itself. A message starts when all of its ranks have reached it and the previous large one among these ranks is done; a WaitEvent
holds its rank until it has arrived.  Messages of a CPU use the cores that compute: what overlaps slows the rank by a share of
its seconds.  Ranks of a CPU are never equally fast: the last one is the later at a meeting the longer they have computed since
the one before, and the more of them there are (see `unevenness` and `waking_seconds` in calibration.py).

Ranks without a record of their own count as punctual: they reach a message when those with a record do.  So one record stands
for all replicas, and one for each stage makes a pipeline, whose bubble comes out of the waiting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Literal

from widefield.planner.step_record import MessageEvent, OpEvent, StepRecord, WaitEvent

Kind = Literal["compute", "message", "wait", "data"]
SMALL_BYTES = 64 * 2**10
"""Messages up to it do not wait for larger ones among the same ranks: those of statistics have a process group of their own."""
ASLEEP_SECONDS = 2.5e-4
"""Of computing, after which the threads that send and receive sleep; before, they are partly still there (docs/log.md)."""


@dataclass(frozen=True)
class Span:
    """A rank is busy, or waits, from `start` for `seconds`.

    kind: compute; message: under way, beside the computation; wait: the rank stands still.  name: operation or kind of message.
    """

    rank: int
    kind: Kind
    name: str
    phase: str
    module: str
    start: float
    seconds: float


@dataclass
class Meeting:
    """One message among the ranks that have a record."""

    expected: int
    arrived: dict[int, float] = field(default_factory=dict)
    start: float = 0.0
    end: float | None = None


@dataclass
class RankClock:
    """Where one rank is.

    host: when it is free to start the next operation.  device: when what was started is done.  next: the next event's index.
    pending: the meetings of messages that it waits for later, by number.
    busy: seconds of computation by phase.  met: their sum when the rank last waited for another one.
    exposed, bubble: seconds of waiting for bytes, and for ranks that are late.
    """

    record: StepRecord
    host: float = 0.0
    device: float = 0.0
    next: int = 0
    pending: dict[int, tuple[Meeting, MessageEvent]] = field(default_factory=dict)
    counts: dict[tuple, int] = field(default_factory=lambda: defaultdict(int))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)
    met: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0

    @property
    def now(self) -> float:
        return max(self.host, self.device)

    @property
    def computed(self) -> float:
        return sum(self.busy.values())


class Simulation:
    """Runs records to their ends.

    op_seconds, message_seconds: of an event; of a message on a rank.  launch_seconds: of the host, for each operation.
    message_host_seconds: of a CPU's host, for each message, to make and unpack it.
    unevenness, waking_seconds, message_cpu_share: of a CPU's ranks, as Calibration has them.
    on_cpu: the host computes.  spans: whether each rank's timeline is kept.
    """

    def __init__(
        self,
        records: Sequence[StepRecord],
        op_seconds: Callable[[OpEvent], float],
        message_seconds: Callable[[MessageEvent, int], float],
        *,
        launch_seconds: float,
        message_host_seconds: float = 0.0,
        unevenness: float = 0.0,
        waking_seconds: float = 0.0,
        message_cpu_share: float,
        on_cpu: bool,
        spans: bool = True,
    ) -> None:
        self.clocks = {record.rank: RankClock(record) for record in records}
        self.op_seconds, self.message_seconds = op_seconds, message_seconds
        self.launch_seconds, self.message_host_seconds = launch_seconds, message_host_seconds
        self.unevenness, self.waking_seconds, self.message_cpu_share = unevenness, waking_seconds, message_cpu_share
        self.on_cpu, self.keeps_spans = on_cpu, spans
        self.meetings: dict[tuple, Meeting] = {}
        self.queue_free: dict[tuple, float] = defaultdict(float)
        self.members: dict[tuple[int, ...], int] = {}

    def run(self) -> None:
        """AssertionError: the records' messages do not belong together."""
        moving = True
        while moving:
            moving = False
            for clock in self.clocks.values():
                moving = self._advance(clock) or moving
        stuck = {rank: clock for rank, clock in self.clocks.items() if clock.next < len(clock.record.events)}
        if stuck:
            where = "; ".join(
                f"rank {rank} at event {clock.next} ({clock.record.events[clock.next]})" for rank, clock in stuck.items()
            )
            raise AssertionError(f"the records of ranks {list(self.clocks)} wait for each other: {where}")

    def _advance(self, clock: RankClock) -> bool:
        """Go on to the first wait for what has not begun; whether there was anything to do."""
        first, events = clock.next, clock.record.events
        while clock.next < len(events):
            event = events[clock.next]
            if isinstance(event, WaitEvent):
                if not self._wait(clock, event):
                    break
            elif isinstance(event, MessageEvent):
                self._send(clock, event)
            else:
                self._compute(clock, event)
            clock.next += 1
        return clock.next > first

    def _compute(self, clock: RankClock, event: OpEvent) -> None:
        if not event.runs_kernel:
            return
        seconds = self.op_seconds(event)
        if self.on_cpu:
            start = clock.host
            clock.host += self.launch_seconds + seconds
            clock.device, seconds = clock.host, clock.host - start
        else:
            start = max(clock.host, clock.device)
            clock.host += self.launch_seconds
            # The device stands still until the launch: what it lacks counts to the operation.
            before, clock.device = clock.device, max(clock.device, clock.host) + seconds
            start, seconds = before, clock.device - before
        clock.busy[event.phase] += seconds
        self._span(clock, "compute", event.name, event.phase, event.module, start, seconds)

    def _send(self, clock: RankClock, event: MessageEvent) -> None:
        if self.on_cpu and not event.control:
            self._span(clock, "compute", event.kind, event.phase, event.module, clock.host, self.message_host_seconds)
            clock.host += self.message_host_seconds
            clock.device = clock.host
            clock.busy[event.phase] += self.message_host_seconds
        key, expected = self._key(clock, event)
        meeting = self.meetings.setdefault(key, Meeting(expected))
        meeting.arrived[clock.record.rank] = clock.now
        clock.pending[event.number] = meeting, event
        clock.host += 0.0 if self.on_cpu else self.launch_seconds
        if len(meeting.arrived) == meeting.expected:
            queue = key[0]
            queued = self.queue_free[queue] if event.bytes > SMALL_BYTES else 0.0
            meeting.start = max(*meeting.arrived.values(), queued) + self._late(meeting, event)
            meeting.end = meeting.start + self.message_seconds(event, clock.record.rank)
            self.queue_free[queue] = max(self.queue_free[queue], meeting.end)
            for rank in meeting.arrived:
                other = self.clocks[rank]
                seconds = meeting.end - meeting.start
                self._span(other, "message", event.kind, event.phase, event.module, meeting.start, seconds)

    def _late(self, meeting: Meeting, event: MessageEvent) -> float:
        """How much later than planned the last rank of a meeting comes."""
        if not (self.unevenness or self.waking_seconds):
            return 0.0
        apart = max(clock.computed - clock.met for clock in (self.clocks[rank] for rank in meeting.arrived))
        ranks = len(event.ranks) if event.peer is None else 2
        woken = self.waking_seconds * min(1.0, apart / ASLEEP_SECONDS)
        return woken + self.unevenness * _latest_of(ranks) / _latest_of(2) * math.sqrt(apart)

    def _key(self, clock: RankClock, event: MessageEvent) -> tuple[tuple, int]:
        """(((queue), how many before it), ranks with a record that take part)."""
        rank = clock.record.rank
        if event.peer is None:
            queue: tuple = ("all", event.ranks)
            if event.ranks not in self.members:
                self.members[event.ranks] = sum(one in self.clocks for one in event.ranks)
            expected = self.members[event.ranks]
        else:
            ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
            queue, expected = ("pair", *ends), 2 if event.peer in self.clocks else 1
        clock.counts[queue] += 1
        return (queue, clock.counts[queue]), expected

    def _wait(self, clock: RankClock, event: WaitEvent) -> bool:
        """Whether the message has begun; the rank's clock then stands at its end."""
        found = clock.pending.get(event.number)
        if found is None:  # waited for before, or nothing was sent
            return True
        meeting, message = found
        if meeting.end is None:
            return False
        del clock.pending[event.number]
        now = clock.now
        late = max(0.0, min(meeting.start, meeting.end) - now)
        under_way = max(0.0, meeting.end - max(now, meeting.start))
        overlapped = max(0.0, min(now, meeting.end) - meeting.start)
        slowed = self.message_cpu_share * overlapped if self.on_cpu else 0.0
        clock.bubble += late
        clock.exposed += under_way + slowed
        self._span(clock, "wait", message.kind, message.phase, message.module, now, late + under_way + slowed)
        after = now + late + under_way + slowed
        if late + under_way:
            clock.met = clock.computed
        clock.device = after
        if self.on_cpu or message.control:
            clock.host = after
        return True

    def _span(self, clock: RankClock, kind: Kind, name: str, phase: str, module: str, start: float, seconds: float) -> None:
        if not self.keeps_spans or seconds <= 0:
            return
        last = clock.spans[-1] if clock.spans else None
        if last and (last.kind, last.phase, last.module) == (kind, phase, module) and kind == "compute":
            if abs(last.start + last.seconds - start) < 1e-12:
                clock.spans[-1] = Span(last.rank, kind, last.name, phase, module, last.start, last.seconds + seconds)
                return
        clock.spans.append(Span(clock.record.rank, kind, name, phase, module, start, seconds))


@cache
def _latest_of(ranks: int) -> float:
    """The largest of so many normal numbers in the mean, by Blom's formula (1958); 0 of one."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
