"""Workers of a simulation: how long they compute, how they are connected, who is slow, who dies and comes back.

Times are virtual seconds.  Every random number is drawn from a generator of its own per purpose and worker, seeded by text, so
a run depends on its seed alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Delay:
    """A time, or a distribution of times.

    kind: constant; uniform, within `spread` of the mean to both sides; exponential; lognormal, whose logarithm has the standard
    deviation `spread`.  mean: seconds.
    """

    mean: float = 0.0
    kind: Literal["constant", "uniform", "exponential", "lognormal"] = "constant"
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "uniform", "exponential", "lognormal"):
            raise ValueError(f"times are distributed as {self.kind!r}; take constant, uniform, exponential or lognormal")
        if not (math.isfinite(self.mean) and self.mean >= 0 and self.spread >= 0):
            raise ValueError(f"times of {self.mean} s with a spread of {self.spread}; both have to be finite and 0 or more")
        if self.kind == "uniform" and self.spread > self.mean:
            raise ValueError(
                f"uniform times of {self.mean} s give or take {self.spread} s would be below 0; take a smaller spread"
            )

    def draw(self, generator: random.Random) -> float:
        """One time, in seconds, of 0 or more."""
        if self.kind == "uniform":
            return generator.uniform(self.mean - self.spread, self.mean + self.spread)
        if self.kind == "exponential":
            return self.mean * generator.expovariate(1.0)
        if self.kind == "lognormal":
            return self.mean * math.exp(generator.gauss(0.0, self.spread) - self.spread**2 / 2)
        return self.mean


@dataclass(frozen=True)
class Connection:
    """What a message takes: latency, and its bytes over the bandwidth of both ends, which send and receive one at a time."""

    latency: Delay = field(default_factory=Delay)
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ValueError(f"a connection of {self.bytes_per_second} bytes per second; take a number above 0")


@dataclass(frozen=True)
class Death:
    """A worker dies at a time and, where `back` is given, comes back at that one with the state of a living peer."""

    worker: int
    at: float
    back: float | None = None


@dataclass(frozen=True)
class Workers:
    """The workers of a run.

    compute: seconds of one batch; a shorter batch takes less in proportion.  slow: by worker, how many times longer it takes.
    """

    count: int
    compute: Delay = field(default_factory=lambda: Delay(1.0))
    slow: Mapping[int, float] = field(default_factory=dict)
    connection: Connection = field(default_factory=Connection)
    deaths: tuple[Death, ...] = ()

    def __post_init__(self) -> None:
        """ValueError: no workers, or something that is said of one that is not there; deaths that make no sense."""
        if self.count < 1:
            raise ValueError(f"a run of {self.count} workers; take 1 or more")
        for worker in (*self.slow, *(death.worker for death in self.deaths)):
            if not 0 <= worker < self.count:
                raise ValueError(f"worker {worker} is slow or dies, and the workers are 0 to {self.count - 1}")
        for worker, times in self.slow.items():
            if not (math.isfinite(times) and times > 0):
                raise ValueError(f"worker {worker} is {times} times slower; take a finite number above 0")
        for worker in range(self.count):
            self._refuse_disorder(worker)

    def _refuse_disorder(self, worker: int) -> None:
        alive_from = 0.0
        for death in self.deaths_of(worker):
            if death.at < alive_from or (death.back is not None and death.back < death.at):
                raise ValueError(
                    f"worker {worker} dies at {death.at} s and comes back at {death.back} s, where it is alive from "
                    f"{alive_from} s on; give its deaths in order, each after it came back from the last one"
                )
            alive_from = math.inf if death.back is None else death.back

    def deaths_of(self, worker: int) -> list[Death]:
        return sorted((death for death in self.deaths if death.worker == worker), key=lambda death: death.at)


@dataclass
class Durations:
    """Draws the times of one run."""

    workers: Workers
    seed: int
    generators: dict[str, random.Random] = field(default_factory=dict)

    def generator(self, purpose: str) -> random.Random:
        """The random numbers of one purpose, the same however much others draw."""
        if purpose not in self.generators:
            self.generators[purpose] = random.Random(f"{self.seed} {purpose}")
        return self.generators[purpose]

    def compute(self, worker: int, share: float) -> float:
        """Seconds of a gradient.  share: of a whole batch."""
        drawn = self.workers.compute.draw(self.generator(f"compute {worker}"))
        return drawn * self.workers.slow.get(worker, 1.0) * share

    def latency(self, worker: int) -> float:
        return self.workers.connection.latency.draw(self.generator(f"latency {worker}"))

    def transfer(self, size: float) -> float:
        """Seconds that a port is busy with a message of so many bytes."""
        return size / self.workers.connection.bytes_per_second
