"""What is in the messages between a server and its workers.

worker -> server   HELLO, at first;  ASK, for the next share while it learns from one;
                   PUSH: (step, place, *parameters without a gradient), (loss sum, count, seconds),
                   [gradient, change of statistics], as bytes where gradients are compressed;  FAILED: a text
server -> worker   GIVE: (step, place), [weights, statistics];  STRUCK: a text, to a worker that was struck out;
                   END: (whether the run failed, exit status, step)
Under Hogwild weights lie in memory that all share: HELLO is answered by WHERE: (process, file, bytes, mark) of it, and then a
worker asks;  GIVE: (step, place), (rate of a whole step);  PUSH: (step, place), of an update that the worker has made.
With several servers, GIVE and PUSH have the first one's part of weights and gradient; see part_messages.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from widefield.agreement.compression import Compression, packed_bytes, unpack
from widefield.agreement.serving import Share
from widefield.comm.mesh import AgreedError
from widefield.comm.requests import Message

HELLO, PUSH, FAILED, GIVE, END, STRUCK, ASK, WHERE = range(1, 9)
PUSHES = 1
"""The tag of pushes where a worker may wait for its next share at the same time."""


@dataclass(frozen=True)
class WorkersGradient:
    """Of the mean loss of a share.  count: of losses in it.  absent: places of parameters that have none.

    statistics: what the pass changed in the running statistics.  nbytes: of the message.
    """

    share: Share
    gradient: Tensor
    statistics: Tensor
    absent: frozenset[int]
    loss_sum: float
    count: float
    seconds: float
    nbytes: int = 0


def push(share: Share, values: Tensor, absent: tuple[int, ...], *, loss_sum: float, count: float, seconds: float) -> Message:
    return Message(PUSH, (*share, *absent), (loss_sum, count, seconds), values)


def pushed(
    message: Message, *, numel: int, dtype: torch.dtype = torch.float32, compression: Compression | None = None
) -> WorkersGradient:
    """numel: of the gradient, after which come the statistics.  dtype, compression: of both, and of a gradient's bytes."""
    assert message.values is not None, "a push has values"
    step, place, *absent = message.ints
    if compression is None:
        gradient, statistics = message.values[:numel], message.values[numel:]
    else:
        size = packed_bytes(numel, dtype.itemsize, compression)
        gradient = unpack(message.values[:size], numel, dtype, compression)
        statistics = message.values[size:].clone().view(dtype)
    return WorkersGradient((step, place), gradient, statistics, frozenset(absent), *message.floats, nbytes=message.nbytes)


def with_bytes(packed: Tensor, statistics: Tensor) -> Tensor:
    """The values of a push whose gradient is packed."""
    return torch.cat([packed, statistics.contiguous().view(torch.uint8)])


def check_finite(gradient: WorkersGradient, worker: int) -> None:
    """AgreedError: the loss or the gradient is no finite number."""
    if math.isfinite(gradient.loss_sum) and bool(torch.isfinite(gradient.gradient).all()):
        return
    step, place = gradient.share
    raise AgreedError(
        f"the loss of worker {worker} in step {step + 1} is {gradient.loss_sum:.6g}, and it or its gradient is no "
        f"finite number (share {place} of the step's batch), so no weight was changed by it; checkpoints stay. A lower "
        "optimizer.lr or optimizer.clip_norm=1 are the usual cures"
    )


def failed(text: str) -> Message:
    return Message(FAILED, tuple(text.encode()))


def struck(text: str) -> Message:
    return Message(STRUCK, tuple(text.encode()))


def text_of(message: Message) -> str:
    return bytes(message.ints).decode(errors="replace")


def give(share: Share, state: Tensor) -> Message:
    return Message(GIVE, share, (), state)


def end(*, has_failed: bool, status: int, step: int) -> Message:
    return Message(END, (int(has_failed), status, step))


def server_failed() -> Message:
    return end(has_failed=True, status=1, step=0)


def bytes_of_run(
    pushes: int, workers: int, *, of_push: int, of_state: int, itemsize: int, numel: int = 0,
    compression: Compression | None = None, servers: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """(what servers send, what they receive) in a run in which nobody dies and every parameter has a gradient.

    of_push, of_state: values, of a FlatModel.  numel: of the gradient among these, where it is compressed.
    Not counted are the last answers, by which workers end, and what has no weights among several servers: the orders of the
    first, and 40 bytes each for a request of weights and for the answer that a part has come.
    """
    saved = 0 if compression is None else numel * itemsize - packed_bytes(numel, itemsize, compression)
    sent = pushes * (servers * 8 * (5 + 2) + of_state * itemsize)
    heads = 8 * (5 + 2 + 3) + (servers - 1) * 8 * (5 + 2)
    received = pushes * (heads + of_push * itemsize - saved) + workers * 8 * 5
    return sent, received
