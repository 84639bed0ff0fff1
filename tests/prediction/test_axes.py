"""`widefield predict` where the mesh cuts the model: in shards, channels and stages, the answers are those of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from command import DIGITS, RECIPES
from falling import fall, raising
from PIL import Image
from ranks import on_ranks

from widefield import sharded_state
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.data import open_dataset
from widefield.data.image import write_image
from widefield.inference import loaded_on_ranks
from widefield.prediction.session import Predicted, Wishes, predict_files
from widefield.run import train

SHORT = ["schedule.length=2step", "log.tensorboard=false", "precision=float64", "mesh.replicate=1"]
SMALL = {
    "digits": (DIGITS, ["model.options.widths=[8,12]", "schedule.warmup=0step"]),
    "page": (
        str(RECIPES / "page.yaml"),
        [
            "mesh.space=[]",
            "data.options.size=[48,40]",
            "data.options.pages=[6,5]",
            "model.options.widths=[4,6]",
            "schedule.warmup=1step",
        ],
    ),
}
WISHES = {
    "digits": Wishes(flips=True, batch_size=2, top=10),
    "page": Wishes(flips=True, batch_size=2, probabilities="npy"),
}


@pytest.fixture(scope="module", params=SMALL)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(kind, tmp_path_factory) -> Path:
    recipe, settings = SMALL[kind]
    return train(read_config(recipe, [*SHORT, *settings]), tmp_path_factory.mktemp(kind) / "run", World()).run


@pytest.fixture(scope="module")
def images(kind, tmp_path_factory) -> Path:
    """Five images, and a file that is none; one page is of another size, so that a copy has two batches and another three."""
    place = tmp_path_factory.mktemp("images")
    recipe, settings = SMALL[kind]
    found = open_dataset(read_config(recipe, settings).data).evaluate
    for number in range(5):
        image = found.read(number)[0]
        write_image(image[:, :31] if kind == "page" and number == 4 else image, place / f"{number}.png")
    (place / "bad.png").write_bytes(b"no image")
    return place


@pytest.fixture(scope="module")
def one_rank(kind, trained, images, tmp_path_factory) -> tuple[Predicted, Path]:
    output = tmp_path_factory.mktemp("alone") / "out"
    return predict_files(trained, [images], [], World(), output=output, wishes=WISHES[kind]), output


def on_mesh(mesh, run: Path, images: Path, output: Path, overrides: list[str], wishes: Wishes) -> Predicted:
    return predict_files(run, [images], overrides, mesh.world, output=output, wishes=wishes)


def check_answers(kind: str, alone: tuple[Predicted, Path], each: list[Predicted], output: Path) -> None:
    """All ranks have the answers of one rank."""
    wanted = alone[0].answers
    for found in each:
        assert [Path(left.path).name for left in found.lefts] == ["bad.png"] and "cannot read" in found.lefts[0].reason
        assert [(one.path, one.classes) for one in found.answers] == [(one.path, one.classes) for one in wanted]
        for mine, theirs in zip(found.answers, wanted, strict=True):
            np.testing.assert_allclose(mine.probabilities, theirs.probabilities, rtol=0, atol=1e-6)
    assert len(wanted) == 5
    for number in range(5) if kind == "page" else ():
        mine, theirs = (np.asarray(Image.open(place / f"{number}.png")) for place in (output, alone[1]))
        assert np.array_equal(mine, theirs)
        mine, theirs = (np.load(place / f"probabilities/{number}.npy") for place in (output, alone[1]))
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)  # rounded to float16


@pytest.mark.long
@pytest.mark.parametrize("axis", ["shard", "channel", "stage"])
def test_ranks_that_share_a_model_answer_as_one_does(axis, kind, trained, images, one_rank, tmp_path):
    found = on_ranks(2, on_mesh, trained, images, tmp_path, ["mesh.replicate=1", f"mesh.{axis}=2"], WISHES[kind])
    check_answers(kind, one_rank, found, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("axes", [["mesh.channel=2", "mesh.space=[2,1]"], ["mesh.shard=2", "mesh.space=[2,1]"],
                                  ["mesh.replicate=2", "mesh.stage=2"]])  # fmt: skip
def test_axes_mix(axes, kind, trained, images, one_rank, tmp_path):
    found = on_ranks(4, on_mesh, trained, images, tmp_path, ["mesh.replicate=1", *axes], WISHES[kind])
    check_answers(kind, one_rank, found, tmp_path)


def share_of_weights(mesh, run: Path, overrides: list[str]) -> float:
    """This rank's share of the weights' elements."""
    with loaded_on_ranks(run, [], World(), weights=None) as (parts, _):
        whole = sum(p.numel() for p in parts.model.parameters())
    with loaded_on_ranks(run, overrides, mesh.world, weights=None) as (parts, _):
        own = [sharded_state.local(p) for p in parts.model.parameters() if not p.is_meta]
        return sum(p.numel() for p in own) / whole


@pytest.mark.long
@pytest.mark.parametrize("kind", ["digits"], indirect=True, scope="module")
@pytest.mark.parametrize("axis", ["shard", "channel", "stage"])
def test_each_rank_keeps_its_part_of_the_weights(axis, trained):
    shares = on_ranks(2, share_of_weights, trained, ["mesh.replicate=1", f"mesh.{axis}=2"])
    assert max(shares) < 0.9 and sum(shares) < 1.2  # stages are balanced by operations


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["digits"], indirect=True, scope="module")
@pytest.mark.parametrize("axis", ["shard", "stage"])
def test_an_image_that_the_model_fails_for_on_one_rank_ends_all_in_words(axis, trained, images, tmp_path):
    """The other rank waits: with shards in the next call of the model, with stages in this one."""
    plant = partial(raising, 0, "widefield.prediction.answers:Asker", "_output", RuntimeError("planted"), 1)
    words = ["predict", trained, images, "--output", tmp_path / "out", "mesh.replicate=1", f"mesh.{axis}=2"]
    ended = fall(2, words, plant, folder=tmp_path / "said")
    assert [one.status for one in ended] == [1, 3], [one.said for one in ended]
    assert all("rank 0 failed: RuntimeError: planted" in one.said for one in ended)
