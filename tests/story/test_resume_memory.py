"""A resume takes no more memory than a step: each rank reads its own part of what another plan wrote."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
from command import RECIPES
from marks import few
from ranks import on_ranks

from widefield.config import read_config
from widefield.plans import plan_of
from widefield.streaming.storage.heap import trim_heap
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.checkpoint import About, Checkpoints
from widefield.training.passes import Passes
from widefield.training.resume import resume, state_of
from widefield.training.state import shapes_of

pytestmark = pytest.mark.alone
MOST = 1.1
PAGE = str(RECIPES / "page.yaml")
WIDE = ["mesh.space=[]", "mesh.replicate=1", "data.options.size=[48, 40]", "data.options.pages=[8, 2]", "data.batch_size=4",
        "data.workers=0", "precision=float32", "model.options.widths=[128, 256, 512]", "optimizer.lr=0.003",
        "schedule.length=13step", "schedule.name=constant", "schedule.warmup=0step"]  # fmt: skip
PLANS = {"zero3": (2, ["mesh.shard=2"]), "zero3 over 4": (4, ["mesh.shard=4"]), "channel": (2, ["mesh.channel=2"]),
         "stage": (2, ["mesh.stage=2"])}  # fmt: skip


def _status(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def written(mesh, folder: Path, settings: list[str]) -> None:
    """A checkpoint after a step."""
    learner = _learner(mesh, settings)[1]
    about = About(
        step=learner.step, epoch=0, samples=4, metric=None, higher_is_better=True, ranks=mesh.size, plan="",
        model=shapes_of(learner.model), versions={},
    )  # fmt: skip
    checkpoints = Checkpoints(folder, mesh, keep_last=9, keep_best=0, background=False, warn=pytest.fail)
    checkpoints.save(state_of(learner), about, wait=True)


def _learner(mesh, settings: list[str], *, steps: int = 1):
    parts = assemble(read_config(PAGE, settings), mesh)
    learner, _ = learner_of(parts)
    _step(parts, learner, steps)
    return parts, learner


def _step(parts, learner, steps: int) -> None:
    passes = Passes(training_batches(parts, first=learner.step, last=learner.step + steps), 1)
    for _ in range(steps):
        learner.learn(passes.next(), stop=False)
    passes.close()


def compared(mesh, source: Path, settings: list[str]) -> tuple[int, int]:
    """The peak of resident bytes above the beginning: of a resume, from nothing to a loaded learner; and of two steps after."""
    _learner(mesh, settings)  # what the first time allocates for good
    gc.collect()
    trim_heap()  # else pages of what is freed would be used again, and not be seen
    _forget_peak()
    before = _status("VmRSS")
    parts = assemble(read_config(PAGE, settings), mesh)
    learner, _ = learner_of(parts)
    checkpoints = Checkpoints(source, mesh, keep_last=9, keep_best=0, background=False, warn=pytest.fail)
    resume(learner, checkpoints, checkpoints.newest_sound())
    of_resume = _status("VmHWM") - before
    _forget_peak()
    _step(parts, learner, 2)
    return of_resume, _status("VmHWM") - before


@pytest.mark.parametrize("name", few(PLANS, "zero3", is_sweep=True))
def test_a_resume_takes_no_more_memory_than_a_step(name, tmp_path):
    on_ranks(1, written, tmp_path, WIDE)
    ranks, axes = PLANS[name]
    settings = [*WIDE, *axes]
    for of_resume, of_steps in on_ranks(ranks, compared, tmp_path, settings, plan=plan_of(read_config(PAGE, settings), ranks)):
        print(f"{name}: {of_resume:,} bytes for a resume, {of_steps:,} for steps")
        assert of_resume <= MOST * of_steps, f"{of_resume:,} bytes for a resume, {of_steps:,} for steps"
        assert of_steps > 40 * 2**20, f"{of_steps:,} bytes are too few to tell"
