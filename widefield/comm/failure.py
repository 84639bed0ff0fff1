"""A rank fails: how do the others hear of it, and of what?

An error on one rank alone leaves the others waiting for its messages.  So it tells the store that the ranks met at, before it
gives anything up, and a thread on each rank looks there five times a second, over a connection of its own.  The first to tell
is the culprit: whatever else fails now fails upon that.  What the others raise names it and says why.

A rank whose main thread waits for a message comes back when the culprit closes its connections; NCCL's waits are aborted.  One
that does not come back is ended.  A problem that ranks find out together (AgreedError) needs none of this.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from widefield.comm.devices import passes_the_host
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.stall_watch import TORCH, line_in_words, place_of
from widefield.private_torch.process_groups import abort, c10d_world, get_default_store
from widefield.refusal import FOLLOWED, is_ours

POLL_SECONDS = 0.2
HEARD_SECONDS = 1.0
"""How long a rank that failed waits for the others to have heard of it before it goes."""
LEAVE_SECONDS = 10.0
"""How long a rank that has heard of a failure may take to come back from what it is at."""
MOST = 4000
"""Characters of an error that are told."""
_FAILED, _HEARD, _STOP = "failed", "heard", "stop"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out waiting")
"""What gloo and NCCL say where a peer is gone."""
_watches = itertools.count()


class PeerFailedError(RuntimeError):
    """Another rank failed, or is gone; the text names it and says why."""


class FailureWatch:
    """Ends all ranks where one fails: `with FailureWatch(mesh) as watch:` around what they do together, on every rank.

    An error that leaves the block on one rank alone becomes a PeerFailedError on the others; its own goes on as it is.  An
    AgreedError passes, for all are raising it.  On one rank this does nothing.
    stuck: called from a thread with the text, where the main thread does not come back and the process is about to end.
    """

    def __init__(self, mesh: Mesh, *, stuck: Callable[[str], None] = lambda text: None) -> None:
        self.stuck, self.stops = stuck, False
        """`stops`: whether some rank has asked all to come to an agreement soon."""
        self._mesh, self._main = mesh, threading.main_thread().ident
        self._over = threading.Event()
        self._words: str | None = None
        """Of another rank's failure, once it is known."""
        self._told = False
        self._thread: threading.Thread | None = None
        if mesh.group is not None:
            number = next(_watches)  # ranks make as many, so a failure that was told before is not taken for a new one
            self._store = dist.PrefixStore(f"widefield/failure/{number}", get_default_store().clone())
            self._thread = threading.Thread(target=self._watch, name="widefield failure watch", daemon=True)

    def __enter__(self) -> FailureWatch:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        try:
            raised = None if error is None else self.tell(error)
            if raised is not error and raised is not None:
                raise raised from error
            if self._told:
                self._wait_until_heard()
        finally:
            self._over.set()
            if self._thread is not None:
                self._thread.join(1.0)  # it is a daemon; a store that is gone may keep it longer
        return False

    def tell(self, error: BaseException) -> BaseException:
        """Tell the others of an error on this rank; what it is to raise: the error, or that another rank failed first."""
        if self._thread is None or self._told or isinstance(error, (AgreedError, PeerFailedError)):
            return error
        lost = _is_of_a_lost_peer(error)
        words = _lost_in_words(error) if lost else in_words(error)
        if self._words is None:  # whoever failed has told before its connections were closed
            self._words = self._first_to_tell(words)
        if self._words is not None:
            return PeerFailedError(self._words)
        self._told = True
        return PeerFailedError(f"rank {self._mesh.rank} {words}") if lost else error

    def ask_to_stop(self) -> None:
        """Ask every rank to come to the next agreement soon: there is a problem to agree on."""
        self.stops = True
        if self._thread is not None:
            self._store.set(_STOP, "1")

    # ------------------------------------------------------------------------------------------ the store

    def _first_to_tell(self, words: str) -> str | None:
        """Be the first to tell of a failure, or get the words of the rank that was."""
        mine = json.dumps({"rank": self._mesh.rank, "text": words[:MOST]})
        try:
            return self._words_of(self._store.compare_set(_FAILED, "", mine))
        except RuntimeError:  # the store went with the process that held it
            return None

    def _words_of(self, found: bytes) -> str | None:
        """`rank 1 failed: ...`; None for this rank's own."""
        told = json.loads(found)
        return None if told["rank"] == self._mesh.rank else f"rank {told['rank']} {told['text']}"

    def _wait_until_heard(self) -> None:
        """Leave the store and the connections open until the others know; a rank that is busy hears by its thread."""
        deadline = time.monotonic() + HEARD_SECONDS
        while time.monotonic() < deadline:
            try:
                if self._store.add(_HEARD, 0) >= self._mesh.size - 1:
                    return
            except RuntimeError:
                return
            time.sleep(POLL_SECONDS / 10)

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            try:
                self.stops = self.stops or self._store.check([_STOP])
                if self._store.check([_FAILED]):
                    words = self._words_of(self._store.get(_FAILED))
                    if words is not None:
                        self._store.add(_HEARD, 1)
                        self._hear(words)
                    return
            except RuntimeError:
                return  # the store is gone with the process that held it: whoever waits for that process finds out

    def _hear(self, words: str) -> None:
        self._words = words
        if self._mesh.device.type == "cuda":
            _abort_nccl(self._mesh.device)
        if self._over.wait(LEAVE_SECONDS):
            return
        place = place_of(sys._current_frames().get(self._main or 0))
        self.stuck(words)
        print(
            f"widefield: rank {self._mesh.rank}: {words}\nwidefield: rank {self._mesh.rank} did not come back from {place} "
            f"within {LEAVE_SECONDS:.0f} s and is ended",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FOLLOWED)


def _abort_nccl(device: torch.device) -> None:
    """End what this rank waits for on its GPU; gloo's waits end as the culprit's connections close."""
    for group in list(c10d_world.pg_map):
        if passes_the_host(group, device):
            continue
        try:
            abort(group, device)
        except RuntimeError:  # a group without GPUs, or one that is gone
            continue


# ---------------------------------------------------------------------------------------------- in words


def in_words(error: BaseException) -> str:
    """`failed: KeyError: 'x' (at net.py:12 in forward)`; of what widefield itself says, `failed: ` and its words."""
    cause = cause_of(error)
    if isinstance(cause, (ValueError, NotImplementedError)) and is_ours(cause):
        return f"failed: {cause}"
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
    own = [(code, line) for code, line in lines if not code.co_filename.startswith(TORCH)] or lines
    where = f" (at {line_in_words(*own[-1])})" if own else ""
    return f"failed: {type(cause).__name__}: {str(cause).strip()}{where}"


def cause_of(error: BaseException) -> BaseException:
    """The error that others were raised from."""
    passed = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in passed:
        error = error.__cause__
        passed.add(id(error))
    return error


def _is_of_a_lost_peer(error: BaseException) -> bool:
    cause = cause_of(error)
    told = isinstance(cause, dist.DistError) or any(text in str(cause) for text in _LOST)
    return isinstance(cause, RuntimeError) and told


def _lost_in_words(error: BaseException) -> str:
    said = re.sub(r"^\[\S*\] ", "", str(cause_of(error))).split(". This is typically", maxsplit=1)[0]
    return (
        f"lost another rank, which has said nothing ({said}); it was killed, or its machine or the network is down: "
        "see what its launcher and its system's log say"
    )
