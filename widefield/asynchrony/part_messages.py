"""What is in the messages of further servers, which hold a part of the weights each.

worker -> server    BRING: (step, place), [its part of a gradient];  FETCH, for weights
server -> worker    HAVE;  STATE: (step, place) that they are for, [its part of the weights];  END;
                    OUT: the worker was struck out
server -> first     NEXT, for an order;  NORM: (of its gradient);  PART: [bytes];  FAILED: a text
first -> server     LOAD: [bytes];  UPDATE: (number of pushes, (worker, step, place) of each, counts, places without
                    gradients), (rate, 1 where it waits for a STEP);  STEP, (rate, scale);  READ, DROP: (worker, step, place);
                    STRIKE: (worker, lost shares, *(step, place) of these and of those that count);  WEIGHTS;  STATES;  END

An order is the answer to a request of the server, which carries what the order before it was to bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from widefield.agreement.serving import Share
from widefield.asynchrony.held_weights import Push, Update
from widefield.comm.requests import Message

BRING, FETCH, HAVE, STATE, OUT, NEXT, NORM, PART, LOAD, UPDATE, STEP, READ, DROP, STRIKE, WEIGHTS, STATES = range(31, 47)


def bring(share: Share, part: Tensor) -> Message:
    return Message(BRING, share, (), part)


def state(share: Share, part: Tensor) -> Message:
    return Message(STATE, share, (), part)


def update_message(update: Update, *, waits: bool) -> Message:
    """waits: for a STEP, which says by what the gradient is scaled."""
    pushes = chain.from_iterable((worker, *share) for worker, share in update.pushes)
    ints = (len(update.pushes), *pushes, *update.counts, *sorted(update.absent))
    return Message(UPDATE, ints, (update.rate, float(waits)))


def update_of(message: Message) -> tuple[Update, bool]:
    """(update, waits), as `update_message` took them."""
    number, rest = message.ints[0], message.ints[1:]
    pushes = tuple((rest[at], (rest[at + 1], rest[at + 2])) for at in range(0, 3 * number, 3))
    counts, absent = rest[3 * number : 4 * number], frozenset(rest[4 * number :])
    return Update(pushes, counts, absent, message.floats[0]), bool(message.floats[1])


def about(kind: int, worker: int, share: Share) -> Message:
    """A READ or a DROP."""
    return Message(kind, (worker, *share))


def push_of(message: Message) -> Push:
    worker, step, place = message.ints
    return worker, (step, place)


def strike(worker: int, lost: Sequence[Share], counted: Sequence[Share]) -> Message:
    return Message(STRIKE, (worker, len(lost), *chain.from_iterable((*lost, *counted))))


def strike_of(message: Message) -> tuple[int, list[Share], list[Share]]:
    """(worker, lost, counted), as `strike` took them."""
    worker, number, *rest = message.ints
    shares = [(rest[at], rest[at + 1]) for at in range(0, len(rest), 2)]
    return worker, shares[:number], shares[number:]
