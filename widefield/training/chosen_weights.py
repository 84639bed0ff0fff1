"""Which weights of a run are meant: the best, the last, those of a step's checkpoint, or a file's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors
from torch import nn

from widefield.training.checkpoint import Found, newest_sound_in, read
from widefield.training.checkpoint_directory import name_of, sound_at, step_of, steps_in
from widefield.training.manifest import MANIFEST, sha256_of
from widefield.training.resume import check_state
from widefield.training.run_folder import BEST, WEIGHTS, load_weights
from widefield.training.state import shapes_of
from widefield.training.weight_average import weights_of


@dataclass(frozen=True)
class Chosen:
    """source: a .safetensors file, or a checkpoint.  text: for a line of the log."""

    source: Path | Found
    text: str

    def load(self, model: nn.Module) -> None:
        """Load the weights into a model that is not parallelized.  ValueError: they are of another model, or damaged."""
        if isinstance(self.source, Path):
            load_weights(self.source, model)
            return
        state, _ = read(self.source, model=shapes_of(model))
        check_state(state, self.source)
        model.load_state_dict(weights_of(state["ema"]) or state["model"])

    @property
    def sha256(self) -> str:
        """A hash that differs for other weights."""
        return sha256_of(self.source if isinstance(self.source, Path) else self.source.folder / MANIFEST)


def choose(folder: Path, weights: str | None, *, default: Literal["best", "last"]) -> Chosen:
    """The weights of a run.  weights: best, last, a step, or a .safetensors file; None: `default`, where the best are there.

    ValueError: there are none such.
    """
    if weights is None:
        weights = "best" if default == "best" and (folder / BEST).is_file() else "last"
    if weights == "best":
        return _best(folder)
    if weights == "last":
        return _last(folder)
    if weights.isdecimal():
        return _of_step(folder, int(weights))
    if not Path(weights).is_file():
        raise ValueError(
            f"there are no weights at {weights}; write best, last, the step of a checkpoint ({_steps(folder)}) or the name of "
            "a .safetensors file"
        )
    return Chosen(Path(weights), f"weights: {weights}")


def _best(folder: Path) -> Chosen:
    path = folder / BEST
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {BEST}, which the first evaluation of a run writes; write last, or a checkpoint's step"
        )
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no sound .safetensors file ({error}); write last, or a checkpoint's step") from None
    known = (
        f" ({about['metric']} {_short(about['value'])} at step {about['step']})"
        if {"metric", "value", "step"} <= set(about)
        else ""
    )
    return Chosen(path, f"weights: {BEST}{known}")


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value[:20]


def _last(folder: Path) -> Chosen:
    if (folder / WEIGHTS).is_file():
        return Chosen(folder / WEIGHTS, f"weights: {WEIGHTS}")
    found = newest_sound_in(folder / "checkpoints", warn=lambda text: print(text, file=sys.stderr))
    if found is None:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor a sound checkpoint; train it first, or name --weights FILE")
    return Chosen(found, f"weights: the checkpoint of step {found.about.step}")


def _of_step(folder: Path, step: int) -> Chosen:
    place = folder / "checkpoints" / name_of(step)
    if not place.is_dir():
        raise ValueError(f"{folder} has no checkpoint of step {step}; it has {_steps(folder)}")
    return Chosen(sound_at(place), f"weights: the checkpoint of step {step}")


def _steps(folder: Path) -> str:
    return ", ".join(str(step_of(place)) for place in steps_in(folder / "checkpoints")) or "none"
