"""One way to agree, simulated: when what happens from the recipe's seconds and bytes, and what it does from a small problem.

The small problem is softmax regression on scikit-learn's handwritten digits, in float64, with plain SGD from a seed.  A step of
a worker there has fewer samples than the recipe's, and stands for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from widefield.agreement import AllReduce, Objective, ParameterServer, Workers, digits, replay, simulate_times
from widefield.agreement.events import EventLog
from widefield.agreement.measures import bytes_sent, idle_seconds, staleness_of
from widefield.agreement.simulator import Algorithm
from widefield.config.agreement import AgreementConfig
from widefield.planner.agreeing.ways import AgreementOption

STEPS = 48
"""How many steps of all workers are simulated, at least."""
SAMPLES = 1797
"""That the small problem has."""
MOST_SAMPLES = 16
"""Of a worker's gradient there."""
LOOKS_A_STEP = 2
"""How often the loss is looked at, by which the time to it is told."""


FLOAT_BYTES = 4
"""Of a number as it is sent, by which compression is told."""


@dataclass(frozen=True)
class AgreementEstimate:
    """A row of the table.

    recipe: what asks for it, as `agreement={name: gossip}`; None: the trainer does not have it.
    seconds_to_loss: None where the loss is not reached.  loss, distance: of the small problem, and between workers' weights,
    then or in the end; None where weights were not finite.  samples_per_second: of the recipe.
    staleness_mean, staleness_most: in updates; None where nobody updates with another's gradient.
    bytes_per_step: that are sent for each gradient of a worker.  busy: the share of workers' time in which they compute.
    """

    name: str
    recipe: str | None
    seconds_to_loss: float | None
    loss: float | None
    samples_per_second: float
    staleness_mean: float | None
    staleness_most: int | None
    bytes_per_step: float
    distance: float | None
    busy: float


@dataclass(frozen=True)
class SmallProblem:
    """What is learned.  batch: samples of a worker's gradient.  objective: of whole steps of all workers."""

    workers: int
    batch: int
    objective: Objective

    @classmethod
    def of(cls, workers: int) -> SmallProblem:
        """Steps of all workers are a fourth of the samples at most, where there are fewer workers than that."""
        batch = max(1, min(MOST_SAMPLES, SAMPLES // (4 * workers)))
        together = workers * batch
        return cls(workers, batch, digits(SAMPLES // together * together))

    @property
    def together(self) -> int:
        """Samples of a step of all workers."""
        return self.workers * self.batch

    @property
    def epochs(self) -> int:
        return -(-STEPS * self.together // self.objective.num_samples)


@dataclass(frozen=True)
class AgreementSimulation:
    """Workers as the recipe and its machines have them, on the small problem.

    samples: of the recipe, in a worker's step.  model_bytes: of its weights.  loss: to be reached.
    """

    problem: SmallProblem
    workers: Workers
    samples: int
    model_bytes: int
    loss: float
    seed: int

    def estimate(self, way: AgreementOption, asked: AgreementConfig) -> AgreementEstimate:
        """asked: the recipe's section, whose options count for its own way.  ValueError: options that do not fit."""
        problem, algorithm = self.problem, way.algorithm(asked, self.problem.workers, self.problem.together)
        numel = problem.objective.start.numel()
        log = simulate_times(
            algorithm, self.workers, num_samples=problem.objective.num_samples, numel=numel, itemsize=FLOAT_BYTES,
            scale=self.model_bytes / (FLOAT_BYTES * numel), epochs=problem.epochs, batch=problem.batch, seed=self.seed,
        )  # fmt: skip
        reached, loss, distance = self._learned(log, algorithm)
        mean, most = _staleness(log, algorithm)
        gradients = sum(event.kind == "gradient" for event in log.events)
        lived = log.seconds * self.workers.count
        return AgreementEstimate(
            way.name, way.recipe_text(asked, self.workers.count), reached, loss,
            log.num_samples * log.epochs / problem.batch * self.samples / log.seconds, mean, most,
            bytes_sent(log) / gradients, distance, 1 - sum(idle_seconds(log)) / lived,
        )  # fmt: skip

    def _learned(self, log: EventLog, algorithm: Algorithm) -> tuple[float | None, float | None, float | None]:
        """(seconds to the loss, loss, distance)."""
        points = LOOKS_A_STEP * log.num_samples * log.epochs // self.problem.together
        try:
            last = replay(log, algorithm, self.problem.objective, points=points, until_loss=self.loss).losses[-1]
        except RuntimeError:  # the weights are not finite
            return None, None, None
        return last.seconds if last.loss <= self.loss else None, last.loss, last.distance


def _staleness(log: EventLog, algorithm: Algorithm) -> tuple[float | None, int | None]:
    """(mean, most) of all updates."""
    if isinstance(algorithm, AllReduce) or (isinstance(algorithm, ParameterServer) and algorithm.kind == "synchronous"):
        return 0.0, 0
    found = staleness_of(log)
    if not found:
        return None, None
    return sum(age * count for age, count in found.items()) / found.total(), max(found)
