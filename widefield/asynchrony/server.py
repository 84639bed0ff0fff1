"""The trainer of the server's rank: a step is done when the weights have learned from all of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from widefield.agreement.events import EventLog
from widefield.agreement.serving import Serving, Share, Shares
from widefield.agreement.simulator import in_words
from widefield.asynchrony.attendance import Attendance
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.event_file import NAME, EventFile
from widefield.asynchrony.further_servers import FurtherServers
from widefield.asynchrony.hogwild_weights import weights_of
from widefield.asynchrony.messages import ASK, FAILED, HELLO, WorkersGradient, end, struck, text_of
from widefield.asynchrony.part_messages import HAVE
from widefield.asynchrony.samples import Samples
from widefield.asynchrony.weights import Arrived, algorithm_of
from widefield.comm.mesh import AgreedError
from widefield.comm.requests import Came, LostPeer, Message, PeerCameBack, Requests, close_all
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
    """Of one step: what its gradients add up to, and the staleness of each update.  dropped: samples of late gradients."""

    loss_sum: float = 0.0
    count: float = 0.0
    dropped: int = 0
    workers: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)


class Server:
    """Hands out shares, and updates the weights with what comes back.  further: the servers that have the other parts.

    pushes: requests of workers that ask for the next share while they learn from one.  warn: of workers that died or hang.
    """

    def __init__(
        self, learner: Learner, parts: Parts, requests: Requests, folder: Path, *, workers: int, further: Sequence[int],
        pushes: Requests | None, warn: Callable[[str], object],
    ) -> None:  # fmt: skip
        config, steps, asked = parts.config, learner.steps, parts.config.agreement
        check_parts(learner.model, parts.task, "agreement=server")
        self.requests, self.pushes, self._warn, self.workers = requests, pushes, warn, workers
        self.samples = Samples(parts, workers=workers - asked.backup)
        others = FurtherServers(requests, further, clips=config.optimizer.clip_norm is not None) if further else None
        self.weights = weights_of(learner, asked, others, workers=workers)
        self._next = requests.next if others is None else others.next
        algorithm = algorithm_of(config, lr=learner.lr)
        shares = Shares(self.samples.places, step=learner.step, limit=learner.step)
        self.shares = shares
        self.serving = Serving[Arrived](algorithm, shares, range(workers), ahead=int(asked.overlap))
        self.attendance = Attendance(range(workers), seconds=config.log.hang_seconds)
        self.steps: dict[int, StepsUpdates] = {}
        self.dropped = 0
        """Samples of late gradients since the last step was learned."""
        epochs = -(-config.schedule.length.in_steps(steps.per_epoch) // steps.per_epoch)
        log = EventLog(
            in_words(algorithm), workers, steps.samples, epochs, self.weights.whole.numel, 0.0, (),
            exact=algorithm.kind != "hogwild" or workers == 1,
        )  # fmt: skip
        self.events = EventFile(folder / NAME, log, samples=steps.seen(learner.step))

    def learn(self, step: int) -> StepsUpdates:
        """Return when the weights have learned from all samples of a step.  AgreedError: they cannot."""
        self._answer()
        while not self.serving.shares.is_learned(step):
            came = self._next(LOOK_SECONDS)
            if came is not None:
                self._hear(*came)
            if self._strike_hanging() or came is not None:
                self._update()
                self._answer()
            if not self.serving.living:
                raise AgreedError(
                    f"all {self.workers} workers are gone and step {step + 1} is not learned; what ended them stands "
                    "above or in the system's log. The same command goes on from the newest checkpoint"
                )
        del self.serving.shares.learned[step]
        self.events.flush()
        found = self.steps.pop(step)
        found.dropped, self.dropped = self.dropped, 0
        return found

    def _hear(self, worker: int, came: Came) -> None:
        if isinstance(came, PeerCameBack):
            self._comes_back(worker, came)
        elif isinstance(came, LostPeer):
            if worker in self.serving.living:
                self._goes(worker, f"is gone ({came.why})")
        elif worker not in self.serving.living:
            self._channel(came).answer(worker, struck(self.attendance.reason(worker)))
        elif came.kind == FAILED:
            raise AgreedError(f"worker {worker}: {text_of(came)}")
        else:
            self.attendance.hears(worker)
            if came.kind in (HELLO, ASK):
                self._asks(worker, is_first=came.kind == HELLO)
            else:
                self._take(worker, came)

    def _channel(self, message: Message) -> Requests:
        """By which a request came."""
        return self.requests if self.pushes is None or message.kind in (HELLO, ASK) else self.pushes

    def _asks(self, worker: int, *, is_first: bool) -> None:
        greeting = self.weights.greeting() if is_first else None
        if greeting is not None:
            self.requests.answer(worker, greeting)
            return
        self.serving.joins(worker)
        if is_first and self.events.before and self.serving.compression is not None:
            self.events.write("join", worker)  # nothing is left of its gradients of before

    def _comes_back(self, worker: int, came: PeerCameBack) -> None:
        self.serving.comes_back(worker)
        self.attendance.comes_back(worker)
        for requests in (self.requests, self.pushes):
            if requests is not None:
                requests.take_back(worker, came.group)
        self.events.write("join", worker)
        self._warn(f"worker {worker} is back; {len(self.serving.living)} go on")

    def _goes(self, worker: int, how: str) -> None:
        """A worker died, or does not answer."""
        unheard = self.weights.unheard(worker, self.serving.has(worker))
        if unheard is not None:
            gradient, when = unheard
            self._arrives(worker, gradient)
            how = f"{how}, {when} ({_named([gradient.share])})"
        counted = [one.share for one in self.serving.held if one.worker == worker]
        lost = self.serving.goes(worker)
        self.events.write("die", worker)
        self.weights.strike(worker, lost, counted)
        again = f"; its {_named(lost)} is handed out again" if lost else ""
        self._warn(f"worker {worker} {how}; {len(self.serving.living)} go on{again}")

    def _strike_hanging(self) -> bool:
        """Strike out workers that have had a share for too long; whether there was one."""
        busy = {worker for worker in self.serving.living if self.serving.is_awaited(worker)}
        found = self.attendance.hanging(busy)
        for worker, text in found.items():
            asks = worker in self.serving.waiting
            self._goes(worker, text)
            if asks:
                self.requests.answer(worker, struck(self.attendance.reason(worker)))
            for requests in (self.requests, self.pushes):
                if requests is not None:
                    requests.leave_out(worker)
        return bool(found)

    def _take(self, worker: int, message: Message) -> None:
        """A gradient came."""
        self._arrives(worker, self.weights.pushed(worker, message))
        if self.pushes is not None:
            self.pushes.answer(worker, Message(HAVE))

    def _arrives(self, worker: int, gradient: WorkersGradient) -> None:
        serving, number = self.serving, self.events.gradients
        self.attendance.pushes(worker, gradient.share)
        self.events.gradients += 1
        samples = self.samples.numbers(gradient.share)
        later = len(serving.has(worker)) - 1  # readings after this one
        nbytes = gradient.nbytes + self.weights.further_nbytes
        about = {"numbers": (number,), "seconds": gradient.seconds, "bytes": nbytes, "samples": samples}
        if serving.late.get(worker) == gradient.share:
            self.events.write("gradient", worker, **about)
            self.events.write("drop", worker, samples=samples, numbers=(number,))
            self.weights.drop(worker, gradient.share)
            serving.drops_late(worker)
            self.dropped += len(samples)
        else:
            arrived = self.weights.arrive(worker, gradient, number=number, samples=len(samples))
            self.events.write("gradient", worker, part=later, **about)
            serving.pushes(worker, gradient.share, arrived)

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
            message = self.weights.give(worker, share)
            self.attendance.gives(worker, share)
            self.events.write("read", worker, bytes=message.nbytes + self.weights.further_nbytes)
            self.requests.answer(worker, message)

    def close(self) -> None:
        self.events.close()


def _named(shares: Sequence[Share]) -> str:
    return "share " + ", ".join(f"{place} of step {step + 1}" for step, place in shares)


@dataclass
class ServerTrainer(Trainer):
    """requests: of workers and of further servers, which are on the ranks `further`.  pushes: as of a Server.

    workers: how many there were when the run began.  at_end: closed once they have heard how it ended.
    """

    requests: Requests | None = None
    pushes: Requests | None = None
    workers: int = 0
    further: Sequence[int] = ()
    server: Server | None = None
    at_end: ExitStack = field(default_factory=ExitStack)

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
            facts = {"dropped": found.dropped} if self.config.agreement.backup else {}
            self.record.note("updates", step=learner.step, workers=found.workers, staleness=found.staleness, **facts)
        return stop and learner.step == shares.limit

    def _server(self) -> Server:
        if self.server is None:
            assert self.requests is not None and self.record is not None, "the server's rank writes the run's files"
            self.server = Server(
                self.learner, self.parts, self.requests, self.folder, workers=self.workers, further=self.further,
                pushes=self.pushes, warn=self.record.warning,
            )  # fmt: skip
            self.at_end.callback(self.server.weights.close)  # not before: a worker may be about to open it
        return self.server

    def _stand(self) -> None:
        """Nothing is in the air, and an evaluation, a save or the end comes."""
        self._server().weights.gather()

    def _save(self, *, wait: bool) -> None:
        if isinstance(self.server, Server):  # else nothing was learned since the checkpoint
            self.server.weights.gather_optimizer()
            super()._save(wait=wait)
            self.server.weights.free_optimizer()
        else:
            super()._save(wait=wait)

    def fit(self, passes: Passes, interrupt: Interrupt) -> Outcome:
        """As of any run; workers hear in the end how it ended, of a failure once this rank has written its report of it."""
        assert self.requests is not None
        try:
            outcome = super().fit(passes, interrupt)
            last = end(has_failed=False, status=outcome.status, step=self.learner.step)
            close_all((self.requests, self.pushes), last, seconds=self._end_seconds())
            return outcome
        finally:
            if self.server is not None:
                self.server.close()

    def _end_seconds(self) -> float:
        """How long workers may take to ask once more: those that still compute what will be dropped, as long as they need."""
        late = isinstance(self.server, Server) and bool(self.server.serving.late)
        return max(END_SECONDS, self.config.log.hang_seconds or 600.0) if late else END_SECONDS
