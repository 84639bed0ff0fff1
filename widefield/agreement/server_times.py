"""When do workers read from servers and push to them?  Asynchronous with or without a bound, and synchronous.

A worker's ports and a server's send one message at a time and receive one at a time.  A message that was sent arrives, also
when its sender dies in the meantime; what a worker had not sent is lost, and its batch is given out again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from widefield.agreement.run_times import QueuedTimes
from widefield.agreement.server import ParameterServer, StalenessClocks, StalenessLimit


@dataclass
class ServerTimes(QueuedTimes):
    """What both kinds of server have in common.  sizes: bytes of each part, 0 in shared memory.  push_sizes: of its gradients.

    received: by worker, which parts it has read for its next gradient.  flying: parts of gradients on their way.
    """

    algorithm: ParameterServer = field(default_factory=ParameterServer)
    sizes: tuple[int, ...] = (0,)
    push_sizes: tuple[int, ...] = (0,)
    received: dict[int, set[int]] = field(default_factory=dict)
    busy_until: dict[tuple[str, str, int], float] = field(default_factory=dict)
    flying: int = 0

    def is_done(self) -> bool:
        return self.account.is_complete and not self.flying

    def begin(self, worker: int) -> None:
        self.received[worker] = set()
        for part in range(len(self.sizes)):
            self.ask(worker, part)

    def ask(self, worker: int, part: int) -> None:
        raise NotImplementedError

    def arrived(self, worker: int, part: int, number: int, life: int) -> None:
        raise NotImplementedError

    def came_back(self, worker: int) -> None:
        self.write(self.queue.now, "join", worker)
        self.begin(worker)

    def answer(self, worker: int, part: int) -> None:
        """The server sends a part of its weights as they are now."""
        self.write(self.queue.now, "read", worker, part=part, bytes=self.sizes[part])
        seconds = self._message(("server", part), ("worker", worker), self.sizes[part], worker)
        self.after(seconds, worker, self._has_read, part)

    def _has_read(self, worker: int, part: int) -> None:
        self.received[worker].add(part)
        if len(self.received[worker]) == len(self.sizes):
            self.take_up(worker)

    def computed(self, worker: int, batch: tuple[int, ...], seconds: float) -> None:
        number, now = self.new_gradient(), self.queue.now
        self.write(now, "gradient", worker, samples=batch, numbers=(number,), seconds=seconds, bytes=sum(self.push_sizes))
        self.account.learned(worker, by_all=True)
        self.received[worker] = set()
        for part, size in enumerate(self.push_sizes):
            self.flying += 1
            self._deliver(worker, part, number, self._message(("worker", worker), ("server", part), size, worker))

    def _deliver(self, worker: int, part: int, number: int, seconds: float) -> None:
        life = self.lives[worker]

        def arrive() -> None:
            self.flying -= 1
            self.arrived(worker, part, number, life)

        self.queue.at(self.queue.now + seconds, arrive)

    def _message(self, sender: tuple[str, int], hearer: tuple[str, int], size: int, worker: int) -> float:
        """Seconds until a message that is sent now has arrived; both ports are busy with it."""
        out, into = ("out", *sender), ("into", *hearer)
        begins = max(self.queue.now, self.busy_until.get(out, 0.0), self.busy_until.get(into, 0.0))
        ends = begins + self.durations.transfer(size)
        self.busy_until[out] = self.busy_until[into] = ends
        return ends - self.queue.now + self.durations.latency(worker)


@dataclass
class AsynchronousTimes(ServerTimes):
    """Each part updates with each gradient as it comes, and answers at once, or when the bound allows.

    By part: waiting: who has asked and may not read yet, in the order in which they came.  held: (worker, life, number of the
    gradient), which may not be applied yet.
    """

    clocks: list[StalenessClocks] = field(default_factory=list)
    limits: list[StalenessLimit] = field(default_factory=list)
    waiting: list[list[int]] = field(default_factory=list)
    held: list[list[tuple[int, int, int]]] = field(default_factory=list)
    on_way: set[tuple[int, int, int]] = field(default_factory=set)
    """(worker, life, part) of gradients that were sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clocks = [StalenessClocks(self.algorithm.bound) for _ in self.sizes]
        self.limits = [StalenessLimit(self.algorithm.max_staleness) for _ in self.sizes]
        self.waiting, self.held = [[] for _ in self.sizes], [[] for _ in self.sizes]
        for worker in self.living:
            self._enter(worker)

    def is_done(self) -> bool:
        return super().is_done() and not any(self.held)

    def _enter(self, worker: int) -> None:
        for clocks in self.clocks:
            clocks.enter(worker)

    def begin(self, worker: int) -> None:
        if worker not in self.clocks[0].clocks:
            self._enter(worker)
        super().begin(worker)

    def ask(self, worker: int, part: int) -> None:
        self.waiting[part].append(worker)
        self._answer_those_who_may(part)

    def _answer_those_who_may(self, part: int) -> None:
        for worker in list(self.waiting[part]):
            if self.clocks[part].may_read(worker) and self.limits[part].may_read():
                self.waiting[part].remove(worker)
                self.limits[part].read((worker, self.lives[worker]))
                self.answer(worker, part)

    def computed(self, worker: int, batch: tuple[int, ...], seconds: float) -> None:
        self.on_way.update((worker, self.lives[worker], part) for part in range(len(self.sizes)))
        super().computed(worker, batch, seconds)

    def arrived(self, worker: int, part: int, number: int, life: int) -> None:
        self.held[part].append((worker, life, number))
        self._apply_those_that_may(part)

    def _apply_those_that_may(self, part: int) -> None:
        """Apply gradients, the first that came first, until none may be; then answer."""
        limit = self.limits[part]
        while (first := next((one for one in self.held[part] if limit.may_push(one[:2])), None)) is not None:
            worker, life, number = first
            self.held[part].remove(first)
            self.on_way.discard((worker, life, part))
            self.write(self.queue.now, "push", worker, part=part, numbers=(number,))
            limit.push((worker, life))
            if self.lives[worker] == life:
                self.clocks[part].advance(worker)
                self.ask(worker, part)
        self._answer_those_who_may(part)

    def found_nothing(self, worker: int) -> None:
        self._leave(worker, self.lives[worker])

    def _leave(self, worker: int, life: int) -> None:
        """Nobody waits for a worker any longer, but for a gradient that it has sent."""
        for part, clocks in enumerate(self.clocks):
            clocks.leave(worker)
            self.waiting[part] = [one for one in self.waiting[part] if one != worker]
            if (worker, life, part) not in self.on_way:
                self.limits[part].forget((worker, life))
        for part in range(len(self.sizes)):
            self._apply_those_that_may(part)

    def left(self, worker: int) -> tuple[int, ...]:
        self._leave(worker, self.lives[worker] - 1)
        return self.account.lose(worker)


