"""The loop of a worker that averages in pairs: a gradient of its own weights, a mean with another one, a step.

Active workers ask a passive one for a mean before each step; passive ones answer from a thread, while they compute.  So only
active ones wait, for an answer that takes no gradient's time, and nobody waits in a circle.  A gradient is of the weights after
the worker's step before, and is applied to what they have become: Lian et al. 2018, arXiv:1710.06952.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widefield.agreement import PairwiseGossip
from widefield.agreement.gossip import pairwise_mean
from widefield.agreement.serving import Share
from widefield.asynchrony import pair_messages as messages
from widefield.asynchrony.asking import Ask, asked_of, failure_is_told, outcome_of
from widefield.asynchrony.held_weights import HeldWeights, clip_scale
from widefield.asynchrony.messages import END, HELLO, check_finite, pushed
from widefield.asynchrony.pair_messages import Done
from widefield.asynchrony.worker import Worker
from widefield.comm.failure import in_words
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.requests import Message, Requests, asked, no_more
from widefield.config import RunConfig
from widefield.data.transforms import seed_of
from widefield.training.trainer import Outcome

LOOK_SECONDS = 0.2
END_SECONDS = 10.0
KEEPER = "the rank that keeps the account"


class SharedWeights:
    """What a worker has, for its loop and for the thread that answers; use it with `lock` held.

    read: the weights after its last step, of which its next gradient is, whatever it averages with meanwhile.
    has: how many steps of each worker are in `state`.  done: what is in it of which the keeper may not know, by whoever did it.
    dead: workers that are gone; nothing is taken of them any more.
    """

    def __init__(self, number: int, workers: int, state: Tensor) -> None:
        self.lock, self.number, self.workers, self.state, self.read = threading.Lock(), number, workers, state, state
        self.has, self.done, self.clock, self.dead = [0] * workers, list[Done](), 0, set[int]()
        self._seen = [0] * workers
        """By worker, the clock of the last of its doings that came here.  All before it are here, or the keeper knows them."""

    def offer(self) -> Message:
        return self._message(messages.OFFER)

    def mean_with(self, active: int, offer: Message) -> Message:
        """Take the mean with an offer; the answer to it."""
        clock, has, done, state = messages.of_weights_message(offer, self.workers)
        self._join(max(self.clock, clock) + 1, has, done)
        self.state = pairwise_mean(state, self.state)
        answer = self._message(messages.MEAN)
        self._add([Done(self.clock, active, self.number, offer.nbytes + answer.nbytes, _micros())])
        return answer

    def take(self, passive: int, mean: Message, *, sent: int) -> None:
        """Take the mean that another one has made.  sent: the bytes of the offer."""
        clock, has, done, self.state = messages.of_weights_message(mean, self.workers)
        self._join(clock, has, done)
        self._add([Done(self.clock, self.number, passive, sent + mean.nbytes, _micros())])

    def stepped(self, state: Tensor, gradient: int) -> None:
        self.clock, self.state, self.read = self.clock + 1, state, state
        self.has[self.number] += 1
        self._add([Done.step(self.clock, self.number, gradient, _micros())])

    def request(self) -> Message:
        """For a share.  It tells what this worker did, and what those did that are dead."""
        tells = [one for one in self.done if one.worker == self.number or one.worker in self.dead]
        return messages.ask(self.has, tells)

    def hear(self, known: Sequence[int], dead: Sequence[int]) -> None:
        """What the keeper knows of each worker, and who is dead."""
        self.dead.update(dead)
        self.done = [one for one in self.done if one.clock > known[one.worker]]

    def _message(self, kind: int) -> Message:
        return messages.weights_message(kind, self.clock, self.has, self.done, self.state)

    def _join(self, clock: int, has: Sequence[int], done: Sequence[Done]) -> None:
        self.clock, self.has = clock, [max(pair) for pair in zip(self.has, has, strict=True)]
        self._add(done)

    def _add(self, done: Sequence[Done]) -> None:
        """Of each worker in the order of its clock, as it is told everywhere."""
        for one in done:
            if one.clock > self._seen[one.worker]:
                self._seen[one.worker] = one.clock
                self.done.append(one)


class PairWorker(Worker):
    """group: the process group of all ranks, for messages between two."""

    def __init__(self, config: RunConfig, alone: Mesh, group: Any, *, number: int, workers: int) -> None:
        super().__init__(config, alone, number=number, workers=workers)
        partners = PairwiseGossip().partners(workers) if workers > 1 else {0: ()}
        self.number, self.group, self._held = number, group, HeldWeights(self.flat, self.learner.optimizer, None)
        self.asks_whom = list(partners.get(number, ()))
        self._draw = random.Random(f"{seed_of(config.seed, 'partner', number)}")
        self.shared = SharedWeights(number, workers, torch.empty(0))
        asked_by = [one for one, passive in partners.items() if number in passive]
        self._requests = Requests(asked_by, group) if asked_by else None
        self._over, self._problem = threading.Event(), ""
        self._thread = threading.Thread(target=self._answer, name="pairs", daemon=True)

    def begin(self, state: Tensor) -> None:
        """With the weights and statistics that all begin with."""
        self.shared.state = self.shared.read = state
        if self._requests is not None:
            self._thread.start()

    def learn(self, share: Share, gradient: int, ask: Ask) -> Message | None:
        """A gradient, a mean with another one, and a step; the message that the run ends, if that came before the step."""
        found = pushed(self.gradient(share, self.shared.read), numel=self.flat.numel)
        if self._problem:
            raise AgreedError(self._problem)
        check_finite(found, self.number)
        if self.asks_whom:
            self._average()
        answer = ask(messages.learn(share, count=found.count, loss_sum=found.loss_sum, seconds=found.seconds))
        if answer.kind == END:
            return answer
        with self.shared.lock:
            self.flat.load(self.shared.state)
            if found.count:
                self.flat.set_gradient(found.gradient, tuple(found.absent))
                self._step(share[0])
                self.flat.move_statistics(found.statistics)
            self.shared.stepped(self.flat.state(), gradient)
        return None

    def _step(self, step: int) -> None:
        learner = self.learner
        clip, rate = learner.config.optimizer.clip_norm, learner.lr * learner.schedule.factor(learner.steps.seen(step))
        self._held.step(rate, 1.0 if clip is None else clip_scale(clip, [self._held.norm()]))

    def _average(self) -> None:
        """Take the mean with a living passive worker, if there is one."""
        while alive := [one for one in self.asks_whom if one not in self.shared.dead]:
            other, own = self._draw.choice(alive), self.shared
            offer = own.offer()
            try:
                answer = asked(offer, other, self.group)
            except RuntimeError:  # it died, and the rank that keeps the account has seen it too
                own.dead.add(other)
                continue
            own.take(other, answer, sent=offer.nbytes)
            return

    def _answer(self) -> None:
        assert self._requests is not None
        try:
            while not self._over.is_set():
                came = self._requests.next(LOOK_SECONDS)
                if came is None or not isinstance(came[1], Message):
                    continue
                with self.shared.lock:
                    answer = None if came[0] in self.shared.dead else self.shared.mean_with(*came)
                if answer is not None:
                    self._requests.answer(came[0], answer)
        except Exception as error:
            self._problem = in_words(error)

    def end(self) -> None:
        """Of the run, however it ended: offer nothing any more, and answer until nobody else does."""
        for other in self.asks_whom:
            with suppress(RuntimeError):
                no_more(other, self.group)
        if self._requests is not None:
            self._requests.wait(seconds=END_SECONDS)
        self._over.set()


def work(config: RunConfig, alone: Mesh, group: Any, folder: Path, *, number: int, workers: int) -> Outcome:
    """Learn until the rank that keeps the account says that the run ends.

    PeerFailedError: that rank is gone, or failed.  Other errors of this rank end the run, and that rank says why.
    """
    ask = partial(asked_of, partial(asked, peer=workers, group=group), KEEPER)
    with ExitStack() as at_end, failure_is_told(ask, KEEPER):
        worker = PairWorker(config, alone, group, number=number, workers=workers)
        at_end.callback(worker.end)  # a failure is told before others are waited for
        answer = ask(Message(HELLO))
        while answer.kind != END:
            answer = _did(worker, answer, ask)
    return outcome_of(answer, folder, KEEPER)


def _did(worker: PairWorker, answer: Message, ask: Ask) -> Message:
    """Do what an answer asks for; the next answer."""
    shared = worker.shared
    if answer.kind == messages.SHOW:
        return ask(Message(messages.STATE, (), (), shared.state))
    if answer.kind == messages.BEGIN:
        assert answer.values is not None, "all begin with weights"
        worker.begin(answer.values)
    if answer.kind == messages.SHARE:
        share, gradient, known, dead = messages.share_of_message(answer, shared.workers)
        with shared.lock:
            shared.hear(known, dead)
        ends = None if share is None else worker.learn(share, gradient, ask)
        if ends is not None:
            return ends
    with shared.lock:
        request = shared.request()
    return ask(request)


def _micros() -> int:
    return time.time_ns() // 1000
