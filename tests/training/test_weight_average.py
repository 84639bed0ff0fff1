"""Is the moving average that is evaluated the one that is saved and exported, whoever holds which statistics?"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import DIGITS, record
from ranks import on_ranks

from widefield import inference
from widefield.comm.mesh import World
from widefield.config import read_config
from widefield.run import train
from widefield.training.checkpoint import newest_sound_in, read
from widefield.training.weight_average import average_of, follow_buffers, weights_of

SETTINGS = ["precision=float64", "mesh.replicate=2", "ema.decay=0.5", "schedule.length=7step", "schedule.warmup=1step",
            "evaluate.every=3step", "checkpoint.every=5step", "log.tensorboard=false"]  # fmt: skip


def go(mesh, folder: Path, settings: list[str]) -> str:
    return train(read_config(DIGITS, settings), folder, mesh.world).reason


@pytest.mark.parametrize("batch_norm", ["averaged", "broadcast"])
def test_the_average_is_evaluated_and_saved_with_statistics_that_ranks_have_agreed_on(tmp_path, batch_norm):
    """Each rank evaluated its images with statistics of its own, and exported were those of rank 0."""
    folder = tmp_path / "run"
    assert on_ranks(2, go, folder, [*SETTINGS, f"batch_norm={batch_norm}"]) == ["complete"] * 2
    again = inference.evaluate_run(folder, ["mesh.replicate=1"], World())
    assert record(folder, "evaluation")[-1]["loss"] == pytest.approx(again.loss, rel=1e-12)
    state, _ = read(newest_sound_in(folder / "checkpoints", warn=print))
    exported = safetensors.torch.load_file(folder / "weights.safetensors")
    average = weights_of(state["ema"])
    moved = [name for name in average if "running_" in name]
    assert moved and all(torch.equal(average[name], state["model"][name]) for name in moved)
    assert all(torch.equal(average[name], exported[name]) for name in average)


def test_the_average_takes_over_the_models_buffers_and_no_weight():
    model = torch.nn.BatchNorm1d(3)
    average = average_of(model, 0.9)
    average.update_parameters(model)
    with torch.no_grad():
        model.running_mean.fill_(4.0)
        model.weight.fill_(7.0)
    follow_buffers(average, model)
    assert average.module.running_mean.tolist() == [4.0] * 3 and average.module.weight.tolist() == [1.0] * 3
