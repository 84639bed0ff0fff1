"""Checkpoints that survive a crash: written to a temporary folder, hashed, synced, and then renamed.

Every rank writes some of the tensors while training goes on (tensors.py); plain values go into JSON.  checkpoint_directory.py
describes the files and manifest.py the hashes.  Reading a checkpoint cannot run code.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from widefield.comm.mesh import Mesh
from widefield.training import checkpoint_directory, manifest, tree_json
from widefield.training import tensors as files
from widefield.training.checkpoint_directory import ABOUT, PLAIN, About, Found, Warn, newest_sound_in
from widefield.training.disk import free_bytes, reason_of
from widefield.training.staging import Changes, Staging, Trust, address_of, copied

T = TypeVar("T")
__all__ = ["About", "Checkpoints", "Found", "newest_sound_in", "read"]


@dataclass(frozen=True)
class _Staged:
    """One rank's part of a save, copied, so that training may go on while it is written."""

    about: About
    tensors: Staging
    texts: dict[str, str] = field(default_factory=dict)


class _Failed(ValueError):
    """Saving failed on some rank; the text is the same on every rank."""


class Checkpoints:
    """The checkpoints of a run.  Every rank calls every method, in the same order.

    folder: one that all ranks share.  The constructor removes what a killed run left there half written.
    keep_last, keep_best: how many are kept, the newest and the best by `About.metric`; the one just saved is always kept.
    background: write in a thread while training goes on.
    warn: called on rank 0 only, possibly from that thread.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, *, keep_last: int, keep_best: int, background: bool = True, warn: Warn
    ) -> None:
        self.folder = Path(folder)
        self.failure: str | None = None
        """Why the last save failed; None where it did not.  Look after `wait`."""
        self._mesh, self._background = mesh, background
        self._keep_last, self._keep_best = keep_last, keep_best
        self._warn: Warn = warn if mesh.is_main else _say_nothing
        self._thread: threading.Thread | None = None
        self._staging: Staging | None = None
        self._trust = Trust()
        mesh.agree(_problem_of(lambda: checkpoint_directory.clean(self.folder)) if mesh.is_main else None)

    def save(
        self,
        state: dict,
        about: About,
        *,
        own: dict | None = None,
        wait: bool = False,
        changes: Changes | None = None,
    ) -> None:
        """Save `state`, the same on all ranks, and `own`, which differs between ranks; first wait for an unfinished save.

        Leaves are tensors on any device, int, float, str, bool and None, in dicts, lists and tuples.
        changes: when the tensors of `state` change; None: at any time.  Call `wait_until_copied` before those change that it
            calls steady.
        Cost: before this returns, a copy of all tensors to the CPU's memory, but for steady ones on the CPU from the second
            save on; with `wait`, or without background, the write too.
        A save that fails (a full disk) warns and sets `failure`; older checkpoints stay.  One of the same step is replaced.
        ValueError, on every rank and before anything is written: a leaf of another type, on any rank.
        """
        self.wait()
        taken: list[_Staged] = []
        wait = wait or not self._background
        problem = _problem_of(lambda: taken.append(self._staged(state, about, own, changes, wait=wait)))
        self._mesh.agree(problem)
        self._staging = taken[0].tensors
        # A daemon thread: a rank whose peer died must be able to exit; a half-written checkpoint has no valid name.
        self._thread = threading.Thread(target=self._write, args=taken, name="checkpoint", daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait_until_copied(self) -> None:
        """Return when an unfinished save has copied all steady tensors; call it before they change."""
        if self._staging is not None:
            self._staging.done_copying.wait()
            self._staging = None
        changed = self._trust.compare()
        if changed is not None:
            self._warn(
                f"{changed} changed between two updates, so every save copies all tensors before training goes on; that is "
                "as safe, and takes longer"
            )

    def wait(self) -> None:
        """Return when no save is unfinished; call it before the process ends.  Never raises: see `failure`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def busy(self) -> bool:
        """Whether a save is unfinished on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def newest_sound(self) -> Found | None:
        """The newest checkpoint whose hashes are right, the same on every rank; None where there is none.

        Rank 0 reads all of its files, and warns of each newer checkpoint that is damaged.
        """
        self.wait()
        return self._together(lambda: newest_sound_in(self.folder, warn=self._warn) if self._mesh.is_main else None)[0]

    def load(
        self, found: Found, *, model: Mapping[str, Sequence[int]] | None = None, unread: bool = False
    ) -> tuple[dict, dict | None]:
        """(state, own) of a checkpoint; see `read`.  An error on one rank is a ValueError on all."""
        self.wait()
        loaded: list[tuple[dict, dict | None]] = []

        def work() -> None:
            loaded.append(read(found, rank=self._mesh.rank, ranks=self._mesh.size, model=model, unread=unread))

        self._mesh.agree(_problem_of(work))
        return loaded[0]

    def own_of_first(self, found: Found) -> dict | None:
        """What rank 0 saved of its own; None where it saved none.  An error on one rank is a ValueError on all."""
        loaded: list[dict | None] = []
        self._mesh.agree(_problem_of(lambda: loaded.append(read(found, unread=True)[1])))
        return loaded[0]

    # ------------------------------------------------------------------------------------------ writing

    def _staged(self, state: dict, about: About, own: dict | None, changes: Changes | None, *, wait: bool) -> _Staged:
        """This rank's part of a save, with copies of what may change before it is copied or written."""
        mine, texts, further = _flattened(state, about, own, self._mesh.rank)
        on_cpu = {name: tensor for name, tensor in mine.items() if tensor.device.type == "cpu"}
        if changes is None or not on_cpu:
            return _Staged(about, Staging(copied(mine | further)), texts)
        never = {name: tensor for name, tensor in on_cpu.items() if wait or address_of(tensor) not in changes.live}
        steady = {name: on_cpu[name] for name in on_cpu.keys() - never.keys() if address_of(on_cpu[name]) in changes.steady}
        later = steady if self._trust.is_earned else {}
        now = copied({name: mine[name] for name in mine.keys() - never.keys() - later.keys()} | further)
        if self._trust.is_earned is None and steady:
            self._trust.look_at(steady, now)
        return _Staged(about, Staging(never | now, later), texts)

    def _write(self, staged: _Staged) -> None:
        """The thread's function: save on every rank or on none."""
        needed = sum(staged.tensors.sizes.values())
        try:
            self._write_and_seal(staged)
            self.failure = None
        except Exception as error:  # a full disk, a dead peer: training goes on
            self.failure = self._give_up(staged.about.step, needed, error)
            self._warn(self.failure)
        finally:
            staged.tensors.done_copying.set()

    def _write_and_seal(self, staged: _Staged) -> None:
        """Every step is finished on all ranks before any rank begins the next; an error on one rank stops all."""
        partial = checkpoint_directory.partial_of(self.folder, staged.about.step)
        rank, main = self._mesh.rank, self._mesh.is_main
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)  # a new thread begins on GPU 0, and would claim memory there
        names = files.assign_writers(self._together(lambda: staged.tensors.sizes))[rank]
        self._together(lambda: staged.tensors.copy(set(names)))
        self._together(lambda: checkpoint_directory.make_anew(partial) if main else None)
        self._together(lambda: _write_texts(partial, staged.texts))
        self._write_tensors(partial, {name: staged.tensors.tensors[name] for name in names})
        hashes = self._together(lambda: _sync_and_hash(partial, rank))
        self._together(lambda: checkpoint_directory.make_current(partial, _union(hashes)) if main else None)
        if main:
            checkpoint_directory.prune(
                self.folder, step=staged.about.step, last=self._keep_last, best=self._keep_best, warn=self._warn
            )

    def _write_tensors(self, partial: Path, tensors: dict[str, Tensor]) -> None:
        """Write this rank's tensors, then, on rank 0, the index of all."""
        entries = self._together(lambda: files.write(partial, self._mesh.rank, tensors))
        self._together(lambda: files.write_index(partial, _union(entries)) if self._mesh.is_main else None)

    def _give_up(self, step: int, needed: int, error: Exception) -> str:
        """Remove what a failed save wrote; returns the warning.  needed: the bytes of this rank's tensors."""
        if self._mesh.is_main:
            shutil.rmtree(checkpoint_directory.partial_of(self.folder, step), ignore_errors=True)
        before = checkpoint_directory.steps_in(self.folder)
        current = f"{before[-1].name} stays the newest" if before else "there is none before it"
        return (
            f"the checkpoint of step {step} was not saved: {reason_of(error)}. It takes {needed:,} bytes and "
            f"{free_bytes(self.folder):,} are free in {self.folder}; {current}. Training goes on and saves again at the "
            "next time; until then free some space there, or see to the disk"
        )

    # ------------------------------------------------------------------------------------------ agreeing

    def _together(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on all ranks, in rank order; _Failed on all ranks where it fails on any.

        It uses a process group of its own, so that the thread's messages do not mix with those of training.
        """
        results: list[T] = []
        problem = _problem_of(lambda: results.append(work()))
        outcomes = [(problem, results)]
        if self._mesh.checkpoint_group is not None:
            outcomes *= self._mesh.size
            dist.all_gather_object(outcomes, (problem, results), group=self._mesh.checkpoint_group)
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise _Failed(f"rank {rank}: {text}" if self._mesh.size > 1 else text)
        return [given[0] for _, given in outcomes]


# ---------------------------------------------------------------------------------------------- reading


def read(
    found: Found,
    *,
    rank: int = 0,
    ranks: int | None = None,
    model: Mapping[str, Sequence[int]] | None = None,
    unread: bool = False,
) -> tuple[dict, dict | None]:
    """(state, own) as they were saved, with full tensors on the CPU.

    own: of `rank`; None where it saved none, or where another number of ranks than `ranks` saved.
    model: the names and shapes that the state must have.  ValueError: they differ, or the files are not widefield's.
    unread: the tensors of the state are UnreadTensors, so that nobody holds them all.
    """
    if model is not None:
        checkpoint_directory.check_model(found, model)
    place, own_name = found.folder, _own_name(rank)
    names = [PLAIN]
    if ranks in (None, found.about.ranks) and (place / own_name).is_file():
        names.append(own_name)
    try:
        texts = [(place / name).read_text(encoding="utf-8") for name in names]
        values = []
        for name, text in zip(names, texts, strict=True):
            tensors_of = files.unread if unread and name == PLAIN else files.read
            values.append(tree_json.from_json(text, tensors_of(place, tree_json.tensors_in(text))))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, RuntimeError) as error:
        raise ValueError(not_ours(found, error)) from None
    return values[0], values[1] if len(values) > 1 else None


def not_ours(found: Found, error: Exception) -> str:
    """What to say of a sound checkpoint whose files cannot be read."""
    return (
        f"the checkpoint {found.folder} is as its hashes say, and not what widefield writes: {error or type(error).__name__}. "
        "Somebody else made or changed it; take it from where it was written, or delete it"
    )


# ---------------------------------------------------------------------------------------------- one rank's work


def _flattened(
    state: dict, about: About, own: dict | None, rank: int
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Tensor]]:
    """The tensors of `state` that are here, this rank's texts, and the tensors of `own`; rank 0 has the texts of `state`."""
    plain, tensors = tree_json.to_json(state)
    texts, further = dict[str, str](), dict[str, Tensor]()
    if rank == 0:
        texts = {PLAIN: plain, ABOUT: tree_json.to_json(dataclasses.asdict(about))[0]}
    if own is not None:
        own_name = _own_name(rank)
        texts[own_name], further = tree_json.to_json(own, name=f"own_{rank}", taken=tensors)
    files.check(tensors | further)
    return tensors, texts, further


def _write_texts(partial: Path, texts: Mapping[str, str]) -> None:
    if not partial.is_dir():
        raise FileNotFoundError(f"{partial}, which rank 0 made, is not seen here; name a run folder that all machines share")
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")


def _sync_and_hash(partial: Path, rank: int) -> dict[str, str]:
    """Sync the files that this rank wrote to the disk; returns their hashes."""
    mine = [files.file_of(rank), _own_name(rank), *[PLAIN, ABOUT, files.INDEX] * (rank == 0)]
    names = sorted(name for name in mine if (partial / name).is_file())
    for name in names:
        manifest.sync(partial / name)
    return manifest.hashes_of(partial, names)


def _own_name(rank: int) -> str:
    return f"own_{rank}.json"


def _problem_of(work: Callable[[], Any]) -> str | None:
    """Call `work`; returns its error as text, or None."""
    try:
        work()
    except Exception as error:
        return reason_of(error)
    return None


def _union(parts: Sequence[dict[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}


def _say_nothing(text: str) -> None:
    """The `warn` of ranks other than 0."""
