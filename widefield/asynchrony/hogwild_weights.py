"""Hogwild at the rank that keeps the account: the weights lie in memory that workers change themselves, without locks.

Niu et al. 2011, arXiv:1106.5730.  This rank hands out shares, hears of updates once they are made, and adds up the running
statistics.  Where nothing is in the air its model takes the weights of the memory, for an evaluation or a save.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from widefield.agreement.serving import Share
from widefield.asynchrony.further_servers import FurtherServers
from widefield.asynchrony.held_weights import Update
from widefield.asynchrony.messages import GIVE, WHERE, WorkersGradient
from widefield.asynchrony.shared_memory import BEGUN, IDLE, SharedLayout, made_memory
from widefield.asynchrony.weights import Arrived, ServedWeights
from widefield.comm.requests import Message
from widefield.config.agreement import AgreementConfig
from widefield.training.loop import Learner


def weights_of(learner: Learner, asked: AgreementConfig, further: FurtherServers | None, *, workers: int) -> ServedWeights:
    """Those of the kind of server that is asked for."""
    if asked.kind == "hogwild":
        return HogwildWeights(learner, asked, workers=workers)
    return ServedWeights(learner, asked, further)


class HogwildWeights(ServedWeights):
    """A version counts the updates that this rank has heard of, so staleness is in these."""

    def __init__(self, learner: Learner, asked: AgreementConfig, *, workers: int) -> None:
        """ValueError: the machine has no memory for it."""
        super().__init__(learner, asked)
        self.memory = made_memory(SharedLayout.of(self.whole, workers))
        self.memory.state.copy_(self.whole.state())
        learner.optimizer.state.clear()  # of a run with another optimizer that goes on as this one; nobody steps it

    def greeting(self) -> Message:
        return Message(WHERE, self.memory.address)

    def give(self, worker: int, share: Share) -> Message:
        """With the rate that an update of a whole step's samples would have now."""
        self._versions[worker, share] = self.version
        return Message(GIVE, share, (self.learner.lr * self.learner.schedule.factor(self.received),))

    def pushed(self, worker: int, message: Message) -> WorkersGradient:
        found = self.memory.cells[worker].written(message.nbytes)
        assert found.share == message.ints, f"worker {worker} tells of {message.ints}, and its cell of {found.share}"
        return found

    def unheard(self, worker: int, has: Sequence[Share]) -> tuple[WorkersGradient, str] | None:
        cell = self.memory.cells[worker]
        cell.strike()  # before the look: a worker that wakes up looks whether it was struck after it has begun
        found = cell.written(0)
        if cell.stage == IDLE or found.share not in has:
            return None
        if cell.stage == BEGUN:
            return found, "in the middle of an update, which counts, and of which the weights may lack a part"
        return found, "after an update of which it had not told, which counts"

    def update(self, gradients: Sequence[Arrived]) -> list[int]:
        """Count an update that a worker has made; its staleness."""
        staleness = super().update(gradients)
        self.memory.statistics.copy_(self.whole.statistics())
        return staleness

    def _step(self, update: Update, gradients: Sequence[Tensor]) -> None:
        """The worker has stepped."""

    def gather(self) -> None:
        """Give the model the shared weights; nothing is in the air."""
        self.learner.before_update()
        self.whole.load_trained(self.memory.state[: self.whole.numel])

    def close(self) -> None:
        self.memory.close()
