"""What survives a crash?  Checkpoints: written beside, hashed, synced, renamed, and only then current.

Every rank writes its share of the tensors while training goes on, as tensors.py says.  Plain values go into JSON.
checkpoint_directory.py says what is on the disk and manifest.py how a flipped bit is found.  Nothing that is read here can run
code.
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

T = TypeVar("T")
__all__ = ["About", "Checkpoints", "Found", "newest_sound_in", "read"]


@dataclass(frozen=True)
class _Staged:
    """One rank's part of a save, copied, so that training may change everything it came from."""

    about: About
    tensors: dict[str, Tensor]
    texts: dict[str, str] = field(default_factory=dict)


class _Failed(ValueError):
    """What some rank could not do; the text is the same on every rank."""


class Checkpoints:
    """The checkpoints of a run.  Every rank calls every method, in the same order.

    folder: one that all ranks share.  Making this removes what a killed run left half done there.
    keep_last, keep_best: how many stay, newest first and by `About.metric`; the one just saved always stays.
    background: write in a thread while training goes on.
    warn: called on rank 0 alone, maybe from that thread.
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
        mesh.agree(_problem_of(lambda: checkpoint_directory.clean(self.folder)) if mesh.is_main else None)

    def save(self, state: dict, about: About, *, own: dict | None = None, wait: bool = False) -> None:
        """Save `state`, equal on all ranks, and `own`, this rank's alone; wait first for a save that is in flight.

        Leaves are tensors on any device, int, float, str, bool and None, in dicts, lists and tuples.
        Cost: a copy of all tensors to memory before this returns; with wait, or no background, the whole write.
        A save that fails (a full disk) warns, sets `failure` and loses nothing.  A checkpoint of the same step is replaced.
        ValueError, on every rank and before anything is written, where a leaf on any rank is of another kind.
        """
        self.wait()
        taken: list[_Staged] = []
        problem = _problem_of(lambda: taken.append(_stage(state, about, own, self._mesh.rank)))
        self._mesh.agree(problem)
        # A daemon: a rank whose peer died must be able to end; what it leaves half done is never current.
        self._thread = threading.Thread(target=self._write, args=taken, name="checkpoint", daemon=True)
        self._thread.start()
        if wait or not self._background:
            self.wait()

    def wait(self) -> None:
        """Return once no save is in flight; call it before the process ends.  Never raises: see `failure`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def newest_sound(self) -> Found | None:
        """The newest checkpoint whose every byte is as written, the same on every rank; a warning for each passed over.

        Rank 0 reads all files of it.  None where there is none.
        """
        self.wait()
        return self._together(lambda: newest_sound_in(self.folder, warn=self._warn) if self._mesh.is_main else None)[0]

    def load(self, found: Found, *, model: Mapping[str, Sequence[int]] | None = None) -> tuple[dict, dict | None]:
        """(state, own) of a checkpoint; see `read`.  What fails on one rank is a ValueError on all of them."""
        self.wait()
        loaded: list[tuple[dict, dict | None]] = []

        def work() -> None:
            loaded.append(read(found, rank=self._mesh.rank, ranks=self._mesh.size, model=model))

        self._mesh.agree(_problem_of(work))
        return loaded[0]

    # ------------------------------------------------------------------------------------------ writing

    def _write(self, staged: _Staged) -> None:
        """Save on every rank or on none; the thread's whole life."""
        try:
            self._write_and_seal(staged)
            self.failure = None
        except Exception as error:  # a full disk, a dead peer: training goes on
            self.failure = self._give_up(staged, error)
            self._warn(self.failure)

    def _write_and_seal(self, staged: _Staged) -> None:
        """Each line is done by all ranks before any begins the next; a failure on one ends it on all."""
        partial = checkpoint_directory.partial_of(self.folder, staged.about.step)
        rank, main = self._mesh.rank, self._mesh.is_main
        if self._mesh.device.type == "cuda":
            torch.cuda.set_device(self._mesh.device)  # a new thread begins on GPU 0, and would claim memory there
        self._together(lambda: checkpoint_directory.make_anew(partial) if main else None)
        self._together(lambda: _write_texts(partial, staged.texts))
        self._write_tensors(partial, staged.tensors)
        hashes = self._together(lambda: _sync_and_hash(partial, rank))
        self._together(lambda: checkpoint_directory.make_current(partial, _union(hashes)) if main else None)
        if main:
            checkpoint_directory.prune(
                self.folder, step=staged.about.step, last=self._keep_last, best=self._keep_best, warn=self._warn
            )

    def _write_tensors(self, partial: Path, tensors: dict[str, Tensor]) -> None:
        """Each tensor by one of the ranks that have it, and then the index of all of them."""
        held = self._together(lambda: {name: tensor.nbytes for name, tensor in tensors.items()})
        mine = files.dealt(held)[self._mesh.rank]
        entries = self._together(lambda: files.write(partial, self._mesh.rank, {name: tensors[name] for name in mine}))
        self._together(lambda: files.write_index(partial, _union(entries)) if self._mesh.is_main else None)

    def _give_up(self, staged: _Staged, error: Exception) -> str:
        """Remove what a failed save wrote; the text of the failure."""
        if self._mesh.is_main:
            shutil.rmtree(checkpoint_directory.partial_of(self.folder, staged.about.step), ignore_errors=True)
        needed = sum(tensor.nbytes for tensor in staged.tensors.values())
        before = checkpoint_directory.steps_in(self.folder)
        current = f"{before[-1].name} stays the newest" if before else "there is none before it"
        return (
            f"the checkpoint of step {staged.about.step} was not saved: {reason_of(error)}. It takes {needed:,} bytes and "
            f"{free_bytes(self.folder):,} are free in {self.folder}; {current}. Training goes on and saves again at the "
            "next time; until then free some space there, or see to the disk"
        )

    # ------------------------------------------------------------------------------------------ agreeing

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result of `work`, on every rank; _Failed on all of them where it fails on any.

        Over a process group of its own, so that the thread's messages never mix with training's.
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
    found: Found, *, rank: int = 0, ranks: int | None = None, model: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict, dict | None]:
    """(state, own): what was saved, in its nesting, every tensor whole and on the CPU.

    own is what `rank` saved as its own; None where it saved none, or where `ranks` is not the number that saved.
    model: names and shapes that the state must fit; ValueError names those that differ.
    """
    if model is not None:
        checkpoint_directory.check_model(found, model)
    place, own_name = found.folder, _own_name(rank)
    names = [PLAIN]
    if ranks in (None, found.about.ranks) and (place / own_name).is_file():
        names.append(own_name)
    try:
        texts = [(place / name).read_text(encoding="utf-8") for name in names]
        strides = {name: stride for text in texts for name, stride in tree_json.tensors_in(text).items()}
        tensors = files.read(place, strides)
        values = [tree_json.put_together(text, tensors) for text in texts]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the checkpoint {place} is as its hashes say, and not what widefield writes: {error or type(error).__name__}. "
            "Somebody else made or changed it; take it from where it was written, or delete it"
        ) from None
    return values[0], values[1] if len(values) > 1 else None


