"""The loop of a Hogwild worker: read the shared weights, compute a gradient, subtract it from them, tell that it is done.

Nothing is locked: others write while this one reads or writes.  So what it reads may be torn, and where two change the same
number at the same moment one change may be lost; both are what Hogwild allows.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from widefield.agreement.serving import Share
from widefield.asynchrony.asking import asked_of, failure_is_told
from widefield.asynchrony.held_weights import HeldWeights, Update, clip_scale
from widefield.asynchrony.messages import ASK, GIVE, HELLO, PUSH, WHERE, WorkersGradient, check_finite
from widefield.asynchrony.server_links import Channel
from widefield.asynchrony.shared_memory import SharedLayout, SharedMemory, opened_memory
from widefield.asynchrony.weight_parts import WeightPart
from widefield.asynchrony.worker import Worker, ended
from widefield.comm.mesh import Mesh
from widefield.comm.requests import Message
from widefield.config import RunConfig
from widefield.training.trainer import Outcome


class HogwildWorker(Worker):
    """A worker that steps by itself, on the CPU.  workers: of the run."""

    def __init__(self, config: RunConfig, alone: Mesh, *, number: int, workers: int) -> None:
        super().__init__(config, alone, number=number, workers=workers)
        self._layout, self._clip = SharedLayout.of(self.flat, workers), config.optimizer.clip_norm
        self.memory: SharedMemory | None = None
        self.held: HeldWeights | None = None

    def open(self, address: tuple[int, ...]) -> None:
        """Have the weights and an optimizer of them.  ValueError: the memory cannot be had here."""
        self.memory = opened_memory(address, self._layout)
        part = WeightPart(self.flat, self.learner.optimizer, slice(0, self.flat.numel))
        values = self.memory.state[: self.flat.numel].split([one.numel() for one in part.pieces])
        for piece, of in zip(part.pieces, values, strict=True):
            piece.data = of
        self.held = HeldWeights(self.flat.with_pieces(part.pieces, only=True), part.optimizer, None, part)

    def update(self, share: Share, rate: float) -> Message:
        """Learn from a share and change the weights; what to tell.  rate: of an update with a whole step's samples.

        AgreedError: a sample cannot be read, or the loss or the gradient is no finite number, and nothing was changed.
        """
        assert self.memory is not None, "the server's first answer says where the weights are"
        found, cell = self.learned(share, self.memory.state), self.memory.cells[self.number]
        check_finite(found, self.number)
        cell.begin(found)
        if found.count and not cell.is_struck:  # one that was taken for dead is told so, and its share is another one's
            self.subtract(found, rate * len(self.samples.keys(share)) / self.learner.steps.batch)
        cell.end()
        return Message(PUSH, share)

    def subtract(self, found: WorkersGradient, rate: float) -> None:
        """Subtract rate x (gradient + weight decay) from the weights, as they are now."""
        assert self.held is not None, "the weights are there"
        self.held.take(Update(((self.number, found.share),), (1,), found.absent, rate), [found.gradient])
        self.held.step(rate, 1.0 if self._clip is None else clip_scale(self._clip, [self.held.norm()]))


def work(config: RunConfig, alone: Mesh, group: Any, folder: Path, *, number: int, workers: int) -> Outcome:
    """Learn until rank `workers`, which keeps the account, says that the run ends, or that this worker was struck out.

    PeerFailedError: that rank is gone, or failed.  Other errors of this rank end the run, and that one says why.
    """
    channel = Channel(workers, group)
    with ExitStack() as at_end, failure_is_told(channel, "the server"):
        worker = HogwildWorker(config, alone, number=number, workers=workers)
        at_end.callback(channel.close)  # a failure is told before
        answer = asked_of(channel, "the server", Message(HELLO))
        if answer.kind == WHERE:
            worker.open(answer.ints)
            answer = asked_of(channel, "the server", Message(ASK))
        while answer.kind == GIVE:
            step, place = answer.ints
            answer = asked_of(channel, "the server", worker.update((step, place), *answer.floats))
    return ended(answer, folder, number=number)
