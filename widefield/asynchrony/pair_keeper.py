"""The rank that keeps the account of workers which average in pairs: it hands out shares, and has no weights in between.

A step is done when the weights of the living have learned from all of its samples.  Before an evaluation, a save and the end
nobody has a share, all show what they have, and the mean is what this rank evaluates, saves and exports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widefield.agreement import Descent, EventLog, PairwiseGossip
from widefield.agreement.pair_account import Lost, PairAccount
from widefield.agreement.serving import Share, Shares
from widefield.agreement.simulator import in_words
from widefield.asynchrony import pair_messages as messages
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.event_file import NAME, EventFile
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import FAILED, HELLO, text_of
from widefield.asynchrony.pair_journal import PairJournal
from widefield.asynchrony.samples import Samples
from widefield.asynchrony.server import LOOK_SECONDS, ServerTrainer, StepsUpdates
from widefield.asynchrony.silence import Silence
from widefield.asynchrony.weights import descent_of
from widefield.comm.mesh import AgreedError
from widefield.comm.requests import LostPeer, Message, Requests
from widefield.config import RunConfig
from widefield.training.assemble import Parts
from widefield.training.loop import Learner


def algorithm_of(config: RunConfig, *, lr: float) -> PairwiseGossip:
    """As the simulator knows it; its optimizer is the recipe's, see descent_of."""
    return PairwiseGossip(descent_of(config, Descent(lr=lr, weight_decay=config.optimizer.weight_decay)))


