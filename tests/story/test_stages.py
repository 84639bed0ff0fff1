"""A recipe whose layers are dealt out over ranks: the numbers, the files and the answers of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import RECIPES, assert_same, forget_after
from marks import few
from ranks import on_ranks

from widefield import inference
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train

PAGE = str(RECIPES / "page.yaml")
# Three pages to learn from and three to evaluate, one at a time: copies have unequal shares.
PAGES = ["data.options.size=[48, 40]", "data.options.pages=[3, 3]", "data.batch_size=3", "data.evaluate_batch_size=1",
         "data.workers=0", "precision=float64", "model.options.widths=[4, 6, 8]", "optimizer.lr=0.03", "mesh.space=[]",
         "schedule.length=4step", "schedule.warmup=1step", "evaluate.every=2ep", "log.tensorboard=false",
         "optimizer.name=adamw", "optimizer.lr=0.003", "ema.decay=0.9", "optimizer.clip_norm=0.5",
         "checkpoint.every=1step", "checkpoint.keep_last=100"]  # fmt: skip
GROUPS = "model.options.norm=group"
LAYOUTS = {
    "stages": (2, ["mesh.stage=2"]),
    "memory": (3, ["mesh.stage=3", "pipeline.balance=memory"]),
    "copies": (4, ["mesh.replicate=2", "mesh.stage=2"]),
    "tiles": (4, ["mesh.space=[1,2]", "mesh.stage=2", "gradient.bucket_mib=null"]),
    "one tile": (2, ["mesh.space=[1,1]", "mesh.stage=2"]),
    "micro-batches": (2, ["mesh.stage=2", GROUPS, "pipeline.micro_batches=2", "pipeline.schedule=zero_bubble"]),
}


def go(mesh, folder: Path, settings: list[str]) -> str:
    return train(read_config(PAGE, settings), folder, mesh.world).reason


def again(mesh, folder: Path, settings: list[str]):
    return inference.evaluate_run(folder, settings, mesh.world)


def alone(folder: Path, *settings: str) -> Path:
    assert train(read_config(PAGE, [*PAGES, "mesh.replicate=1", *settings]), folder, World()).reason == "complete"
    return folder


def laid_out(folder: Path, layout: str, *settings: str) -> Path:
    ranks, axes = LAYOUTS[layout]
    given = [*PAGES, *(["mesh.replicate=1"] if layout != "copies" else []), *axes, *settings]
    assert on_ranks(ranks, go, folder, given) == ["complete"] * ranks
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    return alone(tmp_path_factory.mktemp("pages") / "run")


@pytest.mark.parametrize(
    "layout", few(["stages", "memory", "copies", "tiles", "one tile"], "stages", then=["copies", "tiles"], is_sweep=True)
)
def test_stages_train_average_clip_and_count_as_one_rank(pages, tmp_path, layout):
    assert_same(laid_out(tmp_path / "run", layout), pages)


def refused(mesh, folder: Path, settings: list[str]) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        train(read_config(PAGE, settings), folder, mesh.world)
    return str(caught.value)


@pytest.mark.parametrize(("setting", "words"), [
    ("precision=float16", "each of the 2 ranks of mesh.stage would find out for itself; set precision=bfloat16"),
    ("gradient.compression=bf16", "set gradient.compression=none"),
    ("pipeline.micro_batches=2", "set pipeline.micro_batches=1, or batch_norm=per_micro_batch"),
])  # fmt: skip
def test_what_stages_cannot_do_is_refused_on_every_rank(tmp_path, setting, words):
    given = [*PAGES, "mesh.replicate=1", "mesh.stage=2", setting]
    assert all(words in text for text in on_ranks(2, refused, tmp_path / "run", given))


@pytest.mark.long
def test_micro_batches_train_as_one_rank(tmp_path):
    assert_same(laid_out(tmp_path / "run", "micro-batches"), alone(tmp_path / "alone", GROUPS))


@pytest.mark.long
def test_a_run_in_stages_goes_on_on_one_rank_and_the_other_way(pages, tmp_path):
    run = laid_out(tmp_path / "run", "stages")
    forget_after(run, 2)
    assert_same(alone(run), pages)
    forget_after(run, 2)
    assert_same(laid_out(run, "memory"), pages)
