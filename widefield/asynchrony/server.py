"""The trainer of the server's rank: a step is done when the weights have learned from all of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from widefield.agreement.events import EventLog
from widefield.agreement.serving import Serving, Shares
from widefield.agreement.simulator import in_words
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.event_file import NAME, EventFile
from widefield.asynchrony.messages import FAILED, HELLO, end, give, pushed, text_of
from widefield.asynchrony.samples import Samples
from widefield.asynchrony.weights import Arrived, ServedWeights, algorithm_of
from widefield.comm.mesh import AgreedError
from widefield.comm.requests import LostPeer, Message, Requests
from widefield.training.assemble import Parts
from widefield.training.interrupt import Interrupt
from widefield.training.loop import Learner
from widefield.training.passes import Passes
from widefield.training.trainer import Outcome, Trainer

LOOK_SECONDS = 0.2
END_SECONDS = 10.0
"""How long workers may take to ask once more, and be told that the run ends."""


@dataclass
class StepsUpdates:
    """Of one step: what its gradients add up to, and the staleness of each update."""

    loss_sum: float = 0.0
    count: float = 0.0
    workers: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)


class Server:
    """Hands out shares, and updates the weights with what comes back.  warn: of workers that died."""

    def __init__(
        self, learner: Learner, parts: Parts, requests: Requests, folder: Path, *, workers: int, warn: Callable[[str], object]
    ) -> None:
        config, steps = parts.config, learner.steps
        check_parts(learner.model, parts.task, "agreement=server")
        self.requests, self.samples, self._warn = requests, Samples(parts, workers=workers), warn
        self.weights = ServedWeights(learner, config.agreement)
        algorithm = algorithm_of(config, lr=learner.lr)
        shares = Shares(self.samples.places, step=learner.step, limit=learner.step)
        self.shares, self.serving = shares, Serving[Arrived](algorithm, shares, range(workers))
        self.steps: dict[int, StepsUpdates] = {}
        epochs = -(-config.schedule.length.in_steps(steps.per_epoch) // steps.per_epoch)
        log = EventLog(in_words(algorithm), workers, steps.samples, epochs, self.weights.flat.numel, 0.0, ())
        self.events = EventFile(folder / NAME, log, samples=steps.seen(learner.step))

    def learn(self, step: int) -> StepsUpdates:
        """Return when the weights have learned from all samples of a step.  AgreedError: they cannot."""
        self._answer()
        while not self.serving.shares.is_learned(step):
            came = self.requests.next(LOOK_SECONDS)
            if came is not None:
                self._hear(*came)
                self._update()
                self._answer()
            if not self.serving.living:
                raise AgreedError(
                    f"all {self.samples.workers} workers are gone and step {step + 1} is not learned; what ended them stands "
                    "above or in the system's log. The same command goes on from the newest checkpoint"
                )
        del self.serving.shares.learned[step]
        self.events.flush()
        return self.steps.pop(step)

    def _hear(self, worker: int, came: Message | LostPeer) -> None:
        if isinstance(came, LostPeer):
            lost = self.serving.goes(worker)
            self.events.write("die", worker)
            again = "" if lost is None else f"; its share {lost[1]} of step {lost[0] + 1} is handed out again"
            self._warn(f"worker {worker} is gone ({came.why}); {len(self.serving.living)} go on{again}")
        elif came.kind == FAILED:
            raise AgreedError(f"worker {worker}: {text_of(came)}")
        elif came.kind == HELLO:
            self.serving.joins(worker)
            if self.events.before and self.serving.compression is not None:
                self.events.write("join", worker)  # nothing is left of its gradients of before
        else:
            self._take(worker, came)

    def _take(self, worker: int, message: Message) -> None:
        """A gradient came."""
        flat = self.weights.flat
        gradient = pushed(message, numel=flat.numel, dtype=flat.dtype, compression=self.serving.compression)
        assert gradient.share == self.serving.shares.taken.get(worker), f"worker {worker} pushes {gradient.share}, not its own"
        numbers, number = self.samples.numbers(gradient.share), self.events.gradients
        self.events.gradients += 1
        about = {"numbers": (number,), "seconds": gradient.seconds, "bytes": gradient.nbytes}
        arrived = self.weights.arrive(worker, gradient, number=number, samples=len(numbers))
        self.events.write("gradient", worker, samples=numbers, **about)
        self.serving.pushes(worker, arrived)

    def _update(self) -> None:
        for found in self.serving.due():
            gradients = [one.gradient for one in found]
            staleness = self.weights.update(gradients)
            counted, workers = [one for one in gradients if one.of.count], [one.worker for one in gradients]
            kind = "reduce" if self.serving.is_synchronous else "push"
            if counted:
                self.events.write(kind, *(one.worker for one in counted), numbers=tuple(one.number for one in counted))
            for one in gradients:
                of = self.steps.setdefault(one.of.share[0], StepsUpdates())
                of.loss_sum, of.count = of.loss_sum + one.of.loss_sum, of.count + one.of.count
            of.workers += workers
            of.staleness += staleness

    def _answer(self) -> None:
        for worker, share in self.serving.ready():
            message = give(share, self.weights.read(worker))
            self.events.write("read", worker, bytes=message.nbytes)
            self.requests.answer(worker, message)

    def close(self) -> None:
        self.events.close()


@dataclass
class ServerTrainer(Trainer):
    """requests: of the workers.  workers: how many there were when the run began."""

    requests: Requests | None = None
    workers: int = 0
    server: Server | None = None

    def step(self, passes: Passes, *, stop: bool) -> bool:
        """Until all samples of the next step are learned from; whether the run is asked to stop and stands still."""
        learner, server = self.learner, self._server()
        shares = server.shares
        if stop:
            shares.stop(learner.step)
        else:
            shares.limit = self._next_stand(learner.step)
        lr = learner.lr_now()
        found = server.learn(learner.step)
        samples = len(learner.steps.positions(learner.step))
        learner.step += 1
        if not found.count:
            raise AgreedError(
                f"no image of step {learner.step} has a pixel that counts, so there is nothing to learn from; see data.path"
            )
        if learner.step == shares.limit:
            self._stand()
        self._record_step(found.loss_sum / found.count, lr, samples, passes)
        if self.record is not None and found.staleness:
            self.record.note("updates", step=learner.step, workers=found.workers, staleness=found.staleness)
        return stop and learner.step == shares.limit

    def _server(self) -> Server:
        if self.server is None:
            assert self.requests is not None and self.record is not None, "the server's rank writes the run's files"
            self.server = Server(
                self.learner, self.parts, self.requests, self.folder, workers=self.workers, warn=self.record.warning
            )
        return self.server

    def _stand(self) -> None:
        """Nothing is in the air, and an evaluation, a save or the end comes."""

    def _next_stand(self, step: int) -> int:
        """The next step after which nothing may be in the air: that of an evaluation, a save, or the end."""
        every = [self._steps(self.config.evaluate.every), self._steps(self.config.checkpoint.every)]
        return min(self.last, *((step // one + 1) * one for one in every))

    def fit(self, passes: Passes, interrupt: Interrupt) -> Outcome:
        """As of any run; workers hear in the end how it ended."""
        assert self.requests is not None
        failed, status = True, 1
        try:
            outcome = super().fit(passes, interrupt)
            failed, status = False, outcome.status
            return outcome
        finally:
            self.requests.close(end(has_failed=failed, status=status, step=self.learner.step), seconds=END_SECONDS)
            if self.server is not None:
                self.server.close()