# ---------------------------------------------------------------------------------------------- one rank's work


def _stage(state: dict, about: About, own: dict | None, rank: int) -> _Staged:
    """Texts and copied tensors of this rank's part; `state`'s texts on rank 0 alone."""
    plain, tensors = tree_json.take_apart(state)
    texts = {}
    if rank == 0:
        texts = {PLAIN: plain, ABOUT: tree_json.take_apart(dataclasses.asdict(about))[0]}
    if own is not None:
        own_name = _own_name(rank)
        texts[own_name], own_tensors = tree_json.take_apart(own, name=f"own_{rank}", taken=tensors)
        tensors = tensors | own_tensors
    files.check(tensors)
    return _Staged(about, _copy_to_memory(tensors), texts)


def _copy_to_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory, each in its order of memory; those from GPUs travel side by side."""
    copies = {}
    for name, tensor in tensors.items():
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, memory_format=torch.preserve_format)
        copies[name] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _write_texts(partial: Path, texts: Mapping[str, str]) -> None:
    if not partial.is_dir():
        raise FileNotFoundError(f"{partial}, which rank 0 made, is not seen here; name a run folder that all machines share")
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")


def _sync_and_hash(partial: Path, rank: int) -> dict[str, str]:
    """Put the files that this rank wrote on the disk; their hashes."""
    mine = [files.file_of(rank), _own_name(rank), *[PLAIN, ABOUT, files.INDEX] * (rank == 0)]
    names = sorted(name for name in mine if (partial / name).is_file())
    for name in names:
        manifest.sync(partial / name)
    return manifest.hashes_of(partial, names)


def _own_name(rank: int) -> str:
    return f"own_{rank}.json"


def _problem_of(work: Callable[[], Any]) -> str | None:
    """Do `work`; what went wrong, in words, or None."""
    try:
        work()
    except Exception as error:
        return reason_of(error)
    return None


def _union(parts: Sequence[dict[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}


def _say_nothing(text: str) -> None:
    """Ranks other than 0 are silent."""
