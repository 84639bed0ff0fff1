"""Does a run on tiles of moved images learn as one rank does, crops and whole images from one recipe?"""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

from widefield.comm.mesh import Mesh, World
from widefield.config import RunConfig, parse_config
from widefield.plans import Plan
from widefield.training.assemble import assemble, evaluate_parts, learner_of, training_batches

STEPS = 6
CONFIG = """
model: {name: unet, options: {widths: [4, 6], norm: group}}
data:
  name: page
  options: {size: [64, 48], pages: [5, 3], digit_px: [16, 24], digits_per_megapixel: 1500}
  batch_size: 2
  workers: 0
task: {name: segmentation}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0}
schedule: {name: constant, length: 6step}
precision: float64
"""
MOVED = (
    "data.augment=[RandomHorizontalFlip, RandomVerticalFlip, {RandomRotation: {degrees: 40}}, "
    "{ElasticTransform: {alpha: 40.0, sigma: 4.0}}, {ColorJitter: {brightness: 0.3}}]"
)
CROPPED = "data.augment=[RandomRotate90, {ClassBalancedCrop: {size: [32, 32], share: 0.5}}]"


def config(*settings: str) -> RunConfig:
    return parse_config(CONFIG, settings)


def losses_of(mesh: Mesh, setting: str) -> list[float]:
    """The losses of some steps, then the accuracy on whole images."""
    parts = assemble(config(setting), mesh)
    learner, _ = learner_of(parts)
    batches = training_batches(parts, first=0, last=STEPS)
    losses = [learner.learn([next(batches)], stop=False)[0] for _ in range(STEPS)]
    return [*losses, evaluate_parts(parts, learner.model).metrics["accuracy"]]


@pytest.mark.parametrize("setting", [MOVED, CROPPED], ids=["moved", "cropped"])
def test_tiles_of_moved_images_learn_as_one_rank(setting):
    """Relative 1e-10: 6 steps of float64 sums in another order."""
    alone = losses_of(Mesh(Plan(), World(), torch.device("cpu")), setting)
    assert len(set(alone)) == STEPS + 1
    for found in on_ranks(2, losses_of, setting, plan=Plan(space=[2, 1])):
        assert found == pytest.approx(alone, rel=1e-10)


def test_a_resumed_epoch_has_the_same_moves():
    mesh = Mesh(Plan(), World(), torch.device("cpu"))
    parts = assemble(config(MOVED), mesh)
    first = list(training_batches(parts, first=0, last=4))
    later = list(training_batches(parts, first=2, last=4))
    assert all(torch.equal(one.image, other.image) for one, other in zip(first[2:], later, strict=True))
    assert all(torch.equal(one.target, other.target) for one, other in zip(first[2:], later, strict=True))
