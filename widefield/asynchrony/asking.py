"""How a rank that asks another one for what to do fails, and ends: workers of every kind, and servers but the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from widefield.asynchrony.messages import failed
from widefield.comm.failure import PeerFailedError, in_words
from widefield.comm.requests import Message
from widefield.training.trainer import Outcome

Ask = Callable[[Message], Message]
"""Sends a request and returns its answer.  RuntimeError: the one that answers is gone."""


def asked_of(ask: Ask, whom: str, message: Message) -> Message:
    """The answer of a rank, which is `whom` in words.  PeerFailedError: it is gone."""
    try:
        return ask(message)
    except RuntimeError as error:
        raise lost(whom, str(error).splitlines()[0]) from error


def lost(whom: str, why: str) -> PeerFailedError:
    return PeerFailedError(
        f"lost {whom}, which reported no error ({why}); it was killed, or its machine or the network is down. The same "
        "command goes on from the newest checkpoint"
    )


def part_is_gone(rank: int, why: str) -> str:
    """What the first server and workers say of a further server that was lost, whoever finds out first."""
    return (
        f"the server on rank {rank} is gone ({why}), and with it its part of the weights. The same command goes on from the "
        "newest checkpoint"
    )


@contextmanager
def failure_is_told(ask: Ask, whom: str) -> Iterator[None]:
    """Inside, an error of this rank is told to the one that answers, which then says why the run ends."""
    try:
        yield
    except PeerFailedError:
        raise
    except Exception as error:
        asked_of(ask, whom, failed(str(error) if isinstance(error, (ValueError, NotImplementedError)) else in_words(error)))
        raise


def outcome_of(end: Message, folder: Path, whose: str) -> Outcome:
    """How the run ended, of the last answer.  PeerFailedError: the rank that gave it, `whose` in words, failed."""
    has_failed, status, step = end.ints
    if has_failed:
        raise PeerFailedError(f"{whose} failed; its message is above")
    return Outcome("complete" if status == 0 else "interrupted", step, status, None, folder)