class PairKeeper:
    """shares: what is left to hand out.  warn: of workers that died."""

    def __init__(
        self, learner: Learner, parts: Parts, requests: Requests, folder: Path, *, workers: int, warn: Callable[[str], object]
    ) -> None:
        config, steps = parts.config, learner.steps
        check_parts(learner.model, parts.task, "agreement=ad_psgd")
        self.requests, self._warn, self._hang_seconds = requests, warn, config.log.hang_seconds
        self.samples, self.flat = Samples(parts, workers=workers), FlatModel(learner.model)
        self.shares = Shares(self.samples.places, step=learner.step, limit=learner.step)
        self.account = PairAccount(self.shares, range(workers))
        algorithm = algorithm_of(config, lr=learner.lr)
        partners = algorithm.partners(workers) if workers > 1 else {0: ()}
        self._actives, self._gradients = set(partners), dict[int, int]()
        epochs = -(-config.schedule.length.in_steps(steps.per_epoch) // steps.per_epoch)
        log = EventLog(in_words(algorithm), workers, steps.samples, epochs, self.flat.numel, 0.0, ())
        self.events = EventFile(folder / NAME, log, stood=learner.step)
        self.journal = PairJournal(workers, self._seconds)
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}
        """By step and place, the sum of losses and its count."""
        self._states: dict[int, Tensor] = {}
        self._go_on(workers)

    def _go_on(self, workers: int) -> None:
        """All begin with the weights of the checkpoint, where the run had begun before."""
        if self.events.before:
            living = self.events.before[-1].workers
            self.events.write("average", *living, part=1)
            for one in range(workers):
                if one not in living:
                    self.events.write("join", one, living[0])
            for one in living:
                if one >= workers:
                    self.events.write("die", one)
        for one in range(workers):
            self.events.write("read", one)

    def _seconds(self, micros: int) -> float:
        return max(0.0, self.events.now - (time.time() - micros / 1e6))

    # ------------------------------------------------------------------------------------------ steps

    def learn(self, step: int) -> StepsUpdates:
        """Return when the weights have learned from all samples of a step.  AgreedError: they cannot."""
        self._answer()
        silence = Silence(self._hang_seconds)
        while not self.shares.is_learned(step):
            self._next(silence)
        of_places = self._losses.pop(step).values()
        found = StepsUpdates(sum(loss for loss, _ in of_places), sum(count for _, count in of_places))
        del self.shares.learned[step]
        return found

    def stand(self, step: int) -> tuple[Tensor, int, float]:
        """(the mean of what the living have, how many these are, how far apart they were), once nothing is in the air.

        step: how many are learned.
        """
        silence = Silence(self._hang_seconds)
        while True:
            while not self.account.stands:
                self._next(silence)
            self._states, asked = {}, set(self.account.living)
            self.account.waiting = []
            for worker in asked:
                self.requests.answer(worker, Message(messages.SHOW))
            while self.account.living == asked and self._states.keys() != asked:
                self._next(silence)
            if self.account.living == asked:
                break
        for event in self.journal.due():
            self.events.add(event)
        self.events.write("stand", *sorted(asked), part=step)
        self.events.flush()
        self.account.forget()
        for worker, steps in self.account.steps.items():
            self.journal.forget(worker, list(steps))
        states = torch.stack([self._states[worker] for worker in sorted(asked)])
        mean = states.mean(0)
        weights = (states - mean)[:, : self.flat.numel]
        return mean, len(asked), float(weights.square().sum(1).mean().sqrt())

    def _next(self, silence: Silence) -> None:
        came = self.requests.next(LOOK_SECONDS)
        silence.look(came, due=self.account.living - set(self.account.waiting))
        if came is not None:
            self._hear(*came)
            self._answer()
        self._check_living()

    def _check_living(self) -> None:
        living, go_on = self.account.living, "The same command goes on from the newest checkpoint"
        if not living:
            raise AgreedError(
                f"all {self.samples.workers} workers are gone; what ended them stands above or in the system's log. {go_on}"
            )
        actives = living & self._actives
        if len(living) > 1 and len(actives) in (0, len(living)):
            kind = "ask for means and none that answers" if actives else "answer and none that asks for a mean"
            raise AgreedError(
                f"workers {', '.join(map(str, sorted(living)))} are left, which all {kind}, so they would never agree. {go_on}"
            )

    # ------------------------------------------------------------------------------------------ messages

    def _hear(self, worker: int, came: Message | LostPeer) -> None:
        if isinstance(came, LostPeer):
            self._goes(worker, came.why)
        elif came.kind == FAILED:
            raise AgreedError(f"worker {worker}: {text_of(came)}")
        elif came.kind == HELLO:
            self.requests.answer(worker, Message(messages.BEGIN, (), (), self.flat.state()))
        elif came.kind == messages.LEARN:
            self._learns(worker, came)
        elif came.kind == messages.STATE:
            assert came.values is not None, "a worker shows its weights"
            self._states[worker] = came.values
            self.account.waiting.append(worker)
        else:
            has, done = messages.asked_for(came, self.samples.workers)
            self.journal.did(done)
            self._lose(self.account.asks(worker, has))

    def _learns(self, worker: int, message: Message) -> None:
        step, place = share = (message.ints[0], message.ints[1])
        assert share == self.shares.taken.get(worker), f"worker {worker} learned {share}, not its own"
        count, loss_sum, seconds = message.floats
        self._losses.setdefault(step, {})[place] = loss_sum, count
        number, samples = self.account.learns(worker), self.samples.numbers(share)
        self.journal.learns(worker, number, gradient=self._gradients[worker], samples=samples, seconds=seconds)
        self.requests.answer(worker, Message(messages.GO_ON))

    def _goes(self, worker: int, why: str) -> None:
        share = self.shares.taken.get(worker)
        again = "" if share is None else f"; its share {share[1]} of step {share[0] + 1} is handed out again"
        self.journal.dies(worker)
        self._lose(self.account.goes(worker))
        self._warn(f"worker {worker} is gone ({why}); {len(self.account.living)} go on{again}")

    def _lose(self, found: list[Lost]) -> None:
        for lost in found:
            self.journal.loses(lost)
            names = ", ".join(f"{place} of step {step + 1}" for step, place in lost.shares.values())
            self._warn(f"what worker {lost.worker} alone had learned is handed out again: share {names}")

    def _answer(self) -> None:
        for worker, share in self.account.ready():
            self.requests.answer(worker, self._message(worker, share))

    def _message(self, worker: int, share: Share | None) -> Message:
        if share is not None:
            self._gradients[worker] = self.events.gradients
            self.events.gradients += 1
        return messages.share_message(share, self._gradients.get(worker, 0), self.journal.known, sorted(self.account.dead))

    def close(self) -> None:
        self.events.close()


@dataclass
class PairTrainer(ServerTrainer):
    """As a server's, whose weights are the mean of the workers' where nothing is in the air."""

    def _server(self) -> PairKeeper:  # type: ignore[override]
        if self.server is None:
            assert self.requests is not None and self.record is not None, "this rank writes the run's files"
            self.server = PairKeeper(  # type: ignore[assignment]
                self.learner, self.parts, self.requests, self.folder, workers=self.workers, warn=self.record.warning
            )
        return self.server  # type: ignore[return-value]

    def _stand(self) -> None:
        keeper = self._server()
        mean, workers, distance = keeper.stand(self.learner.step)
        keeper.flat.load(mean)
        if self.record is not None and workers > 1:
            self.record.note("average", step=self.learner.step, replicas=workers, distance=distance, bytes=mean.nbytes)
