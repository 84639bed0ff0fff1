"""A further server: it holds a part of the weights and of the optimizer's state, and does what the first server orders."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from widefield.agreement.part_orders import PartOrders
from widefield.agreement.server import even_parts
from widefield.asynchrony import part_messages as messages
from widefield.asynchrony.asking import failure_is_told, lost, outcome_of
from widefield.asynchrony.checks import check_parts
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.held_weights import HeldWeights
from widefield.asynchrony.messages import END, PUSHES
from widefield.asynchrony.weight_parts import WeightPart, check_optimizer, from_bytes, to_bytes
from widefield.asynchrony.weights import compensation_of
from widefield.comm.mesh import Mesh
from widefield.comm.requests import LostPeer, Message, Requests, asked, close_all
from widefield.config import RunConfig
from widefield.training.assemble import assemble, learner_of
from widefield.training.trainer import Outcome

LOOK_SECONDS = 0.2
END_SECONDS = 10.0
FIRST = "the first server"


class PartServer:
    """number: of the part, from 1.  servers: how many parts there are."""

    def __init__(self, config: RunConfig, alone: Mesh, *, number: int, servers: int) -> None:
        parts = assemble(config, alone)
        check_parts(parts.model, parts.task, f"agreement={config.agreement.name}")
        learner, _ = learner_of(parts)
        whole = FlatModel(learner.model)
        check_optimizer(learner.optimizer, servers)
        self.part = WeightPart(whole, learner.optimizer, even_parts(whole.numel, servers)[number])
        flat = whole.with_pieces(self.part.pieces, only=True)
        self.held = HeldWeights(flat, self.part.optimizer, compensation_of(config.agreement), self.part)
        self.orders = PartOrders[Tensor]()

    def obey(self, order: Message) -> Message:
        """Do what the first server orders; what it is told with the next request."""
        if order.kind == messages.UPDATE:
            return self._update(order)
        if order.kind == messages.STEP:
            self.held.step(*order.floats)
        elif order.kind == messages.READ:
            worker, share = messages.push_of(order)
            self.orders.reads(worker, share, self.held.read(worker, share))
        elif order.kind == messages.DROP:
            worker, share = messages.push_of(order)
            self.held.forget(worker, [share])
            self.orders.drops(worker, share)
        elif order.kind == messages.STRIKE:
            worker, lost, counted = messages.strike_of(order)
            self.held.forget(worker, lost)
            self.orders.strikes(worker, counted=counted)
        elif order.kind == messages.LOAD:
            tree = from_bytes(_values(order))
            self.part.load(tree["weights"], tree["states"], tree["options"])
        else:
            tree = self.part.weights() if order.kind == messages.WEIGHTS else self.part.states()
            return Message(messages.PART, (), (), to_bytes(tree))
        return Message(messages.NEXT)

    def _update(self, order: Message) -> Message:
        update, waits = messages.update_of(order)
        self.held.take(update, self.orders.takes(update.pushes))
        if waits:
            return Message(messages.NORM, (), (self.held.norm(),))
        self.held.step(update.rate)
        return Message(messages.NEXT)

    def hear(self, worker: int, message: Message) -> Message | None:
        """A worker's request; the answer to it, where there is one now."""
        if message.kind == messages.FETCH:
            self.orders.asks(worker)
            return None
        step, place = message.ints
        has = self.orders.brings(worker, (step, place), _values(message))
        return Message(messages.HAVE if has else messages.OUT)

    def answers(self) -> list[tuple[int, Message]]:
        """To those that wait for weights."""
        refused = [(worker, Message(messages.OUT)) for worker in self.orders.refused()]
        return [(worker, messages.state(share, part)) for worker, share, part in self.orders.ready()] + refused


def _values(message: Message) -> Tensor:
    assert message.values is not None, "this message has values"
    return message.values


class _Orders:
    """Asks the first server for orders, from a thread, which puts them among the requests of workers."""

    def __init__(self, requests: Requests, group: Any, *, first: int) -> None:
        self.first, self._requests, self._group = first, requests, group
        self.awaited = False
        """Whether an order is asked for, and has not come."""
        self._told: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._ask, name="orders", daemon=True).start()

    def ask_after(self, message: Message) -> None:
        """Ask for the next order, with what the last one was to bring."""
        self.awaited = True
        self._told.put(message)

    def came(self) -> None:
        self.awaited = False

    def _ask(self) -> None:
        try:
            while True:
                order = asked(self._told.get(), self.first, self._group)
                self._requests.put(self.first, order)
                if order.kind == END:
                    return
        except (RuntimeError, ValueError) as error:
            self._requests.put(self.first, LostPeer(str(error).split("\n")[0]))


def serve(config: RunConfig, alone: Mesh, group: Any, folder: Path, *, rank: int, workers: int, servers: int) -> Outcome:
    """Do what the first server, on rank `workers`, orders until it says that the run ends.

    PeerFailedError: it is gone, or failed.  Other errors of this rank end the run, and the first server says why.
    """
    requests = Requests(range(workers), group)
    pushes = Requests(range(workers), group, tag=PUSHES, into=requests) if config.agreement.overlap else requests
    orders, end = _Orders(requests, group, first=workers), Message(END, (1, 1, 0))

    def ask(message: Message) -> Message:
        if orders.awaited:  # then the first server hears of it by this process's end
            return end
        return asked(message, workers, group)

    try:
        with failure_is_told(ask, FIRST):
            server = PartServer(config, alone, number=rank - workers, servers=servers)
            end = _served(server, requests, pushes, orders)
    finally:
        close_all((requests, pushes), end, seconds=END_SECONDS)
    return outcome_of(end, folder, FIRST)


def _served(server: PartServer, requests: Requests, pushes: Requests, orders: _Orders) -> Message:
    """The message that ends the run.  pushes: of workers that bring parts.  PeerFailedError: the first server is gone."""
    orders.ask_after(Message(messages.NEXT))
    while True:
        came = requests.next(LOOK_SECONDS)
        if came is None:
            continue
        who, message = came
        if who == orders.first:
            if isinstance(message, LostPeer):
                raise lost(FIRST, message.why)
            if message.kind == END:
                return message
            orders.came()
            orders.ask_after(server.obey(message))
        elif isinstance(message, Message) and (answer := server.hear(who, message)) is not None:
            pushes.answer(who, answer)
        for worker, answer in server.answers():
            requests.answer(worker, answer)
