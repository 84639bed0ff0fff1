"""Runs the command as a user does: `widefield ...` in processes of its own, which can be watched and killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
from preloaded import PreloadedCommand, may_be_forked

from widefield.training.checkpoint import newest_sound_in, read

RECIPES = Path(__file__).parent.parent / "recipes"
DIGITS = str(RECIPES / "digits.yaml")


def start(*arguments: str | Path, anew: bool = False, **options) -> subprocess.Popen | PreloadedCommand:
    """The command in the background, its output in a pipe; it hears Ctrl-C even where a shell made this one deaf to it.

    anew: it loads everything itself, as for a user, which takes some five seconds of a core.  options: cwd, env.
    """
    words = [str(word) for word in arguments]
    environment = options.get("env") or os.environ
    if not anew and may_be_forked(environment):
        return PreloadedCommand(words, cwd=options.get("cwd"), env=environment)
    command = [sys.executable, "-m", "widefield", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=_hear, **options)


def _hear() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(*arguments: str | Path, status: int = 0, seconds: float = 300, **options) -> str:
    """The command to its end; what it printed.  AssertionError where it ends otherwise than with `status`."""
    process = start(*arguments, **options)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
        process.stdout.close()
        raise
    assert process.returncode == status, f"ended with {process.returncode}, not {status}:\n{output}"
    return output


def record(folder: Path, kind: str) -> list[dict]:
    """The lines of one kind in a run's record; a torn last line is left out."""
    path = folder / "record.jsonl"
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in record(folder, "step")]


def wait_for_step(process: subprocess.Popen, folder: Path, step: int, *, seconds: float = 120) -> None:
    """Return once the run has recorded `step` after the start that `process` made."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended with {process.returncode} before step {step}:\n{process.stdout.read()}"
        if any(line["step"] >= step for line in record(folder, "step")[-1:]):
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} did not come within {seconds} s")


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The rank processes below a launcher, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(FileNotFoundError):  # a process that is no rank, and has ended meanwhile
            name = Path(f"/proc/{child.pid}/comm").read_text().strip()
            if name.startswith("widefield-"):
                found[int(name.removeprefix("widefield-"))] = child
    return [found[rank] for rank in sorted(found)]


def kill_rank(process: subprocess.Popen, rank: int) -> str:
    """SIGKILL to one rank (or the process itself, where there are none); what the command printed to its end."""
    ranks = ranks_of(process)
    os.kill(ranks[rank].pid if ranks else process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    return output


def forget_after(folder: Path, step: int) -> None:
    """Leave of a run that kept every checkpoint what one has on disk that was killed after `step`."""
    for place in (folder / "checkpoints").iterdir():
        if int(place.name.removeprefix("step_")) > step:
            shutil.rmtree(place)


def assert_same(got: Path, expected: Path) -> None:
    """Two runs in float64 have equal losses, weights, and metrics and counts of every evaluation.

    A lost halo pixel or another mask shows at 1e-3.
    """
    assert losses(expected) and losses(got) == pytest.approx(losses(expected), rel=1e-10, abs=0)
    keys = ("step", "images", "of", "duplicates", "metrics")
    evaluations = [[[line[key] for key in keys] for line in record(folder, "evaluation")] for folder in (got, expected)]
    assert evaluations[0] == evaluations[1] and evaluations[0][-1][3] == 0
    told = [json.loads((folder / "evaluation.json").read_text()) for folder in (got, expected)]
    assert told[0]["confusion"] == told[1]["confusion"]
    mine, theirs = (safetensors.torch.load_file(folder / "weights.safetensors") for folder in (got, expected))
    assert list(mine) == list(theirs)
    for name, weight in theirs.items():
        assert (mine[name] - weight).abs().max() <= 1e-10 * weight.abs().max().clamp(min=1), name


def fingerprint(folder: Path, *, ranks: int) -> dict[str, str]:
    """SHA-256 of what a finished run is: weights, everything its last checkpoint holds, sample order and losses."""
    found = newest_sound_in(folder / "checkpoints", warn=print)
    assert found is not None
    state, _ = read(found, rank=0, ranks=ranks)
    orders = [read(found, rank=rank, ranks=ranks)[1]["order"] for rank in range(ranks)]
    return {
        "weights": hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest(),
        "model": _hash(state["model"]),
        "optimizer": _hash(state["optimizer"]),
        "order": _hash(orders),
        "losses": _hash(losses(folder)),
    }


def _hash(value) -> str:
    digest = hashlib.sha256()
    _update(digest, value)
    return digest.hexdigest()


def _update(digest, value) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _update(digest, item)
    elif hasattr(value, "numpy"):
        digest.update(value.contiguous().flatten().view(-1).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
