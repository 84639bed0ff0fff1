"""A step that runs again has the record's loss, and says which module, which image and which gradient were no numbers."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from command import DIGITS, losses, record
from ranks import on_ranks
from torch import nn

import widefield as wf
from widefield.cli import main
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.training import manifest
from widefield.training.loop import Learner
from widefield.training.non_finite import NonFiniteWatch
from widefield.training.replay import replay_step

SETTINGS = ["model.options={widths: [8, 8], blocks: 1}", "schedule.length=8step", "schedule.warmup=2step", "data.workers=0",
            "checkpoint.every=3step", "evaluate.every=100step", "log.tensorboard=false", "data.batch_size=60",
            "mesh.replicate=1"]  # fmt: skip


class Fragile(nn.Module):
    """Divides by 0 in its second part, where an image is bright."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, 4, 3, padding=1)
        self.second = Divides()
        self.last = nn.Sequential(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))

    def forward(self, image):
        return self.last(self.second(self.first(image)))


class Divides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.limit = 10.0

    def forward(self, x):
        return x / torch.where(x.amax((1, 2, 3), keepdim=True) > self.limit, 0.0, 1.0)


class RootOfNothing(nn.Module):
    """Its output is finite, and its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.after(self.root(self.before(x)))

    def root(self, x):
        return x + (x * 0).abs().sqrt()


def ran(mesh, folder: Path, settings: list[str]) -> str:
    return train(read_config(DIGITS, [*SETTINGS, *settings]), folder, World() if mesh is None else mesh.world).reason


def everything(folder: Path) -> dict[str, str]:
    return {str(path): manifest.sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replayed") / "run"
    assert ran(None, folder, []) == "complete"
    return folder


@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_a_step_has_the_loss_of_the_record_bit_for_bit(run, step):
    before = everything(run)
    found = replay_step(run, step)
    assert found.loss == losses(run)[step - 1] == found.recorded
    assert found.run_again == {1: 0, 4: 0, 6: 2, 8: 1}[step] and found.forward is None and found.backward is None
    assert found.weights == {1: "the run's beginning, as no checkpoint is from before that step"}.get(
        step, f"step_0000000{3 if step < 7 else 6}"
    )
    assert found.norm == pytest.approx(math.sqrt(sum(norm**2 for norm in found.gradients.values())), rel=1e-5)
    assert len(found.images) == 60 and everything(run) == before


def test_without_the_steps_between_the_loss_is_another(run, capsys):
    assert main(["replay", str(run), "6", "--from-checkpoint", "--most", "3"]) == 0
    said = capsys.readouterr().out
    assert "step 6: weights of step_00000003; its batch from the data" in said and "the record has" in said
    assert "gradient norms of 3 of " in said and "forward: every output is finite" in said
    assert replay_step(run, 6, from_checkpoint=True).loss != losses(run)[5]


@pytest.mark.long
def test_a_step_of_several_ranks_is_the_same_on_one_but_for_rounding(tmp_path):
    settings = ["mesh.replicate=2", "gradient.accumulate=2", "precision=float64"]
    assert on_ranks(2, ran, tmp_path / "run", settings) == ["complete"] * 2
    found = wf.replay(tmp_path / "run", 5)
    assert found.loss == pytest.approx(losses(tmp_path / "run")[4], rel=1e-10)
    assert any("the run had 2 ranks" in note for note in found.notes)


def test_the_module_and_the_image_that_made_it_are_named(tmp_path):
    sys.modules[__name__] = sys.modules.get(__name__) or sys.modules["test_replay"]
    settings = [f"model.name={__name__}:Fragile", "model.options={}", "data.augment=[]", "optimizer.lr=1e-6"]
    real, bright = Learner.prepared, []

    def brighten(self, batch):
        image, target = real(self, batch)
        if self.step == 4 and batch.samples:
            image[7] *= 100
            bright.append(int(batch.index[7]))
        return image, target

    Learner.prepared = brighten
    try:
        with pytest.raises(ValueError, match="the loss of step 5 is (nan|inf)"):
            ran(None, tmp_path / "run", settings)
        found = wf.replay(tmp_path / "run", 5, trust=True)
    finally:
        Learner.prepared = real
    (line,) = record(tmp_path / "run", "guard")
    assert (found.batch, line["batch"]) == ("guard/step_00000005",) * 2 and found.run_again == 1
    assert not math.isfinite(found.loss)
    assert found.forward is not None and (found.forward.module, found.forward.kind) == ("second", "Divides")
    assert found.forward.rows == (found.images[7],) and line["index"][7] == bright[0]
    assert "second (Divides) is the first whose output is not finite, of " in "\n".join(found.in_words())


def test_a_batch_that_was_kept_is_used_whatever_the_data_is_now(tmp_path, monkeypatch):
    real = Learner.loss_of
    monkeypatch.setattr(
        Learner, "loss_of", lambda self, *given, **more: real(self, *given, **more) * (math.nan if self.step == 4 else 1.0)
    )
    with pytest.raises(ValueError, match="the loss of step 5 is nan"):
        ran(None, tmp_path / "run", [])
    monkeypatch.setattr(Learner, "loss_of", real)
    kept = replay_step(tmp_path / "run", 5)
    index = record(tmp_path / "run", "guard")[0]["index"]
    assert math.isfinite(kept.loss) and math.isnan(kept.recorded) and len(index) == 60
    monkeypatch.setattr("widefield.training.refused_batch.joined", lambda run, step: None)
    assert replay_step(tmp_path / "run", 5).loss == kept.loss  # the data's batch is the same one


def test_the_first_gradient_that_is_no_number_is_named():
    model = RootOfNothing()
    with NonFiniteWatch(model, ["a", "b"]) as watch:
        model(torch.randn(2, 3)).sum().backward()
    assert watch.forward is None
    fault = watch.backward()
    assert fault is not None and fault.module in ("", "before") and "gradient that is not finite" in fault.in_words()
    with NonFiniteWatch(nn.Linear(3, 2), ["a", "b"]) as watch:
        watch._model(torch.tensor([[1.0, 2.0, 3.0], [1.0, math.inf, 3.0]]))
    assert watch.forward is not None and watch.forward.module == "the images" and watch.forward.rows == ("b",)


@pytest.mark.parametrize(("step", "words"), [(99, "there is no step 99: the run in .* has steps 1 to 8"), (0, "no step 0")])
def test_a_step_that_there_is_not_is_refused(run, step, words):
    with pytest.raises(ValueError, match=words):
        replay_step(run, step)


def test_a_damaged_batch_is_refused_by_its_name(run, tmp_path):
    import shutil

    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "guard/step_00000004").mkdir(parents=True)
    (folder / "guard/step_00000004/batch_0.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="batch_0.safetensors is damaged"):
        replay_step(folder, 4)