@dataclass
class SynchronousTimes(ServerTimes):
    """A step with the gradients of all who have a batch, or of the first `needed`; those of older weights are dropped.

    incomplete: gradients that are not all there: (batch, version, parts that came).  here: (worker, life) of those for the next
    step.
    versions: by worker, of the weights that it has read.
    """

    version: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    incomplete: dict[int, tuple[tuple[int, ...], int, set[int]]] = field(default_factory=dict)
    here: dict[int, tuple[int, int]] = field(default_factory=dict)

    def is_done(self) -> bool:
        return super().is_done() and not self.here

    def begin(self, worker: int) -> None:
        self.versions[worker] = self.version
        super().begin(worker)

    def ask(self, worker: int, part: int) -> None:
        self.answer(worker, part)

    def computed(self, worker: int, batch: tuple[int, ...], seconds: float) -> None:
        self.incomplete[self.gradients] = (batch, self.versions[worker], set())
        super().computed(worker, batch, seconds)

    def arrived(self, worker: int, part: int, number: int, life: int) -> None:
        batch, version, came = self.incomplete[number]
        came.add(part)
        if len(came) < len(self.sizes):
            return
        del self.incomplete[number]
        if version == self.version:
            self.here[number] = (worker, life)
            self._step_if_enough()
        else:
            self.write(self.queue.now, "drop", worker, samples=batch, numbers=(number,))
            self.account.hand_back(batch)
            if self.lives[worker] == life:
                self.begin(worker)
            self.wake()

    def _step_if_enough(self) -> None:
        """Step once enough gradients are here, or nobody is left who could bring one."""
        have = {worker for worker, life in self.here.values() if self.lives[worker] == life}
        others = [worker for worker in self.living if worker not in have and worker not in self.parked]
        if not self.here or (others and len(self.here) < self.algorithm.needed(self.count)):
            return
        numbers = sorted(self.here, key=lambda number: (self.here[number][0], number))
        self.write(self.queue.now, "reduce", *(self.here[number][0] for number in numbers), numbers=tuple(numbers))
        self.version += 1
        self.here.clear()
        for worker in sorted(have):
            self.begin(worker)

    def found_nothing(self, worker: int) -> None:
        self._step_if_enough()

    def left(self, worker: int) -> tuple[int, ...]:
        samples = self.account.lose(worker)
        self._step_if_enough()
        return samples
