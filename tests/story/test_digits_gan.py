"""The recipe that makes digits of noise, end to end on one rank, at a size of its own: trained, killed, asked for images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from command import fingerprint, losses, record, run
from marks import few
from PIL import Image
from safetensors.torch import load_file
from small_recipe import SmallRecipe, check_evaluated_again

import widefield as wf
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.data.device import noise_of_seed
from widefield.data.transforms import seed_of
from widefield.faults.fault import VARIABLE
from widefield.inference import export
from widefield.models._dcgan import dcgan_generator
from widefield.plans import plan_of
from widefield.prediction.samples import sample_images

SMALL = ["mesh.replicate=1", "schedule.length=6step", "evaluate.every=3step", "data.batch_size=8", "data.workers=0",
         "model.options.generator_options={width: 4, strides: 2}", "log.tensorboard=false", "task.options.noise=8",
         "model.options.discriminator_options={width: 4, strides: 2, spectral: true, normalized: false}"]  # fmt: skip
RECIPE = SmallRecipe("digits_gan", SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return RECIPE.trained(tmp_path_factory.mktemp("noise") / "run")


def test_the_recipe_has_two_copies():
    plan = plan_of(read_config(RECIPE.path), 2)
    assert plan.ranks == 2 and plan.replicate == 2


@pytest.mark.long
def test_each_evaluation_leaves_a_grid_of_what_is_made_of_the_same_noise(trained):
    page = (trained / "report.html").read_text()
    assert "Training loss of the generator" in page and "Where it was wrong" not in page
    assert page.count('<figure class="grid">') == 3 and "Made, step 6" in page and "Step 3" in page
    grids = [np.asarray(Image.open(trained / f"samples/{name}.png")) for name in ("made_00000003", "made_00000006", "real")]
    assert {grid.shape for grid in grids} == {(6 * 18 - 2, 6 * 18 - 2)} and (grids[0] != grids[1]).any()


@pytest.mark.long
@pytest.mark.parametrize("after", few([1, 4], 4, is_sweep=True))
def test_a_resumed_run_equals_one_that_was_not_stopped(trained, tmp_path, after):
    RECIPE.check_resume(trained, tmp_path / "cut", after=after)


@pytest.mark.long
def test_a_run_that_ends_in_the_backward_of_a_discriminators_turn_goes_on_bit_for_bit(trained, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "rank=0 step=5 phase=backward kind=exception")
    with pytest.raises(Exception, match="injected on rank 0 in backward"):
        RECIPE.go(tmp_path / "run", "checkpoint.every=2step")
    assert len(losses(tmp_path / "run")) == 4
    monkeypatch.delenv(VARIABLE)
    assert RECIPE.go(tmp_path / "run").reason == "complete"
    assert losses(tmp_path / "run") == losses(trained)
    assert fingerprint(tmp_path / "run", ranks=1) == fingerprint(trained, ranks=1)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.alone
def test_a_rank_that_is_killed_in_a_discriminators_turn_is_replaced_and_nothing_is_lost(tmp_path):
    asked = [RECIPE.path, *SMALL, "mesh.replicate=2", "checkpoint.every=2step", "--max-restarts", "1"]

    def go(folder: Path, **environment: str) -> None:
        run("train", *asked, "--run", folder, env={**os.environ, **environment})

    go(tmp_path / "whole")
    go(tmp_path / "killed", **{VARIABLE: "rank=1 step=5 phase=backward kind=kill"})
    assert [line["at"] for line in record(tmp_path / "killed", "fault")] == [5]
    assert losses(tmp_path / "killed")[-2:] == losses(tmp_path / "whole")[-2:]
    assert fingerprint(tmp_path / "killed", ranks=2) == fingerprint(tmp_path / "whole", ranks=2)


@pytest.mark.long
def test_the_evaluation_can_be_had_again(trained):
    check_evaluated_again(trained)


# ---------------------------------------------------------------------------------------------- images that are asked for


@pytest.mark.long
@pytest.mark.parametrize("mesh", few(["mesh.space=[2,1]", "mesh.shard=2"], "mesh.shard=2", is_sweep=True))
def test_a_plain_generator_makes_the_images_that_the_command_makes(trained, tmp_path, mesh):
    """On two ranks, which share each image, or images and weights: the second one has fewer batches."""
    asked = ["--number", "3", "--seed", "5", "--weights", "last", "--batch-size", "1"]
    run("sample", trained, mesh, *asked, "--output", tmp_path / "made")
    weights = load_file(trained / "weights.safetensors")
    plain = dcgan_generator(8, 1, width=4, strides=2).eval()
    plain.load_state_dict({name.removeprefix("generator."): value for name, value in weights.items() if name.startswith("gen")})
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["000000.png", "000001.png", "000002.png"]
    with torch.no_grad():
        wanted = plain(noise_of_seed(seed_of(5, "sample", 2), (8, 1, 1))[None])[0, 0] * 255
    got = np.asarray(Image.open(tmp_path / "made" / "000002.png")).astype(float)
    assert np.abs(got - wanted.numpy()).max() <= 0.51


def test_predictions_of_images_are_refused_and_so_are_samples_of_other_runs(trained, tmp_path):
    with pytest.raises(ValueError, match=r"makes images of noise and reads none; let it make some by widefield sample RUN"):
        wf.predict(trained, [torch.zeros(1, 16, 16, dtype=torch.uint8)])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "a.png").touch()
    with pytest.raises(ValueError, match=r"taken has a.png already; name another --output"):
        sample_images(trained, [], World(), number=2, output=tmp_path / "taken")
    wf.train("digits", "model.options={widths: [4], blocks: 1}", "schedule={length: 1step, warmup: 0step}", "data.batch_size=8",
             "log.tensorboard=false", run=tmp_path / "other")  # fmt: skip
    with pytest.raises(ValueError, match=r"this run's model reads images and makes none of noise; ask it by widefield predict"):
        sample_images(tmp_path / "other", [], World(), number=2)


@pytest.mark.long
def test_an_export_takes_noise(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    path = export(trained, "onnx", output=tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(path))
    (made,) = session.run(None, {session.get_inputs()[0].name: np.zeros((3, 8, 1, 1), dtype=np.float32)})
    assert made.shape == (3, 1, 16, 16)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.alone
def test_the_recipe_reaches_its_quality(tmp_path):
    """66 was seen on two ranks, 75 on one; two sets of real digits are 28 apart, and 298 was seen after 5 epochs."""
    RECIPE.check_quality(tmp_path / "run", {}, {"swd": 120})
