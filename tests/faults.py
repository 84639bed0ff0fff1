"""What can befall a checkpoint: a flipped bit, a process killed while it writes.  For the tests and for the benchmark."""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from widefield.comm.mesh import Mesh, World
from widefield.plans import Plan
from widefield.training.checkpoint import About, Checkpoints, read
from widefield.training.checkpoint_directory import newest_sound_in, steps_in
from widefield.training.manifest import what_is_wrong

ONE_RANK = Mesh(Plan(), World(), torch.device("cpu"))


def about_of(step: int, *, metric: float | None = None, higher_is_better: bool = True, ranks: int = 1) -> About:
    return About(step, 0, 8 * step, metric, higher_is_better, ranks, "replicate: 1\n", {"weight": [8, 16]}, {"torch": "2"})


def state_of(step: int, *, numbers: int = 2048) -> dict:
    """A state whose every number says which step it is of."""
    return {"model": {"weight": torch.full((numbers,), float(step))}, "step": step}


def checkpoints_in(
    folder: Path, mesh: Mesh = ONE_RANK, *, keep_last: int = 3, keep_best: int = 0, warn=None, **how
) -> Checkpoints:
    """Checkpoints that must not warn, unless `warn` takes it."""
    return Checkpoints(folder, mesh, keep_last=keep_last, keep_best=keep_best, warn=warn or no_warning, **how)


def save_two(folder: Path) -> Path:
    """Sound checkpoints of steps 1 and 2."""
    checkpoints = checkpoints_in(folder)
    for step in (1, 2):
        checkpoints.save(state_of(step), about_of(step), own={"seed": torch.arange(5)}, wait=True)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


def no_warning(text: str) -> None:
    raise AssertionError(f"an unexpected warning: {text}")


# ---------------------------------------------------------------------------------------------- flipped bits


@dataclass(frozen=True)
class Flip:
    file: Path
    bit: int

    def do(self) -> None:
        """Flip the bit; done twice, nothing is changed."""
        with self.file.open("r+b") as file:
            file.seek(self.bit // 8)
            byte = file.read(1)[0]
            file.seek(self.bit // 8)
            file.write(bytes([byte ^ (1 << self.bit % 8)]))


def every_bit_of(file: Path) -> list[Flip]:
    return [Flip(file, bit) for bit in range(8 * file.stat().st_size)]


def random_flips(folder: Path, count: int, *, seed: int = 0) -> list[Flip]:
    """Any file with the same chance, then any bit of it, so that small files have their share."""
    draw = random.Random(seed)
    files = sorted(file for file in folder.iterdir() if file.stat().st_size)
    return [Flip(file, draw.randrange(8 * file.stat().st_size)) for file in draw.choices(files, k=count)]


def missed(folder: Path, flips: list[Flip]) -> list[Flip]:
    """The flips that are not found, or whose file is not named; the folder is left as it was."""
    left = []
    for flip in flips:
        flip.do()
        problem = what_is_wrong(folder)
        flip.do()
        if problem is None or flip.file.name not in problem:
            left.append(flip)
    return left


# ---------------------------------------------------------------------------------------------- kills


@dataclass(frozen=True)
class Kill:
    """What one kill -9 left: whether it fell inside a save, and what is wrong with the folder (None where nothing is)."""

    inside_a_save: bool
    problem: str | None


def kill_saves(folder: Path, count: int, *, seed: int = 0, numbers: int = 2048, longest_seconds: float = 0.04) -> list[Kill]:
    """Start a process that saves without end, kill it at a random moment, look at the folder; again, `count` times."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "widefield.training.checkpoint"])
    draw = random.Random(seed)
    return [_kill_once(context, folder, numbers, draw.uniform(0, longest_seconds)) for _ in range(count)]


def _save_without_end(folder: Path, numbers: int, promised: Connection) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, ONE_RANK, keep_last=2, keep_best=1, warn=no_warning)
    found = checkpoints.newest_sound()
    step = found.about.step if found else 0
    while True:
        step += 1
        for _ in range(2):  # the second replaces the first, as a last save after a resume does
            checkpoints.save(state_of(step, numbers=numbers), about_of(step, metric=float(step % 7)), wait=True)
            promised.send(step)


def _kill_once(context, folder: Path, numbers: int, delay_seconds: float) -> Kill:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_save_without_end, args=(folder, numbers, theirs), daemon=True)
    process.start()
    theirs.close()
    step = ours.recv()
    time.sleep(delay_seconds)
    process.kill()
    process.join()
    process.close()
    while ours.poll():
        try:
            step = ours.recv()
        except EOFError:
            break
    ours.close()
    inside = any(place.name.startswith(".step_") for place in folder.iterdir())
    return Kill(inside, _what_a_kill_broke(folder, step))


def _what_a_kill_broke(folder: Path, promised: int) -> str | None:
    """None where the folder shows sound checkpoints alone, the newest no older than the last that was promised."""
    for place in steps_in(folder):
        problem = what_is_wrong(place)
        if problem is not None:
            return f"{place.name} counts and is not sound: {problem}"
    Checkpoints(folder, ONE_RANK, keep_last=2, keep_best=1, warn=no_warning)
    left = [place.name for place in folder.iterdir() if not place.name.startswith("step_")]
    found = newest_sound_in(folder, warn=no_warning)
    if left or found is None or found.about.step < promised:
        return f"step {promised} was promised; newest is {found}; left over: {left}"
    state, _ = read(found)
    held = {found.about.step, state["step"], *state["model"]["weight"].tolist()}
    return None if len(held) == 1 else f"{found.folder.name} holds numbers of several steps: {sorted(held)}"
