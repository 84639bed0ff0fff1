"""When does which pair average?  AD-PSGD: an active worker with a gradient asks a passive one, which answers one at a time.

While two exchange weights nobody changes them: the active one waits, and a step of the passive one comes after the exchange.
So no update is lost.  Only active workers wait, and only for passive ones, so nobody waits in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from widefield.agreement.all_reduce import all_reduce_bytes
from widefield.agreement.events import Event
from widefield.agreement.gossip import PairwiseGossip
from widefield.agreement.run_times import QueuedTimes


@dataclass
class PairTimes(QueuedTimes):
    """partners: whom each active worker may ask.  asking: by passive worker, who waits for it.  exchanging: by passive worker,
    with whom.
    """

    algorithm: PairwiseGossip = field(default_factory=PairwiseGossip)
    partners: dict[int, tuple[int, ...]] = field(default_factory=dict)
    asking: dict[int, list[int]] = field(default_factory=dict)
    exchanging: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.partners = self.algorithm.partners(self.count)
        self.asking = {worker: [] for worker in range(self.count) if worker not in self.partners}

    def run(self) -> tuple[float, list[Event]]:
        """As of all that are queued; then the living take the mean of their weights."""
        seconds, _ = super().run()
        living = sorted(self.living)
        seconds += self.all_reduce_seconds(living)
        self.write(seconds, "average", *living, bytes=all_reduce_bytes(len(living), self.size))
        return seconds, self.events

    def begin(self, worker: int) -> None:
        if self.take_up(worker):
            self.write(self.queue.now, "read", worker)

    def computed(self, worker: int, batch: tuple[int, ...], seconds: float) -> None:
        self.ready[worker] = self.new_gradient()
        numbers = (self.ready[worker],)
        self.write(self.queue.now, "gradient", worker, samples=batch, numbers=numbers, seconds=seconds)
        if worker in self.partners and len(self.living) > 1:
            self._ask(worker)
        elif worker not in self.exchanging:
            self._step(worker)

    def _step(self, worker: int) -> None:
        self.write(self.queue.now, "step", worker, numbers=(self.ready.pop(worker),))
        self.account.learned(worker, by_all=False)
        self.begin(worker)

    def _ask(self, active: int) -> None:
        """Ask a living partner, drawn at random.  AllDiedError: there is none, and others live."""
        partners = [one for one in self.partners[active] if one in self.living]
        if not partners:
            self.give_up(self.queue.now, f"worker {active} has no living partner to average with")
        passive = self.durations.generator(f"partner of {active}").choice(partners)
        self.asking[passive].append(active)
        self._exchange_next(passive)

    def _exchange_next(self, passive: int) -> None:
        """Let a passive worker answer whoever has waited longest, if it is free."""
        if passive in self.exchanging or not self.asking[passive]:
            return
        active = self.exchanging[passive] = self.asking[passive].pop(0)
        self.write(self.queue.now, "offer", active, passive, bytes=2 * self.size)
        latency = max(self.durations.latency(active), self.durations.latency(passive))
        seconds = self.durations.transfer(self.size) + latency
        life = self.lives[active]

        def end(passive: int) -> None:
            if self.lives[active] == life:
                self._averaged(active, passive)

        self.after(seconds, passive, end)

    def _averaged(self, active: int, passive: int) -> None:
        self.write(self.queue.now, "pair", active, passive)
        of_active, of_passive = self.account.carried_now(active), self.account.carried_now(passive)
        self.account.heard(active, of_passive)
        self.account.heard(passive, of_active)
        self.account.forget_common(list(self.living))
        self._release(passive)
        self._step(active)

    def _release(self, passive: int) -> None:
        """A passive worker is free: it takes the step that had to wait, then answers the next."""
        del self.exchanging[passive]
        if passive in self.ready:
            self._step(passive)
        self._exchange_next(passive)

    def left(self, worker: int) -> tuple[int, ...]:
        samples = self.lost_with(worker)
        if worker in self.partners:
            self._forget_active(worker)
        else:
            self._forget_passive(worker)
        return samples

    def _forget_active(self, worker: int) -> None:
        for passive, waiting in self.asking.items():
            self.asking[passive] = [one for one in waiting if one != worker]
        for passive in [one for one, active in self.exchanging.items() if active == worker]:
            self._release(passive)
        if len(self.living) > 1 and not any(one in self.partners for one in self.living):
            self.give_up(self.queue.now, f"only passive workers {list(self.living)} live, which ask nobody")

    def _forget_passive(self, worker: int) -> None:
        waiting = self.asking[worker] + ([self.exchanging.pop(worker)] if worker in self.exchanging else [])
        self.asking[worker] = []
        for active in waiting:
            if len(self.living) > 1:
                self._ask(active)
            else:
                self._step(active)

    def came_back(self, worker: int) -> None:
        seconds = self.durations.transfer(self.size) + self.durations.latency(worker)
        del self.living[worker]
        self.after(seconds, worker, self._take_state)

    def _take_state(self, worker: int) -> None:
        """Take the state of a living peer, drawn at random.  AllDiedError: there is none."""
        if not self.living:
            self.give_up(self.queue.now, f"worker {worker} comes back and no peer lives whose state it could take")
        peer = self.durations.generator("peer").choice(list(self.living))
        self.living[worker] = None
        self.write(self.queue.now, "join", worker, peer, bytes=self.size)
        self.account.heard(worker, self.account.carried_now(peer))
        self.begin(worker)
