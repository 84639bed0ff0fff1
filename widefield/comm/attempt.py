"""Work that a rank may give up in the middle, as where its memory is full, without an end of the run.

The other ranks would wait for its messages.  So the work has process groups of its own.  A rank that gives up says so in the
rendezvous store, and closes those groups.  Then the waits of the others fail, and they find in the store why.  The groups of
the run, in which all ranks meet afterwards, are untouched.  A gloo wait fails where the peer's connections close; NCCL's are
aborted here, by a thread that reads the store.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from widefield.comm.devices import passes_the_host
from widefield.comm.failure import POLL_SECONDS, abort_nccl
from widefield.comm.mesh import AgreedError, Mesh, apart, leave
from widefield.private_torch.process_groups import get_default_store

T = TypeVar("T")
_GIVEN_UP = "given up"
"""A key of the store."""
_attempts = itertools.count()


def attempt(
    mesh: Mesh, work: Callable[[Mesh], T], *, gives_up: Callable[[Exception], str | None]
) -> tuple[list[T], str | None]:
    """`work` with a mesh like this one: what it returns on every rank, in rank order; or [] and the reason of one that gave up.

    Every rank calls it.  work: it must leave nothing behind that has the mesh, whose groups end with it.
    gives_up: of an error of `work`, why this rank gives up; None, and the error is raised.
    """
    if mesh.group is None:
        result, problem = _tried(mesh, work, gives_up, dist.HashStore())
        return ([] if problem is not None else [result]), problem  # type: ignore[list-item]
    store = dist.PrefixStore(f"widefield/attempt/{next(_attempts)}", get_default_store().clone())
    own = apart(mesh)
    with _aborted_when_given_up(own, store):
        result, problem = _tried(own, work, gives_up, store)
    if problem is not None and own.device.type == "cuda":
        abort_nccl(own.device, own.made)
    gc.collect()
    leave(own)
    del own
    gc.collect()  # connections close with the last reference to their group
    told = mesh.gather_objects((result, problem))
    first = next((problem for _, problem in told if problem), None)
    return ([result for result, _ in told] if first is None else []), first


def _tried(
    mesh: Mesh, work: Callable[[Mesh], T], gives_up: Callable[[Exception], str | None], store: dist.Store
) -> tuple[T | None, str | None]:
    """What `work` returns, or why this rank gives up; "" where another rank did."""
    try:
        return work(mesh), None
    except Exception as error:
        if store.check([_GIVEN_UP]):
            return None, ""
        problem = gives_up(error)
        if problem is None:
            if isinstance(error, AgreedError) and mesh.group is not None:
                leave(mesh)
            raise
        store.set(_GIVEN_UP, "1")
        return None, problem


@contextlib.contextmanager
def _aborted_when_given_up(mesh: Mesh, store: dist.Store) -> Iterator[None]:
    """Inside, the NCCL collectives of `mesh` are aborted when a rank gives up."""
    if mesh.device.type != "cuda" or passes_the_host(mesh.group, mesh.device):
        yield
        return
    over, copied = threading.Event(), store.clone()

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            if copied.check([_GIVEN_UP]):
                abort_nccl(mesh.device, mesh.made)
                return

    thread = threading.Thread(target=watch, name="widefield attempt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
