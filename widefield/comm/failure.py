"""An error on one rank ends the run on all ranks, and every rank says which rank failed and why.

An error on one rank leaves the others waiting for its messages.  So the rank first writes the error to the rendezvous store,
before it closes anything.  On each rank a thread reads the store five times a second, over a connection of its own.  The first
report counts: later errors on other ranks are its consequences.  The other ranks raise an error that names that rank and
its reason.

A rank that waits for a gloo message gets an error when the failed rank closes its connections; NCCL's waits are aborted here.
A rank whose main thread still does not return is ended.  A problem that all ranks raise together (AgreedError) needs no report.

A run that hangs has no rank that fails.  All ranks but the first leave at once then, which ends the waits of that one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from widefield.comm.devices import passes_the_host
from widefield.comm.fingerprints import RanksDifferError
from widefield.comm.keepalive import asking_whether_alive
from widefield.comm.mesh import AgreedError, Mesh
from widefield.comm.stand import TORCH, frames_of_threads, line_in_words, place_of
from widefield.private_torch.process_groups import abort, c10d_world, get_default_store
from widefield.refusal import FOLLOWED, is_ours

POLL_SECONDS = 0.2
HEARD_SECONDS = 1.0
"""How long a failed rank waits for the others to read its report before it exits."""
LEAVE_SECONDS = 10.0
"""How long the main thread of a rank may take to leave the watched block after another rank's report was read."""
HUNG_LEAVE_SECONDS = 1.0
"""The same of rank 0 where the run is ended because it hangs; the others leave before, and so end its waits."""
MOST = 4000
"""Characters of an error that are reported."""
_FAILED, _HEARD, _STOP = "failed", "heard", "stop"
"""Keys of the store."""
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out waiting",
    "Connection timed out", "No route to host",
)  # fmt: skip
"""Texts in errors of gloo and NCCL where a peer is gone."""
NOBODY = -1
"""In place of the reporting rank where the run hangs: every rank hears of it, the one that found it out too."""
_watches = itertools.count()


class PeerFailedError(RuntimeError):
    """Another rank failed or is lost; the text says which, where that is known, and why.  status: that this rank exits with."""

    status = FOLLOWED


class CulpritError(PeerFailedError):
    """The ranks cannot go on because of this one, as another rank has found out; the text says why."""

    status = 1


