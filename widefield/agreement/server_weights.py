"""The numbers of a run with servers: the parts of the weights, and what each worker has read, as a function of the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from widefield.agreement.all_reduce import weighted_mean
from widefield.agreement.compression import ErrorFeedback
from widefield.agreement.events import Event
from widefield.agreement.objectives import Objective
from widefield.agreement.server import ParameterServer, even_parts, joined


@dataclass
class PushedGradient:
    """A gradient on its way.  then, versions: the weights that it is of, by part, and their versions.  parts: yet to come."""

    gradient: Tensor
    count: int
    rate: float
    then: list[Tensor]
    versions: list[int]
    parts: set[int] = field(default_factory=set)


class ServerWeights:
    """The servers' parts; `apply` one event after another.

    A learning rate that depends on samples is of those that all gradients computed so far had, less those dropped.
    """

    def __init__(self, algorithm: ParameterServer, objective: Objective, workers: int) -> None:
        self.algorithm, self.objective = algorithm, objective
        self.slices = even_parts(objective.start.numel(), algorithm.servers)
        self.parts = algorithm.parts_of(objective.start)
        self.read: dict[int, dict[int, deque[tuple[Tensor, int]]]] = {one: {} for one in range(workers)}
        """By worker and part, its last two readings."""
        self.pushed: dict[int, PushedGradient] = {}
        self.feedback: dict[int, list[ErrorFeedback]] = {}
        """By worker and part, what compression left of its gradients; a worker that begins anew has nothing."""
        self.learned = 0
        self.does: dict[str, Callable[[Event], None]] = {
            "read": self._read, "gradient": self._gradient, "push": self._push, "reduce": self._reduce, "drop": self._drop,
            "die": self._die, "join": self._join,
        }  # fmt: skip

    def apply(self, event: Event) -> None:
        """Let one event happen.  ValueError: a kind that only peers know."""
        if event.kind not in self.does:
            raise ValueError(
                f"an event of the kind {event.kind} in the log of a parameter server; replay it with its own algorithm"
            )
        self.does[event.kind](event)

    def consensus(self) -> Tensor:
        """(P,) the servers' weights."""
        return joined(part.weights for part in self.parts)

    def distance(self) -> float:
        """0: there is one copy of the weights."""
        return 0.0

    def _read(self, event: Event) -> None:
        part = self.parts[event.part]
        self.read[event.workers[0]].setdefault(event.part, deque(maxlen=2)).append((part.weights, part.version))

    def _gradient(self, event: Event) -> None:
        read = self.read[event.workers[0]]
        then, versions = zip(*(read[part][-1 - event.part] for part in range(len(self.parts))), strict=True)
        gradient, count = self.objective.gradient_of(joined(then), event.samples), len(event.samples)
        gradient = self._as_sent(event.workers[0], gradient)
        rate = self.algorithm.descent.rate(seen=self.learned, count=count)
        parts = set(range(len(self.parts)))
        self.pushed[event.numbers[0]] = PushedGradient(gradient, count, rate, list(then), list(versions), parts)
        self.learned += count

    def _as_sent(self, worker: int, gradient: Tensor) -> Tensor:
        options = self.algorithm.compression
        if options is None:
            return gradient
        feedback = self.feedback.setdefault(worker, [ErrorFeedback(options) for _ in self.slices])
        return joined(one.pack(gradient[part])[1] for one, part in zip(feedback, self.slices, strict=True))

    def _push(self, event: Event) -> None:
        number, part = event.numbers[0], event.part
        pushed = self.pushed[number]
        gradient = pushed.gradient[self.slices[part]]
        self.parts[part].push(gradient, pushed.rate, then=pushed.then[part], version=pushed.versions[part])
        pushed.parts.discard(part)
        if not pushed.parts:
            del self.pushed[number]

    def _reduce(self, event: Event) -> None:
        pushed = [self.pushed.pop(number) for number in event.numbers]
        counts = [one.count for one in pushed]
        mean, seen = weighted_mean([one.gradient for one in pushed], counts), self.learned - sum(counts)
        rate = self.algorithm.descent.rate(seen=max(0, seen), count=sum(counts))
        for index, (part, place) in enumerate(zip(self.parts, self.slices, strict=True)):
            part.push(mean[place], rate, then=pushed[0].then[index], version=pushed[0].versions[index])

    def _drop(self, event: Event) -> None:
        self.learned -= self.pushed.pop(event.numbers[0]).count

    def _die(self, event: Event) -> None:
        self.read[event.workers[0]] = {}
        self.feedback.pop(event.workers[0], None)

    def _join(self, event: Event) -> None:
        """A worker that comes back, or begins anew, reads from the servers, which the next events say."""
        self.feedback.pop(event.workers[0], None)
