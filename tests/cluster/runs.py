"""Runs of two ranks that are disturbed, and the one that they must equal: the same bytes of weights."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import command
import safetensors.torch
from cluster.hosts import wait_for
from cluster.paced import SAVE, STEP

from widefield.training.checkpoint import newest_sound_in

STEPS = 40
RECIPE = f"""
model: {{name: "paced:build", options: {{control: CONTROL}}}}
data: {{name: digits, batch_size: 64, augment: [RandomCrop: {{size: 8, padding: 1}}]}}
optimizer: {{name: sgd, lr: 0.1, nesterov: true}}
schedule: {{name: cosine, length: {STEPS}step, warmup: 2step}}
evaluate: {{every: {STEPS}step}}
checkpoint: {{every: 5step}}
log: {{tensorboard: false}}
mesh: {{replicate: 2}}
precision: float64
"""
"""Dropout and random crops: a sample that is lost, repeated or drawn otherwise changes every weight."""
PYTHON = (sys.executable, "-m", "widefield")


@dataclass(frozen=True)
class Run:
    """A run to be.  place: its folder for the recipe, the files that pace it, and what it writes."""

    place: Path

    @property
    def folder(self) -> Path:
        return self.place / "run"

    @property
    def words(self) -> list[str]:
        """The arguments of `widefield`."""
        return ["train", str(self.place / "recipe.yaml"), "--run-dir", str(self.folder)]

    def pace(self, *, step: float = 0.0, save: float = 0.0) -> None:
        """Let each step, and each save, take this many seconds more from now on."""
        for name, seconds in ((STEP, step), (SAVE, save)):
            file = self.place / f"{name}.new"
            file.write_text(str(seconds))
            file.rename(self.place / name)

    @property
    def step(self) -> int:
        """The last step that is recorded; 0 before the first."""
        return max((line["step"] for line in command.record(self.folder, "step")), default=0)

    @property
    def saved_step(self) -> int:
        """The step of the newest sound checkpoint; 0 where there is none."""
        place = self.folder / "checkpoints"
        found = newest_sound_in(place, warn=print) if place.is_dir() else None
        return 0 if found is None else found.about.step

    def wait_for_step(self, step: int, *, seconds: float = 300) -> None:
        wait_for(lambda: self.step >= step, f"step {step} of {self.folder}", seconds=seconds)

    def starts(self) -> list[int]:
        """The step after which each start began; 0 for one from the beginning."""
        return [line["resumed_from"] or 0 for line in command.record(self.folder, "start")]


def run_in(place: Path, *, step: float = 0.0) -> Run:
    """A new run in `place`, with steps of this many seconds."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "recipe.yaml").write_text(RECIPE.replace("CONTROL", str(place)))
    shutil.copy(Path(__file__).parent / "paced.py", place)
    made = Run(place)
    made.pace(step=step)
    return made


def assert_as_undisturbed(got: Run, undisturbed: Run) -> None:
    """Both ended; same bytes of weights, and every step's loss, counted once where a step was done again."""
    assert command.record(got.folder, "end")[-1]["reason"] == "complete"
    mine, theirs = (safetensors.torch.load_file(one.folder / "weights.safetensors") for one in (got, undisturbed))
    far = {name: (mine[name] - theirs[name]).abs().max().item() for name in theirs}
    assert _bytes(got) == _bytes(undisturbed), f"the weights differ by up to {far}"
    assert last_losses(got) == last_losses(undisturbed)


def _bytes(run: Run) -> bytes:
    return (run.folder / "weights.safetensors").read_bytes()


def last_losses(run: Run) -> dict[int, float]:
    """Each step's loss, of the last time that it was done."""
    return {line["step"]: line["loss"] for line in command.record(run.folder, "step")}
