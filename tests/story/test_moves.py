"""A checkpoint of one plan is taken up by any other: the state bit for bit, the next ten losses, and every sample once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from command import RECIPES
from marks import few
from ranks import on_ranks

from widefield.config import read_config
from widefield.data.order import Steps, order_of
from widefield.plans import plan_of
from widefield.training.assemble import assemble, learner_of, training_batches
from widefield.training.checkpoint import About, Checkpoints, newest_sound_in, read
from widefield.training.passes import Passes
from widefield.training.resume import resume, state_of
from widefield.training.state import shapes_of
from widefield.training.tree_json import to_json

PAGE = str(RECIPES / "page.yaml")
SETTINGS = ["mesh.space=[]", "mesh.replicate=1", "data.options.size=[48, 40]", "data.options.pages=[8, 2]", "data.batch_size=4",
            "data.workers=0", "precision=float32", "model.options.widths=[8, 12, 16]", "optimizer.lr=0.003", "ema.decay=0.9",
            "schedule.length=13step", "schedule.name=constant", "schedule.warmup=0step"]  # fmt: skip
PLANS = {
    "one": (1, []),
    "zero3": (2, ["mesh.shard=2"]),
    "channel": (2, ["mesh.channel=2"]),
    "stage": (2, ["mesh.stage=2"]),
    "space": (2, ["mesh.space=[1,2]"]),
    "zero1": (2, ["mesh.shard=2", "sharding.zero=1"]),
    "channel x stage": (4, ["mesh.channel=2", "mesh.stage=2"]),
    "shard x space": (4, ["mesh.shard=2", "mesh.space=[2,1]"]),
    "replicate x channel": (4, ["mesh.replicate=2", "mesh.channel=2"]),
}
ALONE = ["one", "zero3", "channel", "stage", "space"]
PAIRS = [(writer, reader) for writer in ALONE for reader in ALONE if writer != reader]
PAIRS += [("channel x stage", "shard x space"), ("shard x space", "replicate x channel"), ("replicate x channel", "zero1")]
PAIRS += [("zero1", "channel x stage")]
BEFORE, AFTER = 3, 10
ARITHMETIC = Steps(samples=8, batch=4)
IMAGES = [
    sorted(order_of(0, ARITHMETIC.epoch_of(step), 8)[at.start : at.stop].tolist())
    for step in range(BEFORE, BEFORE + AFTER)
    for at in [ARITHMETIC.positions(step)]
]
"""Of every step, those that some rank has to count, each once."""


Learned = tuple[list[float], list[list[int]]]
"""The losses of steps, and the numbers of the images that this rank counted in each."""


def taken_up(mesh, source: Path | None, target: Path, settings: list[str]) -> Learned:
    """Take up what `source` has, or train a few steps; save at once into `target`; ten steps more."""
    parts = assemble(read_config(PAGE, settings), mesh)
    learner, _ = learner_of(parts)
    kept = {"keep_last": 9, "keep_best": 0, "background": False, "warn": pytest.fail}
    if source is not None:
        checkpoints = Checkpoints(source, mesh, **kept)
        resume(learner, checkpoints, checkpoints.newest_sound())
    else:
        _learn(parts, learner, BEFORE)
    about = About(
        step=learner.step, epoch=int(learner.epoch), samples=learner.steps.seen(learner.step), metric=None,
        higher_is_better=True, ranks=mesh.size, plan="", model=shapes_of(learner.model), versions={},
    )  # fmt: skip
    Checkpoints(target, mesh, **kept).save(state_of(learner), about, wait=True)
    return _learn(parts, learner, AFTER)


def _learn(parts, learner, steps: int) -> Learned:
    passes = Passes(training_batches(parts, first=learner.step, last=learner.step + steps), 1)
    losses, images = [], []
    for _ in range(steps):
        batches = passes.next()
        losses.append(learner.learn(batches, stop=False)[0])
        counted = [batch for batch in batches if not batch.idle and learner.mesh.is_first_of_copy]
        images.append([int(number) for batch in counted for number in batch.index[: batch.samples]])
    passes.close()
    return losses, images


def under(name: str, source: Path | None, target: Path) -> list[float]:
    ranks, axes = PLANS[name]
    settings = [*SETTINGS, *axes]
    plan = plan_of(read_config(PAGE, settings), ranks)
    found = on_ranks(ranks, taken_up, source, target, settings, plan=plan)
    losses, _ = found[0]
    assert all(of_rank == losses for of_rank, _ in found)
    assert [sorted(sum((images[step] for _, images in found), [])) for step in range(AFTER)] == IMAGES
    return losses


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Callable[[str], tuple[Path, list[float]]]:
    """What a plan saved after its first steps, and its own next losses."""
    folder = tmp_path_factory.mktemp("written")
    return cache(lambda name: (folder / name, under(name, None, folder / name)))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    state, _ = read(newest_sound_in(folder, warn=pytest.fail))
    return to_json(state)[1]


FIRST = ("one", "zero3"), ("channel", "stage")


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "reader"),
    few(PAIRS, *FIRST, then=[PAIRS[-4]], is_sweep=True),
    ids=[f"{writer} to {reader}" for writer, reader in PAIRS],
)
def test_state_is_equal_bit_for_bit_and_so_are_the_next_losses_but_for_rounding(written, tmp_path, writer, reader):
    source, expected = written(writer)
    losses = under(reader, source, tmp_path / "again")
    before, after = tensors_in(source), tensors_in(tmp_path / "again")
    assert sorted(before) == sorted(after) and len(before) > 90
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert losses == pytest.approx(expected, rel=1e-5, abs=0) and len(losses) == AFTER
