"""A worker's way to its servers: pushes go to all of them, the first one last; weights come from all, put together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from widefield.agreement.server import even_parts
from widefield.asynchrony import part_messages
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import ASK, GIVE, HELLO, not_finite, pushed
from widefield.comm.failure import PeerFailedError
from widefield.comm.requests import Message

Ask = Callable[[Message], Message]
"""Sends a server a request and returns its answer.  RuntimeError: it is gone."""
END_SECONDS = 10.0


def ask_server(ask: Ask, message: Message) -> Message:
    """PeerFailedError: the server is gone."""
    try:
        return ask(message)
    except RuntimeError as error:
        raise PeerFailedError(
            f"lost the server, which reported no error ({str(error).splitlines()[0]}); it was killed, or its machine or the "
            "network is down. The same command goes on from the newest checkpoint"
        ) from error


class _Link:
    """Asks one server from a thread of its own."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._posted: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="link to a server", daemon=True).start()

    def post(self, message: Message) -> None:
        self._posted.put(message)

    def answer(self, seconds: float | None = None) -> Message:
        """RuntimeError, PeerFailedError: the server is gone.  queue.Empty: there is no answer within so many seconds."""
        found = self._answers.get(timeout=seconds)
        if isinstance(found, Exception):
            raise found
        return found

    def _work(self) -> None:
        try:
            while True:
                self._answers.put(self._ask(self._posted.get()))
        except (RuntimeError, PeerFailedError) as error:
            self._answers.put(error)
        except ValueError as error:  # this rank has left the group
            self._answers.put(RuntimeError(str(error)))


class ServerLinks:
    """first: asks the first server.  further: each of the others, in the order of their parts.  worker: for messages.

    pushes: ask the same servers beside these, where the next share is fetched while a gradient is computed.
    """

    def __init__(self, flat: FlatModel, first: Ask, further: Sequence[Ask], pushes: Sequence[Ask] = (), *, worker: int) -> None:
        self._first, self._flat, self._worker = first, flat, worker
        self._links = [_Link(ask) for ask in further]
        self._parts = even_parts(flat.numel, 1 + len(further)) if further else []
        self._ahead = _Link(self._pull) if pushes else None
        self._push = pushes[0] if pushes else None
        self._bringing = [_Link(ask) for ask in pushes[1:]] if pushes else self._links

    def begin(self) -> Message:
        """The first share with its weights, as `push` returns them."""
        return self._pull(Message(HELLO))

    def ask_ahead(self) -> None:
        """Ask for the share after the one that is learned from, where that is done."""
        if self._ahead is not None:
            self._ahead.post(Message(ASK))

    def push(self, message: Message) -> Message:
        """Push a gradient; the next share with all weights and statistics, or another message of the first server.

        PeerFailedError: a server is gone.  AgreedError: the gradient is no finite number.
        """
        message = self._bring(message) if self._links else message
        if self._ahead is None or self._push is None:
            return self._pull(message)
        answer = ask_server(self._push, message)
        return self._ahead.answer() if answer.kind == part_messages.HAVE else answer

    def _bring(self, message: Message) -> Message:
        """Bring all further servers their parts; the push for the first one."""
        gradient = pushed(message, numel=self._flat.numel)
        if not bool(torch.isfinite(gradient.gradient).all()):
            raise not_finite(gradient, self._worker)
        for link, part in zip(self._bringing, self._parts[1:], strict=True):
            link.post(part_messages.bring(gradient.share, gradient.gradient[part]))
        for link in self._bringing:
            ask_server(lambda _, link=link: link.answer(), message)  # OUT or END: the first server says why
        values = torch.cat([gradient.gradient[self._parts[0]], gradient.statistics])
        return Message(message.kind, message.ints, message.floats, values)

    def _pull(self, message: Message) -> Message:
        for link in self._links:
            link.post(Message(part_messages.FETCH))
        answer = ask_server(self._first, message)
        if not self._links:
            return answer
        if answer.kind != GIVE:
            self._let_go()
            return answer
        assert answer.values is not None, "the first server gives its part"
        own, rest = answer.values.split([self._parts[0].stop, len(answer.values) - self._parts[0].stop])
        found = [ask_server(lambda _, link=link: link.answer(), message) for link in self._links]
        for one in found:
            if one.kind != part_messages.STATE:  # the run ends, or this worker was struck out: the first server says which
                return ask_server(self._first, Message(HELLO))
            assert one.ints == answer.ints, f"weights for {one.ints} came with the share {answer.ints}"
        return Message(GIVE, answer.ints, (), torch.cat([own, *(one.values for one in found if one.values is not None), rest]))

    def _let_go(self) -> None:
        """The run ends, and so do the servers: wait for their last answers."""
        for link in self._links:
            try:
                link.answer(END_SECONDS)
            except (RuntimeError, queue.Empty):
                continue
