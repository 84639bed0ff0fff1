"""What the first server knows of the further ones: it gives them orders, and hears what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from widefield.agreement.server import even_parts
from widefield.agreement.serving import Share
from widefield.asynchrony import part_messages as messages
from widefield.asynchrony.asking import part_is_gone
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.held_weights import Update
from widefield.asynchrony.messages import FAILED, text_of
from widefield.asynchrony.weight_parts import Piece, WeightPart, check_optimizer, from_bytes, join_states, to_bytes
from widefield.comm.mesh import AgreedError
from widefield.comm.requests import LostPeer, Message, Requests

LOOK_SECONDS = 0.2


class FurtherServers:
    """ranks: of these, each of which holds the next part.  clips: whether an update waits for the norm of all gradients."""

    def __init__(self, requests: Requests, ranks: Sequence[int], *, clips: bool) -> None:
        self.requests, self.ranks, self._clips = requests, list(ranks), clips
        self._later: deque[tuple[int, Message | LostPeer]] = deque()
        """What came from workers while something was awaited from servers."""
        self._brought: dict[int, deque[Message]] = {rank: deque() for rank in ranks}
        self._pieces: list[list[Piece]] = []
        self.nbytes = 0
        """Of the messages that bring all further servers their parts of a gradient, or a worker their weights."""

    def next(self, seconds: float) -> tuple[int, Message | LostPeer] | None:
        """The next message of a worker; None where none came."""
        return self._later.popleft() if self._later else self._from_worker(self.requests.next(seconds))

    def _from_worker(self, came: tuple[int, Message | LostPeer] | None) -> tuple[int, Message | LostPeer] | None:
        """What came, unless it is of a server.  AgreedError: a server is gone, or failed."""
        if came is None or came[0] not in self._brought:
            return came
        rank, message = came
        if isinstance(message, LostPeer):
            raise AgreedError(part_is_gone(rank, message.why))
        if message.kind == FAILED:
            raise AgreedError(f"the server on rank {rank}: {text_of(message)}")
        if message.kind != messages.NEXT:
            self._brought[rank].append(message)
        return None

    def _order(self, message: Message) -> None:
        for rank in self.ranks:
            self.requests.answer(rank, message)

    def _all_brought(self) -> list[Message]:
        """A message of each, in the order of their parts."""
        while not all(self._brought.values()):
            came = self._from_worker(self.requests.next(LOOK_SECONDS))
            if came is not None:
                self._later.append(came)
        return [self._brought[rank].popleft() for rank in self.ranks]

    def hand_out(self, whole: FlatModel, optimizer: Optimizer) -> WeightPart:
        """Give each its part of the weights and of the optimizer's state; the first part.

        NotImplementedError: the optimizer cannot be cut.  ValueError: more servers than weights.
        """
        check_optimizer(optimizer, 1 + len(self.ranks))
        first, *parts = even_parts(whole.numel, 1 + len(self.ranks))
        for rank, part in zip(self.ranks, parts, strict=True):
            found = WeightPart(whole, optimizer, part)
            tree = {"weights": found.weights(), "states": found.states(), "options": found.options()}
            self.requests.answer(rank, Message(messages.LOAD, (), (), to_bytes(tree)))
            self._pieces.append(found.places)
            self.nbytes += messages.bring((0, 0), found.weights()).nbytes
        own = WeightPart(whole, optimizer, first)
        optimizer.state.clear()
        return own

    def reads(self, worker: int, share: Share) -> None:
        self._order(messages.about(messages.READ, worker, share))

    def drops(self, worker: int, share: Share) -> None:
        self._order(messages.about(messages.DROP, worker, share))

    def strikes(self, worker: int, lost: Sequence[Share], counted: Sequence[Share]) -> None:
        self._order(messages.strike(worker, lost, counted))

    def update(self, update: Update) -> None:
        self._order(messages.update_message(update, waits=self._clips))

    def norms(self) -> list[float]:
        return [one.floats[0] for one in self._all_brought()]

    def step(self, rate: float, scale: float) -> None:
        self._order(Message(messages.STEP, (), (rate, scale)))

    def weights(self) -> list[Tensor]:
        """The parts of all, in order."""
        self._order(Message(messages.WEIGHTS))
        return [from_bytes(_values(one)) for one in self._all_brought()]

    def gather_states(self, whole: FlatModel, optimizer: Optimizer, own: WeightPart) -> None:
        """Give the model's optimizer what all keep.  own: the first part."""
        self._order(Message(messages.STATES))
        states = [from_bytes(_values(one)) for one in self._all_brought()]
        join_states(whole, optimizer, [(own.places, own.states()), *zip(self._pieces, states, strict=True)])


def _values(message: Message) -> Tensor:
    assert message.values is not None, "a part has values"
    return message.values
