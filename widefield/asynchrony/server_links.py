"""A worker's way to its servers: pushes go to all of them, the first one last; weights come from all, put together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from widefield.agreement.server import even_parts
from widefield.asynchrony import part_messages
from widefield.asynchrony.asking import Ask, asked_of, part_is_gone
from widefield.asynchrony.flat_model import FlatModel
from widefield.asynchrony.messages import ASK, END, GIVE, HELLO, check_finite, pushed
from widefield.comm.failure import PeerFailedError
from widefield.comm.requests import Message, asked, no_more

END_SECONDS = 10.0


def _ask_server(ask: Ask, message: Message) -> Message:
    return asked_of(ask, "the server", message)


def _asking_further(channel: Channel) -> Ask:
    """A request to a further server.  PeerFailedError: it is gone."""

    def ask(message: Message) -> Message:
        try:
            return channel(message)
        except RuntimeError as error:
            raise PeerFailedError(part_is_gone(channel.peer, str(error).splitlines()[0])) from error

    return ask


@dataclass
class Channel:
    """The requests of this rank to a server, by one tag, one after another."""

    peer: int
    group: Any
    tag: int = 0
    _is_open: bool = True
    """Whether the server receives a further request."""

    def __call__(self, message: Message) -> Message:
        """The answer to a request.  RuntimeError: the server is gone."""
        self._is_open = False
        answer = asked(message, self.peer, self.group, tag=self.tag)
        self._is_open = answer.kind != END
        return answer

    def close(self) -> None:
        """Tell the server that no request comes any more, unless it has said so, or has not answered yet."""
        if self._is_open:
            with suppress(RuntimeError):
                no_more(self.peer, self.group, tag=self.tag)
        self._is_open = False


class _AskingThread:
    """Asks one server from a thread of its own."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._posted: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._is_awaited = False
        threading.Thread(target=self._work, name="link to a server", daemon=True).start()

    def post(self, message: Message) -> None:
        self._is_awaited = True
        self._posted.put(message)

    def answer(self, seconds: float | None = None) -> Message:
        """RuntimeError, PeerFailedError: the server is gone.  queue.Empty: there is no answer within so many seconds."""
        found = self._answers.get(timeout=seconds)
        self._is_awaited = False
        if isinstance(found, Exception):
            raise found
        return found

    def let_go(self) -> None:
        """Wait for an answer that nobody has use for, so that no thread receives messages of what comes after the run."""
        if self._is_awaited:
            with suppress(RuntimeError, PeerFailedError, queue.Empty):
                self.answer(END_SECONDS)

    def _work(self) -> None:
        try:
            while True:
                self._answers.put(self._ask(self._posted.get()))
        except (RuntimeError, PeerFailedError) as error:
            self._answers.put(error)
        except ValueError as error:  # this rank has left the group
            self._answers.put(RuntimeError(str(error)))


class ServerLinks:
    """first: to the first server.  further: to each of the others, in the order of their parts.  worker: for messages.

    pushes: to the same servers, beside these, where the next share is fetched while a gradient is computed.
    """

    def __init__(
        self, flat: FlatModel, first: Channel, further: Sequence[Channel], pushes: Sequence[Channel] = (), *, worker: int
    ) -> None:
        self._channels = [first, *further, *pushes]
        self._first, self._flat, self._worker = first, flat, worker
        self._links = [_AskingThread(_asking_further(one)) for one in further]
        self._parts = even_parts(flat.numel, 1 + len(further)) if further else []
        self._ahead = _AskingThread(self._pull) if pushes else None
        self._push = pushes[0] if pushes else None
        self._bringing = [_AskingThread(_asking_further(one)) for one in pushes[1:]] if pushes else self._links

    def close(self) -> None:
        """The run ends here, however it does."""
        for link in (*([] if self._ahead is None else [self._ahead]), *self._links, *self._bringing):
            link.let_go()
        for channel in self._channels:
            channel.close()

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
        answer = _ask_server(self._push, message)
        return self._ahead.answer() if answer.kind == part_messages.HAVE else answer

    def _bring(self, message: Message) -> Message:
        """Bring all further servers their parts; the push for the first one."""
        gradient = pushed(message, numel=self._flat.numel)
        check_finite(gradient, self._worker)
        for link, part in zip(self._bringing, self._parts[1:], strict=True):
            link.post(part_messages.bring(gradient.share, gradient.gradient[part]))
        for link in self._bringing:
            link.answer()  # OUT or END: the first server says why
        values = torch.cat([gradient.gradient[self._parts[0]], gradient.statistics])
        return Message(message.kind, message.ints, message.floats, values)

    def _pull(self, message: Message) -> Message:
        for link in self._links:
            link.post(Message(part_messages.FETCH))
        answer = _ask_server(self._first, message)
        if not self._links:
            return answer
        if answer.kind != GIVE:
            return answer
        assert answer.values is not None, "the first server gives its part"
        own, rest = answer.values.split([self._parts[0].stop, len(answer.values) - self._parts[0].stop])
        found = [link.answer() for link in self._links]
        for one in found:
            if one.kind != part_messages.STATE:  # the run ends, or this worker was struck out: the first server says which
                return _ask_server(self._first, Message(HELLO))
            assert one.ints == answer.ints, f"weights for {one.ints} came with the share {answer.ints}"
        return Message(GIVE, answer.ints, (), torch.cat([own, *(one.values for one in found if one.values is not None), rest]))
