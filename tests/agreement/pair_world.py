"""Workers that average in pairs and the rank that keeps their account, in one process: random orders, deaths, lost messages.

The keeper, the account, the journal, the weights of each worker and all messages are those of real runs.  The network is drawn:
which message arrives next, who dies when, and which of its last messages are lost with it.  Gradients are of a small quadratic.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from agreement.replicas_by_hand import ByHand
from torch import Tensor, nn

from widefield.agreement.descent import DescentState
from widefield.agreement.gossip import PairwiseGossip
from widefield.agreement.objectives import Objective, quadratic
from widefield.asynchrony import pair_messages as messages
from widefield.asynchrony.messages import HELLO
from widefield.asynchrony.pair_keeper import PairKeeper, algorithm_of
from widefield.asynchrony.pair_worker import SharedWeights
from widefield.comm.requests import LostPeer, Message

DIMS = 3
Talk = Generator[tuple[str, int, Message], Message | None, None]
"""Of a worker: what it sends, ("ask", the keeper, message) or ("offer", another, message); the answer, or None: it is gone."""


class World:
    """In place of the keeper's requests.  deaths: how many workers may die.  hand: of the recipe.

    step, start: of the checkpoint that the run goes on from, if it does.  sent: the bytes of all pairs that came about.
    """

    def __init__(
        self, draw: random.Random, hand: ByHand, folder: Path, *, workers: int, deaths: int, step: int = 0,
        start: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.draw, self.hand, self.deaths, self.workers, self.step, self.sent = draw, hand, deaths, workers, step, 0
        steps, config = hand.learner.steps, hand.config
        self.model = nn.Linear(DIMS, 1, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(torch.zeros(1, DIMS) if start is None else start[None])
        learner: Any = SimpleNamespace(model=self.model, steps=steps, lr=hand.learner.lr, step=step)
        self.objective: Objective = quadratic(steps.samples, DIMS)
        self.algorithm, self.warnings = algorithm_of(config, lr=learner.lr), list[str]()
        self.living = set(range(workers))
        self.to_keeper: dict[int, deque[Message | LostPeer]] = {one: deque() for one in range(workers)}
        self.answers: dict[int, deque[Message | None]] = {one: deque() for one in range(workers)}
        self.offers: list[tuple[int, int, Message]] = []
        self.shared = [SharedWeights(one, workers, torch.empty(0)) for one in range(workers)]
        self.partners = PairwiseGossip().partners(workers) if workers > 1 else {0: ()}
        self.keeper = PairKeeper(
            learner, hand.parts, self, folder, workers=workers, warn=self.warnings.append  # type: ignore[arg-type]
        )  # fmt: skip
        self.talks = [self._talk(one) for one in range(workers)]
        for one in range(workers):
            self._send(one, next(self.talks[one]))

    def run(self, stands: list[int]) -> Tensor:
        """Learn until each step of `stands`, at which all stand; the last mean."""
        mean = torch.empty(0)
        for stand in stands:
            self.keeper.shares.limit = stand
            while self.step < stand:
                self.keeper.learn(self.step)
                self.step += 1
            mean, *_ = self.keeper.stand(stand)
        return mean

    # ------------------------------------------------------------------------------------------ as Requests

    def next(self, seconds: float) -> tuple[int, Message | LostPeer] | None:
        """Let things happen until something arrives at the keeper.  AssertionError: nothing can happen any more."""
        for _ in range(10_000):
            if self.deaths and self.draw.random() < 0.02:
                self._kill(self.draw.choice(sorted(self.living)))
            arriving = [one for one, queue in self.to_keeper.items() if queue]
            waking = [one for one in self.living if self.answers[one]]
            choices = [("arrive", one) for one in arriving] + [("wake", one) for one in waking]
            choices += [("offer", place) for place, (_, other, _) in enumerate(self.offers) if self._hears(other)]
            assert choices, "nobody can go on, and nothing is on its way"
            kind, one = self.draw.choice(choices)
            if kind == "arrive":
                return one, self.to_keeper[one].popleft()
            if kind == "wake":
                self._send(one, self.talks[one].send(self.answers[one].popleft()))
            else:
                self._answer_offer(*self.offers.pop(one))
        raise AssertionError("workers go on without an end")

    def answer(self, worker: int, message: Message) -> None:
        self.answers[worker].append(message)

    # ------------------------------------------------------------------------------------------ the network

    def _send(self, worker: int, sent: tuple[str, int, Message]) -> None:
        kind, other, message = sent
        if kind == "ask":
            self.to_keeper[worker].append(message)
        elif other in self.living:
            self.offers.append((worker, other, message))
        else:
            self.answers[worker].append(None)

    def _hears(self, passive: int) -> bool:
        """Whether an offer gets an answer, or an error, now: it has weights, or is gone."""
        return passive not in self.living or bool(self.shared[passive].state.numel())

    def _answer_offer(self, active: int, passive: int, offer: Message) -> None:
        if passive in self.living:
            if active not in self.shared[passive].dead:
                self.answers[active].append(self.shared[passive].mean_with(active, offer))
                self.sent += offer.nbytes + self.answers[active][-1].nbytes
        else:
            self.answers[active].append(None)

    def _kill(self, worker: int) -> None:
        """At once; of what it sent last to each, some is lost."""
        allowed = self.living - {worker}
        if len(allowed) > 1 and len({one in self.partners for one in allowed}) == 1:
            return  # those that are left could never agree, which ends a run
        if not allowed:
            return
        self.deaths -= 1
        self.living.discard(worker)
        queue = self.to_keeper[worker]
        for _ in range(self.draw.randint(0, len(queue))):
            queue.pop()
        queue.append(LostPeer("killed"))
        self.offers = [one for one in self.offers if one[0] != worker or self.draw.random() < 0.5]

    # ------------------------------------------------------------------------------------------ a worker

    def _talk(self, number: int) -> Talk:
        """As pair_worker.work, with a gradient in closed form."""
        shared, state = self.shared[number], DescentState(self.algorithm.descent)
        answer = yield "ask", -1, Message(HELLO)
        while True:
            assert answer is not None, "the keeper lives"
            if answer.kind == messages.SHOW:
                answer = yield "ask", -1, Message(messages.STATE, (), (), shared.state)
                continue
            if answer.kind == messages.BEGIN:
                assert answer.values is not None
                shared.state = shared.read = answer.values
            else:
                yield from self._learn(number, state, answer)
            answer = yield "ask", -1, shared.request()

    def _learn(self, number: int, state: DescentState, answer: Message) -> Talk:
        shared = self.shared[number]
        share, gradient_number, known, dead = messages.share_of_message(answer, self.workers)
        shared.hear(known, dead)
        if share is None:
            return
        gradient = self.objective.gradient_of(shared.read, self.keeper.samples.numbers(share))
        while alive := [one for one in self.partners.get(number, ()) if one not in shared.dead]:
            other, offer = self.draw.choice(alive), shared.offer()
            mean = yield "offer", other, offer
            if mean is not None:
                shared.take(other, mean, sent=offer.nbytes)
                break
            shared.dead.add(other)
        yield "ask", -1, messages.learn(share, count=1.0, loss_sum=1.0, seconds=0.0)
        shared.stepped(state.step(shared.state, gradient, self.hand.learner.lr), gradient_number)
