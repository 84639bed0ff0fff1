"""Requests of many ranks to one: each sends a message and waits for the answer, and any of them may die meanwhile.

The rank that answers has a thread per peer, which receives a message, waits until there is an answer, and sends it.  So a peer
that is slow holds up nobody, and one that died ends its own thread alone: gloo fails its messages at once.

A message is a head of 5 int64 (kind, how many ints, floats and values, their dtype), and then, where there are any, int64,
float64, and values of a floating dtype or bytes, each as one tensor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.point_to_point import receive_whenever, send

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
_HEAD = 5
NO_MORE = 0
"""The kind of a message that is not answered: the sender's last one."""


@dataclass(frozen=True)
class Message:
    """kind: what it is, as sender and receiver agree.  values: flat, on the CPU."""

    kind: int
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    values: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are sent for it, without those that gloo and the network add."""
        return 8 * (_HEAD + len(self.ints) + len(self.floats)) + (0 if self.values is None else self.values.nbytes)


@dataclass(frozen=True)
class LostPeer:
    """In place of a message: the peer's process has ended.  why: as gloo says."""

    why: str


@dataclass(frozen=True)
class PeerCameBack:
    """In place of a message: another process has the peer's place.  group: of the two, in which it is rank 0.

    All that the one before had sent came before it.
    """

    group: dist.ProcessGroup


Came = Message | LostPeer | PeerCameBack


def send_message(message: Message, peer: int, group: dist.ProcessGroup, *, tag: int = 0) -> None:
    """RuntimeError: the peer is gone.  tag: two ranks may send each other messages of several tags at the same time."""
    values = message.values
    dtype = 0 if values is None else _DTYPES.index(values.dtype)
    head = [message.kind, len(message.ints), len(message.floats), 0 if values is None else values.numel(), dtype]
    send(torch.tensor(head, dtype=torch.int64), peer, group, tag=tag)
    if message.ints:
        send(torch.tensor(message.ints, dtype=torch.int64), peer, group, tag=tag)
    if message.floats:
        send(torch.tensor(message.floats, dtype=torch.float64), peer, group, tag=tag)
    if values is not None and values.numel():
        send(values.contiguous(), peer, group, tag=tag)


def receive_message(peer: int, group: dist.ProcessGroup, *, tag: int = 0) -> Message:
    """Wait for a peer that lives, however long; it may compute, or have nothing to say.  RuntimeError: it is gone."""
    into = partial(receive_whenever, peer=peer, group=group, tag=tag)
    head = into(torch.empty(_HEAD, dtype=torch.int64)).tolist()
    kind, ints, floats, count, dtype = head
    whole = into(torch.empty(ints, dtype=torch.int64)).tolist() if ints else []
    real = into(torch.empty(floats, dtype=torch.float64)).tolist() if floats else []
    values = into(torch.empty(count, dtype=_DTYPES[dtype])) if count else None
    return Message(kind, tuple(whole), tuple(real), values)


class Requests:
    """The rank that answers.  peers: ranks of the group, which each send requests one after another.

    tag: of the messages.  into: whose `next` gives these requests; this one's own otherwise.
    sent, received: bytes so far, of whole messages.
    """

    def __init__(self, peers: Sequence[int], group: dist.ProcessGroup, *, tag: int = 0, into: Requests | None = None) -> None:
        self.sent = self.received = 0
        self._tag, self._left = tag, set[int]()
        self._arrived: queue.SimpleQueue[tuple[int, Came]] = queue.SimpleQueue() if into is None else into._arrived
        self._answers = dict[int, queue.SimpleQueue[Message | None]]()
        """By peer; None ends its thread."""
        self._last: Message | None = None
        """With which all requests are answered from now on."""
        self._threads = dict[int, threading.Thread]()
        for peer in peers:
            self._start(peer, group, peer)

    def _start(self, peer: int, group: dist.ProcessGroup, place: int) -> None:
        """place: of the peer in the group."""
        self._answers[peer] = queue.SimpleQueue()
        name, args = f"requests of rank {peer}", (peer, group, place, self._answers[peer])
        self._threads[peer] = threading.Thread(target=self._serve, args=args, name=name, daemon=True)
        self._threads[peer].start()

    def next(self, seconds: float) -> tuple[int, Came] | None:
        """The next request and who sent it; None where none came within `seconds`."""
        try:
            peer, message = self._arrived.get(timeout=seconds)
        except queue.Empty:
            return None
        self.received += message.nbytes if isinstance(message, Message) else 0
        return peer, message

    def put(self, peer: int, message: Came) -> None:
        """Let `next` return what came from a peer in another way."""
        self._arrived.put((peer, message))

    def answer(self, peer: int, message: Message) -> None:
        """Answer a peer's request; returns at once."""
        self.sent += message.nbytes
        self._answers[peer].put(message)

    def answer_all(self, message: Message) -> None:
        """From now on, answer all requests with one last message, the first that is given; returns at once."""
        self._last = message = self._last or message
        for answers in list(self._answers.values()):
            answers.put(message)

    def wait(self, *, seconds: float) -> None:
        """Until every peer has said `no_more`, or is gone; no longer than so many seconds."""
        deadline = time.monotonic() + seconds
        for peer, thread in list(self._threads.items()):
            thread.join(0.0 if peer in self._left else max(0.0, deadline - time.monotonic()))

    def leave_out(self, peer: int) -> None:
        """Do not wait for a peer when the requests end."""
        self._left.add(peer)

    def let_go(self, peer: int) -> None:
        """Return when nothing comes any more of the process that has ended; from another thread than the one that answers."""
        self._answers[peer].put(None)
        self._threads[peer].join()

    def take_back(self, peer: int, group: dist.ProcessGroup) -> None:
        """Receive what the process sends that has the peer's place now, of which `next` has told."""
        self._left.discard(peer)
        self._start(peer, group, 0)

    def _serve(
        self, peer: int, group: dist.ProcessGroup, place: int, answers: queue.SimpleQueue[Message | None]
    ) -> None:  # fmt: skip
        try:
            while True:
                request = receive_message(place, group, tag=self._tag)
                if request.kind == NO_MORE:
                    return
                if self._last is None:
                    self._arrived.put((peer, request))
                answer = self._last or answers.get()
                if answer is None:
                    raise RuntimeError("another process has its place")
                send_message(answer, place, group, tag=self._tag)
                if answer is self._last:
                    return
        except (RuntimeError, ValueError) as error:  # ValueError: this rank has left the group
            self._arrived.put((peer, LostPeer(str(error).split("\n")[0])))


def close_all(several: Sequence[Requests | None], message: Message, *, seconds: float) -> None:
    """Answer all requests that wait or come, within so many seconds, with one last message."""
    those, deadline = [one for one in several if one is not None], time.monotonic() + seconds
    for one in those:
        one.answer_all(message)
    for one in those:
        one.wait(seconds=max(0.0, deadline - time.monotonic()))


def no_more(peer: int, group: dist.ProcessGroup, *, tag: int = 0) -> None:
    """Tell the rank that answers that no request comes any more; it does not answer.  RuntimeError: it is gone."""
    send_message(Message(NO_MORE), peer, group, tag=tag)


def asked(message: Message, peer: int, group: dist.ProcessGroup, *, tag: int = 0) -> Message:
    """Send a request to the rank that answers, and wait for the answer.  RuntimeError: it is gone."""
    send_message(message, peer, group, tag=tag)
    return receive_message(peer, group, tag=tag)
