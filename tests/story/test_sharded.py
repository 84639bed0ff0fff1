"""A recipe whose ranks share weights, gradients and optimizer state: the numbers, the files and the answers of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import DIGITS, RECIPES, assert_same, fingerprint, forget_after, losses, record
from marks import few
from ranks import on_ranks

from widefield import inference
from widefield.comm.mesh import AgreedError, World
from widefield.config import read_config
from widefield.run import train

PAGE = str(RECIPES / "page.yaml")
# Three pages to evaluate, one at a time: one of two ranks has a batch more than the other.
PAGES = ["data.options.size=[48, 40]", "data.options.pages=[3, 3]", "data.batch_size=2", "data.evaluate_batch_size=1",
         "data.workers=0", "precision=float64", "model.options.widths=[4, 6, 8]", "optimizer.lr=0.03",
         "schedule.length=8step", "schedule.warmup=2step", "evaluate.every=2ep", "log.tensorboard=false"]  # fmt: skip
SCANS = ["precision=float64", "schedule.length=4step", "schedule.warmup=1step", "evaluate.every=1000step",
         "data.evaluate_batch_size=97", "log.tensorboard=false"]  # fmt: skip
ADAM = ["optimizer.name=adamw", "optimizer.lr=0.003", "ema.decay=0.9", "gradient.accumulate=2", "optimizer.clip_norm=0.5"]
ONE = ["mesh.space=[]", "mesh.replicate=1"]
LAYOUTS = {
    "one rank": (1, []),
    "two copies": (2, ["mesh.replicate=2"]),
    "ZeRO-1": (2, ["mesh.shard=2", "sharding.zero=1"]),
    "ZeRO-2": (2, ["mesh.shard=2", "sharding.zero=2"]),
    "ZeRO-3": (2, ["mesh.shard=2", "sharding.units=[down.*, up.*]"]),
    "ZeRO-3 and tiles": (4, ["mesh.shard=2", "mesh.space=[2,1]"]),
    "ZeRO-1 and tiles": (4, ["mesh.shard=2", "mesh.space=[2,1]", "sharding.zero=1"]),
    "hybrid": (4, ["mesh.replicate=2", "mesh.shard=2"]),
    "hybrid ZeRO-1": (4, ["mesh.replicate=2", "mesh.shard=2", "sharding.zero=1"]),
    "ZeRO-3, recomputed": (2, ["mesh.shard=2", "sharding.units=[down.*, up.*]", "recompute.keep=convolutions"]),
    "tiles, recomputed": (2, ["mesh.space=[2,1]", "recompute.blocks=[down.*]"]),
    "one rank within a memory": (1, ["recompute.memory=900KiB"]),
    "ZeRO-3 over four": (4, ["mesh.shard=4"]),
}


def go(mesh, folder: Path, recipe: str, settings: list[str]) -> str:
    return train(read_config(recipe, settings), folder, mesh.world).reason


def again(mesh, folder: Path, settings: list[str]):
    return inference.evaluate_run(folder, settings, mesh.world)


def trained(folder: Path, layout: str, *settings: str, recipe: str = PAGE, short: list[str] = PAGES) -> Path:
    ranks, axes = LAYOUTS[layout]
    given = [*ONE, *short, *axes, *settings]
    if ranks == 1:
        assert train(read_config(recipe, given), folder, World()).reason == "complete"
    else:
        assert on_ranks(ranks, go, folder, recipe, given) == ["complete"] * ranks
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """On one rank, with Adam, an average, accumulation and clipping; every checkpoint kept."""
    folder = tmp_path_factory.mktemp("pages") / "run"
    return trained(folder, "one rank", *ADAM, "checkpoint.every=4step", "checkpoint.keep_last=100")


@pytest.mark.parametrize("layout", few(["ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 and tiles", "ZeRO-1 and tiles",
                                        "ZeRO-3, recomputed", "tiles, recomputed", "one rank within a memory"],
                                       "ZeRO-1", then=["ZeRO-3 and tiles"], is_sweep=True))  # fmt: skip
def test_shared_weights_train_average_clip_and_count_as_one_rank(pages, tmp_path, layout):
    assert_same(trained(tmp_path / "run", layout, *ADAM), pages)


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("scans") / "run", "one rank", recipe=DIGITS, short=SCANS)


@pytest.mark.long
@pytest.mark.parametrize("layout", few(["hybrid", "hybrid ZeRO-1", "ZeRO-3 over four"], "hybrid", is_sweep=True))
def test_copies_of_parts_train_and_count_as_one_rank(scans, tmp_path, layout):
    """The momentum of SGD; 10 classes over 4 ranks are cut 3, 3, 3, 1."""
    assert_same(trained(tmp_path / "run", layout, recipe=DIGITS, short=SCANS), scans)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), few([
    ("ZeRO-3", "ZeRO-3"), ("ZeRO-3", "one rank"), ("one rank", "ZeRO-3"), ("ZeRO-1", "ZeRO-3 and tiles"),
    ("ZeRO-3 and tiles", "ZeRO-1"), ("ZeRO-2", "two copies"),
], ("ZeRO-3", "one rank"), is_sweep=True))  # fmt: skip
def test_any_plan_resumes_what_another_wrote_and_ends_as_if_nothing_had_happened(pages, tmp_path, before, after):
    often = [*ADAM, "checkpoint.every=4step", "checkpoint.keep_last=100"]
    folder = trained(tmp_path / "run", before, *often)
    whole = fingerprint(folder, ranks=LAYOUTS[before][0])
    forget_after(folder, 4)
    trained(folder, after, *often)
    assert record(folder, "start")[-1]["resumed_from"] == 4
    assert_same(folder, pages)
    if before == after:
        assert fingerprint(folder, ranks=LAYOUTS[before][0]) == whole


@pytest.mark.long
def test_a_run_on_shared_weights_is_evaluated_and_exported_anywhere(pages, tmp_path):
    folder = trained(tmp_path / "run", "ZeRO-3", *ADAM)
    told = json.loads((pages / "evaluation.json").read_text())
    for settings in (["mesh.shard=2"], ["mesh.shard=1", "mesh.replicate=2"]):
        assert [one.confusion for one in on_ranks(2, again, folder, settings)] == [told["confusion"]] * 2
    (folder / "weights.safetensors").unlink()  # then the newest checkpoint answers, with its average
    assert [one.confusion for one in on_ranks(2, again, folder, ["mesh.shard=2"])] == [told["confusion"]] * 2
    assert inference.export(folder, "state_dict").is_file()


@pytest.mark.long
@pytest.mark.sweep
def test_the_reasons_say_who_shares_what(tmp_path):
    folder = trained(tmp_path / "run", "ZeRO-3", "schedule.length=4step")
    reasons = record(folder, "start")[0]["reasons"]
    assert "ZeRO-3: 2 ranks share weights, gradients and optimizer state" in reasons
    assert any(
        why.startswith("weights are gathered in 5 units (down.0, down.1, down.2, up.0, ...) and the rest") for why in reasons
    )


@pytest.mark.long
@pytest.mark.parametrize("precision", few(["bfloat16", "float16"], "bfloat16", is_sweep=True))
def test_low_precision_gives_what_whole_copies_give(tmp_path, precision):
    """Autocast over float32 weights; sums of two gradients round alike, whoever takes them."""
    settings = [f"precision={precision}", "optimizer.clip_norm=0.5"]
    copies = trained(tmp_path / "copies", "two copies", *settings, recipe=DIGITS, short=SCANS)
    parts = trained(tmp_path / "parts", "ZeRO-3", "sharding.units=null", *settings, recipe=DIGITS, short=SCANS)
    assert losses(parts) == pytest.approx(losses(copies), rel=2**-8)


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), few([("lars", "ZeRO-1"), ("lamb", "ZeRO-3")], ("lamb", "ZeRO-3")))
def test_steps_by_norms_of_whole_weights_are_one_ranks(tmp_path, name, layout):
    pytest.importorskip("timm")
    settings = [f"optimizer.name={name}", "optimizer.weight_decay=0.01"]
    one = trained(tmp_path / "one", "one rank", *settings, recipe=DIGITS, short=SCANS)
    assert_same(trained(tmp_path / "two", layout, "sharding.units=null", *settings, recipe=DIGITS, short=SCANS), one)


def refused(mesh, folder: Path, settings: list[str]) -> str:
    try:
        return train(read_config(PAGE, [*ONE, *PAGES, *settings]), folder, mesh.world).reason
    except AgreedError as error:
        return str(error)


@pytest.mark.parametrize(("settings", "words"), [
    (["gradient.compression=bf16"], "gradient.compression=bf16 is for whole copies and sharding.zero=3 has none"),
    (["sharding.offload=true"], "the device is the CPU already; set sharding.offload=false"),
    (["sharding.units=[dwon.*]"], "sharding.units names 'dwon.*', which no module of UNet fits"),
])  # fmt: skip
def test_what_cannot_be_shared_exactly_is_refused_on_every_rank(tmp_path, settings, words):
    said = on_ranks(2, refused, tmp_path / "run", ["mesh.shard=2", *settings])
    assert said[0] == said[1] and words in said[0]


@pytest.mark.parametrize(("axis", "words"), [
    ("channel", "each of the 2 ranks of mesh.channel would find out for itself; set precision=bfloat16"),
    ("stage", "each of the 2 ranks of mesh.stage would find out for itself; set precision=bfloat16"),
])  # fmt: skip
def test_scaled_gradients_of_parts_that_no_sum_joins_are_refused(tmp_path, axis, words):
    said = on_ranks(2, refused, tmp_path / "run", [f"mesh.{axis}=2", "precision=float16"])
    assert said[0] == said[1] and words in said[0]
