"""The loop of a worker that averages in pairs: a gradient of its own weights, a mean with another one, a step.

Active workers ask a passive one for a mean before each step; passive ones answer from a thread, while they compute.  So only
active ones wait, for an answer that takes no gradient's time, and nobody waits in a circle.  A gradient is of the weights after
the worker's step before, and is applied to what they have become: Lian et al. 2018, arXiv:1710.06952.
"""

from __future__ import annotations

import math
import random
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widefield.agreement import PairwiseGossip
from widefield.agreement.gossip import pairwise_mean
from widefield.agreement.serving import Share
from widefield.asynchrony import pair_messages as messages
from widefield.asynchrony.messages import END, HELLO, WorkersGradient, failed, not_finite, pushed
from widefield.asynchrony.pair_messages import Done
from widefield.asynchrony.server_links import ask_server
from widefield.asynchrony.worker import Worker
from widefield.comm.failure import PeerFailedError, in_words
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.requests import Message, Requests, asked, no_more
from widefield.config import RunConfig
from widefield.data.transforms import seed_of
from widefield.parallel.optimizer_steps import clip_grad_norm_
from widefield.training.trainer import Outcome

LOOK_SECONDS = 0.2
END_SECONDS = 10.0


class SharedWeights:
    """What a worker has, for its loop and for the thread that answers; use it with `lock` held.

    read: the weights after its last step, of which its next gradient is, whatever it averages with meanwhile.
    has: how many steps of each worker are in `state`.  did: since it was last told.  ignored: dead workers.
    """

    def __init__(self, number: int, workers: int, state: Tensor) -> None:
        self.lock, self.number, self.state, self.read = threading.Lock(), number, state, state
        self.has, self.did, self.clock, self.ignored = [0] * workers, list[Done](), 0, set[int]()

    def mean_with(self, other: int, offer: Message) -> Message:
        """Take the mean with an offer; the answer to it."""
        clock, *has = offer.ints
        assert offer.values is not None, "an offer has weights"
        self._note(other, max(self.clock, clock) + 1, has)
        self.state = pairwise_mean(offer.values, self.state)
        return messages.weights_message(messages.MEAN, self.clock, self.has, self.state)

    def take(self, other: int, mean: Message) -> None:
        """Take the mean that another one has made."""
        clock, *has = mean.ints
        assert mean.values is not None, "a mean has weights"
        self._note(other, clock, has)
        self.state = mean.values

    def _note(self, other: int, clock: int, has: list[int]) -> None:
        own = self.has[self.number]
        self.clock, self.has = clock, [max(pair) for pair in zip(self.has, has, strict=True)]
        self.did.append(Done(clock, other, own, has[other], _micros()))

    def stepped(self, state: Tensor, gradient: int) -> None:
        self.clock, self.state, self.read = self.clock + 1, state, state
        self.has[self.number] += 1
        self.did.append(Done.step(self.clock, gradient, _micros()))


class PairWorker(Worker):
    """group: the process group of all ranks, for messages between two."""

    def __init__(self, config: RunConfig, alone: Mesh, group: Any, *, number: int, workers: int) -> None:
        super().__init__(config, alone, number=number, workers=workers)
        partners = PairwiseGossip().partners(workers) if workers > 1 else {0: ()}
        self.number, self.group, self.workers = number, group, workers
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

    def learn(self, share: Share, gradient: int, ask: partial[Message]) -> Message | None:
        """A gradient, a mean with another one, and a step; the message that the run ends, if that came before the step."""
        found = self.gradient(share, self.shared.read)
        if self._problem:
            raise AgreedError(self._problem)
        pushed_ = pushed(found, numel=self.flat.numel)
        _check_finite(pushed_, self.number)
        if self.asks_whom:
            self._average()
        about = {"count": pushed_.count, "loss_sum": pushed_.loss_sum, "seconds": pushed_.seconds}
        answer = ask_server(ask, messages.learn(share, **about))
        if answer.kind == END:
            return answer
        with self.shared.lock:
            self.flat.load(self.shared.state)
            if pushed_.count:
                self.flat.set_gradient(pushed_.gradient, tuple(pushed_.absent))
                self._step(share[0])
                self.flat.move_statistics(pushed_.statistics)
            self.shared.stepped(self.flat.state(), gradient)
        return None

    def _step(self, step: int) -> None:
        learner, clip = self.learner, self.learner.config.optimizer.clip_norm
        for group in learner.optimizer.param_groups:
            group["lr"] = learner.lr * learner.schedule.factor(learner.steps.seen(step)) * group.get("lr_scale", 1.0)
        if clip is not None:
            clip_grad_norm_(learner.model, learner.mesh, clip)
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)

    def _average(self) -> None:
        """Take the mean with a living passive worker, if there is one."""
        while alive := [one for one in self.asks_whom if one not in self.shared.ignored]:
            other, own = self._draw.choice(alive), self.shared
            offer = messages.weights_message(messages.OFFER, own.clock, own.has, own.state)
            try:
                answer = asked(offer, other, self.group)
            except RuntimeError:  # it died, and the rank that keeps the account has seen it too
                own.ignored.add(other)
                continue
            own.take(other, answer)
            return

    def _answer(self) -> None:
        assert self._requests is not None
        try:
            while not self._over.is_set():
                came = self._requests.next(LOOK_SECONDS)
                if came is None or not isinstance(came[1], Message):
                    continue
                with self.shared.lock:
                    answer = None if came[0] in self.shared.ignored else self.shared.mean_with(*came)
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
    ask = partial(asked, peer=workers, group=group)
    worker: PairWorker | None = None
    try:
        worker = PairWorker(config, alone, group, number=number, workers=workers)
        answer = ask_server(ask, Message(HELLO))
        while answer.kind != END:
            answer = _did(worker, answer, ask)
    except PeerFailedError:
        raise
    except Exception as error:
        ask_server(ask, failed(str(error) if isinstance(error, (ValueError, NotImplementedError)) else in_words(error)))
        raise
    finally:
        if worker is not None:
            worker.end()
    has_failed, status, step = answer.ints
    if has_failed:
        raise PeerFailedError("the rank that keeps the account failed; its message is above")
    return Outcome("complete" if status == 0 else "interrupted", step, status, None, folder)


def _did(worker: PairWorker, answer: Message, ask: partial[Message]) -> Message:
    """Do what an answer asks for; the next answer."""
    shared = worker.shared
    if answer.kind == messages.SHOW:
        return ask_server(ask, Message(messages.STATE, (), (), shared.state))
    if answer.kind == messages.BEGIN:
        assert answer.values is not None, "all begin with weights"
        worker.begin(answer.values)
    if answer.kind == messages.SHARE:
        share, gradient, dead = messages.share_of_message(answer)
        with shared.lock:
            shared.ignored.update(dead)
        ends = None if share is None else worker.learn(share, gradient, ask)
        if ends is not None:
            return ends
    with shared.lock:
        request, shared.did = messages.ask(shared.has, shared.did), []
    return ask_server(ask, request)


def _check_finite(found: WorkersGradient, worker: int) -> None:
    """AgreedError: the loss or the gradient is no finite number."""
    if not (math.isfinite(found.loss_sum) and bool(torch.isfinite(found.gradient).all())):
        raise not_finite(found, worker)


def _micros() -> int:
    return time.time_ns() // 1000