class FailureWatch:
    """Ends all ranks if one fails: every rank runs the joint work in `with FailureWatch(mesh) as watch:`.

    An error that leaves the block on one rank is raised there unchanged, and becomes a PeerFailedError on the others.  An
    AgreedError is raised as it is, since all ranks raise it.  On a single rank the watch does nothing.
    stuck: called from a thread with the text when the main thread does not leave the block and the process is about to end.
    evidence: asked when a rank was lost, in what this rank's messages differ from what they were; "" where they do not.
    """

    def __init__(self, mesh: Mesh, *, stuck: Callable[[str], None] = lambda text: None) -> None:
        self.stuck, self.stops = stuck, False
        self.evidence: Callable[[], str] = lambda: ""
        """`stops`: whether a rank has called `ask_to_stop`."""
        self._mesh, self._main = mesh, threading.main_thread().ident
        self._over = threading.Event()
        self._peer_failure: str | None = None
        """The text of another rank's failure, or of why the run hangs, once it is known."""
        self._culprits: list[int] = []
        """The ranks because of which it hangs, or because of which messages did not fit."""
        self._has_reported = False
        self._thread: threading.Thread | None = None
        if mesh.group is not None:
            number = next(_watches)  # the same on every rank; an earlier watch's report is not taken for a new one
            with asking_whether_alive():
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
            raised = None if error is None else self.report(error)
            if raised is not error and raised is not None:
                raise raised from error
            if self._has_reported:
                self._wait_until_heard()
        finally:
            self._over.set()
            if self._thread is not None:
                self._thread.join(1.0)  # it is a daemon; a store that is gone may keep it longer
        return False

    def report(self, error: BaseException) -> BaseException:
        """Report an error on this rank to the others.  Returns what to raise here: `error`, or PeerFailedError.

        PeerFailedError where another rank reported first, or where `error` only says that a connection to a rank was lost.
        """
        if self._thread is None or self._has_reported or isinstance(error, (AgreedError, PeerFailedError)):
            return error
        text, culprits, lost = self._as_report(error)
        if self._peer_failure is None:  # a failed rank reports before its connections are closed
            self._peer_failure = self._report_first(text, culprits)
        if self._peer_failure is not None:
            return self._of_peers(self._peer_failure)
        self._has_reported = True
        self._culprits = culprits
        return self._of_peers(text if culprits else f"rank {self._mesh.rank} {text}") if lost or culprits else error

    def _as_report(self, error: BaseException) -> tuple[str, list[int], bool]:
        """What to report of an error, the ranks to blame where they are known, and whether it says that a rank was lost."""
        cause = cause_of(error)
        if isinstance(cause, RanksDifferError):
            return str(cause), cause.culprits, False
        if not _is_of_a_lost_peer(error):
            return in_words(error), [], False
        odd = self.evidence()
        return _lost_in_words(error) + (f". Or this rank sent what the other did not expect: {odd}" if odd else ""), [], True

    def _of_peers(self, text: str) -> PeerFailedError:
        return CulpritError(text) if self._mesh.rank in self._culprits else PeerFailedError(text)

    def end(self, text: str, culprits: Sequence[int]) -> None:
        """End the run on all ranks, this one included, since it hangs.  Any thread may call it.

        text: a sentence that names the ranks that the others wait for, which are the culprits.
        """
        if self._thread is None:
            return
        try:
            answer = Future[Any]()
            threading.Thread(target=self._write_first, args=(text, culprits, answer), daemon=True).start()
            answer.result(HEARD_SECONDS)
        except (RuntimeError, TimeoutError):  # nobody can be told: the store is gone, or does not answer
            self._culprits = list(culprits)
            self._hear(text, hangs=True)

    def _write_first(self, text: str, culprits: Sequence[int], answer: Future[Any]) -> None:
        try:
            report = json.dumps({"rank": NOBODY, "text": text[:MOST], "culprits": list(culprits)})
            answer.set_result(self._store.compare_set(_FAILED, "", report))
        except RuntimeError as error:
            answer.set_exception(error)

    def ask_to_stop(self) -> None:
        """Set `stops` on every rank: there is a problem to agree on (Mesh.agree)."""
        self.stops = True
        if self._thread is not None:
            self._store.set(_STOP, "1")

    # ------------------------------------------------------------------------------------------ the store

    def _report_first(self, text: str, culprits: Sequence[int]) -> str | None:
        """Write this rank's report unless there is one; the report of the rank that was first, None if that is this rank."""
        mine = json.dumps({"rank": self._mesh.rank, "text": text[:MOST], "culprits": list(culprits)})
        try:
            return self._text_of(self._store.compare_set(_FAILED, "", mine))
        except RuntimeError:  # the process that serves the store has ended
            return None

    def _text_of(self, found: bytes) -> str | None:
        """`rank 1 failed: ...`; None for this rank's own report."""
        report = json.loads(found)
        if report["rank"] == self._mesh.rank:
            return None
        self._culprits = report["culprits"]
        return report["text"] if self._culprits or report["rank"] == NOBODY else f"rank {report['rank']} {report['text']}"

    def _wait_until_heard(self) -> None:
        """Keep the store and the connections open until the other ranks' threads have read the report."""
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
                    found = self._store.get(_FAILED)
                    text = self._text_of(found)
                    if text is not None:
                        self._store.add(_HEARD, 1)
                        self._hear(text, hangs=json.loads(found)["rank"] == NOBODY)
                    return
            except RuntimeError:
                return  # the process that serves the store has ended: a rank that waits for that process gets an error

    def _hear(self, text: str, *, hangs: bool) -> None:
        self._peer_failure = text
        if self._mesh.device.type == "cuda":
            abort_nccl(self._mesh.device, list(c10d_world.pg_map))
        leave_seconds = LEAVE_SECONDS if not hangs else HUNG_LEAVE_SECONDS if self._mesh.is_main else 0.0
        if self._over.wait(leave_seconds):
            return
        place = place_of(frames_of_threads().get(self._main or 0))
        with contextlib.suppress(Exception):  # the main thread may just be closing what this writes to; the end must come
            self.stuck(text)
        print(
            f"widefield: rank {self._mesh.rank}: {text}\nwidefield: rank {self._mesh.rank} did not come back from {place} "
            f"within {leave_seconds:.0f} s and is ended"
            if leave_seconds
            else f"widefield: rank {self._mesh.rank}: {text}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(self._of_peers(text).status)


def abort_nccl(device: torch.device, groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort this rank's NCCL collectives in `groups`; gloo's waits end when the failed rank's connections close."""
    for group in groups:
        if passes_the_host(group, device):
            continue
        try:
            abort(group, device)
        except RuntimeError:  # a group without NCCL, or a destroyed one
            continue


# ---------------------------------------------------------------------------------------------- in words


def in_words(error: BaseException) -> str:
    """`failed: KeyError: 'x' (at net.py:12 in forward)`; for errors that widefield itself raises, `failed: ` and the text."""
    cause = cause_of(error)
    if isinstance(cause, (ValueError, NotImplementedError)) and is_ours(cause):
        return f"failed: {cause}"
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
    own = [(code, line) for code, line in lines if not code.co_filename.startswith(TORCH)] or lines
    where = f" (at {line_in_words(*own[-1])})" if own else ""
    return f"failed: {type(cause).__name__}: {str(cause).strip()}{where}"


def cause_of(error: BaseException) -> BaseException:
    """The first error of a chain of `raise ... from ...` that says something: a queue's `Empty` has no words."""
    passed, found = {id(error)}, error
    while error.__cause__ is not None and id(error.__cause__) not in passed:
        error = error.__cause__
        passed.add(id(error))
        found = error if str(error).strip() else found
    return found


def _is_of_a_lost_peer(error: BaseException) -> bool:
    cause = cause_of(error)
    is_connection = isinstance(cause, dist.DistError) or any(text in str(cause) for text in _LOST)
    return isinstance(cause, RuntimeError) and is_connection


def _lost_in_words(error: BaseException) -> str:
    message = re.sub(r"^\[\S*\] ", "", str(cause_of(error))).split(". This is typically", maxsplit=1)[0]
    return (
        f"lost another rank, which reported no error ({message}); it was killed, or its machine or the network is down: "
        "see what its launcher and its system's log say"
    )
