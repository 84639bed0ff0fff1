"""A recipe, end to end, on ranks that are already there: what differs between ranks survives a stop, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import DIGITS, fingerprint, losses, record
from devices import on_gpu_too
from marks import few
from ranks import on_ranks

from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train

pytestmark = pytest.mark.alone

SHORT = ["schedule.length=8step", "schedule.warmup=2step", "evaluate.every=1000step", "log.tensorboard=false"]


def go(mesh, folder: Path, settings: list[str]) -> str:
    """What `widefield train` does on this rank; the words of the refusal where it refuses."""
    exact = f"deterministic={str(mesh.device.type == 'cuda').lower()}"
    config = read_config(DIGITS, [*SHORT, f"mesh.replicate={mesh.size}", exact, *settings])
    try:
        return train(config, folder, World(mesh.rank, mesh.size, mesh.rank, mesh.size, launcher="torchrun")).reason
    except ValueError as error:
        return str(error)


def stop_after(folder: Path, step: int) -> None:
    for place in (folder / "checkpoints").iterdir():
        if int(place.name.removeprefix("step_")) > step:
            shutil.rmtree(place)


SETTINGS = {
    "plain": (2, []),
    "fp16": (2, ["gradient.compression=fp16"]),
    "bf16": (2, ["gradient.compression=bf16"]),
    "powersgd": (2, ["gradient.compression=powersgd", "gradient.powersgd_start_step=2"]),
    "broadcast": (2, ["batch_norm=broadcast"]),
    "bfloat16 in channels last": (2, ["precision=bfloat16", "model.channels_last=true"]),
    "dropout on three ranks": (3, ["model.options.dropout=0.3", "ema.decay=0.9"]),
    "passes on three ranks": (3, ["gradient.accumulate=2", "data.batch_size=50"]),
    "timm": (2, ["model.name=timm/test_resnet", "model.options={}"]),
}


@on_gpu_too
@pytest.mark.parametrize(
    "name", few(SETTINGS, "plain", "powersgd", then=["bfloat16 in channels last", "dropout on three ranks"])
)
def test_a_resumed_run_equals_one_that_was_not_stopped(name, tmp_path):
    ranks, settings = SETTINGS[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert on_ranks(ranks, go, whole, settings) == ["complete"] * ranks
    on_ranks(ranks, go, cut, [*settings, "checkpoint.every=1step", "checkpoint.keep_last=100"])
    stop_after(cut, 3)
    assert on_ranks(ranks, go, cut, settings) == ["complete"] * ranks
    assert record(cut, "start")[-1]["resumed_from"] == 3
    assert fingerprint(whole, ranks=ranks) == fingerprint(cut, ranks=ranks)


def test_dropout_over_ranks_is_one_devices_unless_copies_are_independent(tmp_path):
    settings, found = ["model.options.dropout=0.3", "schedule.length=2step", "precision=float64"], {}
    for name, ranks, more in (("one", 1, []), ("two", 2, []), ("independent", 2, ["mesh.independent=true"])):
        on_ranks(ranks, go, tmp_path / name, [*settings, *more])
        found[name] = losses(tmp_path / name)
    assert found["two"] == pytest.approx(found["one"], rel=1e-12)
    assert abs(found["independent"][0] - found["one"][0]) > 1e-4


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """Same samples in the same order; in float64 the losses differ by rounding alone."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    on_ranks(2, go, whole, ["precision=float64"])
    on_ranks(2, go, cut, ["precision=float64", "checkpoint.every=1step", "checkpoint.keep_last=100"])
    stop_after(cut, 3)
    assert on_ranks(3, go, cut, ["precision=float64"]) == ["complete"] * 3
    assert max(abs(a - b) for a, b in zip(losses(whole), losses(cut), strict=True)) < 1e-10


def test_the_cheap_batch_norms_evaluate_alike_on_all_ranks(tmp_path):
    for choice in ("averaged", "broadcast"):
        folder = tmp_path / choice
        assert on_ranks(2, go, folder, [f"batch_norm={choice}", "schedule.length=2ep"]) == ["complete"] * 2
        assert record(folder, "evaluation")[-1]["images"] == 360


def test_other_gradient_compression_than_the_checkpoint_s_is_refused_by_all(tmp_path):
    folder = tmp_path / "run"
    on_ranks(2, go, folder, ["gradient.compression=powersgd"])
    told = on_ranks(2, go, folder, ["schedule.length=9step"])
    assert told[0] == told[1]
    assert "PowerSGD state" in told[0]


def test_more_ranks_than_samples_is_refused_by_all(tmp_path):
    told = on_ranks(3, go, tmp_path / "run", ["data.batch_size=2"])
    assert len(set(told)) == 1
    assert "3 copies of the model share a batch of 2 samples" in told[0]
