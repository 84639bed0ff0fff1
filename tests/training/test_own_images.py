"""Do ranks that share images of one's own files get one device's pixels and labels, scaled by statistics of all files?"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import on_ranks

from widefield.comm.mesh import AgreedError, Mesh, World
from widefield.config import RunConfig, parse_config
from widefield.plans import Plan
from widefield.training.assemble import assemble, training_batches, write_model_of
from widefield.training.run_folder import STATISTICS, read_model

CPU = torch.device("cpu")
CONFIG = """
model: {name: unet, options: {widths: [4], norm: group}}
data: {name: masks, batch_size: 4, workers: 0, fold: 1, folds: 3}
task: {name: segmentation}
optimizer: {name: sgd, lr: 0.1}
schedule: {name: constant, length: 1step}
precision: float64
"""


def folder(place: Path) -> Path:
    """Nine images of 16 bits, 12 x 10, with two classes."""
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (place / name).mkdir(parents=True)
    for number in range(9):
        pixels = random.integers(0, 2000 + 900 * number, (12, 10)).astype(np.uint16)
        Image.fromarray(pixels).save(place / "images" / f"{number}.png")
        Image.fromarray((pixels > 1000).astype(np.uint8)).save(place / "masks" / f"{number}.png")
    return place


def config(place: Path, intensity: str) -> RunConfig:
    return parse_config(CONFIG, [f"data.path={place}", f"data.intensity={intensity}"])


def first_batch(mesh: Mesh, place: Path, intensity: str) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    parts = assemble(config(place, intensity), mesh)
    batch = next(training_batches(parts, first=0, last=1))
    return batch.index.tolist(), *parts.preparation(train=True)(batch)


@pytest.mark.parametrize("intensity", ["percentiles", "zscore", "image", "{window: {center: 900, width: 500}}"])
def test_tiles_together_are_the_whole_image_scaled_as_one_device_scales_it(tmp_path, intensity):
    index, image, labels = first_batch(Mesh(Plan(), World(), CPU), folder(tmp_path), intensity)
    assert image.shape == (4, 1, 12, 10) and image.std() > 0.1 and set(labels.unique().tolist()) == {0, 1}
    found = on_ranks(2, first_batch, tmp_path, intensity, plan=Plan(space=[2, 1]))
    assert [one[0] for one in found] == [index] * 2
    assert torch.equal(torch.cat([one[1] for one in found], 2), image)
    assert torch.equal(torch.cat([one[2] for one in found], 1), labels)


def refused(mesh: Mesh, place: Path) -> str:
    with pytest.raises(AgreedError) as caught:
        mesh.together(lambda: assemble(config(place, "zscore"), mesh))
    return str(caught.value)


def test_a_damaged_image_ends_all_ranks_before_the_first_step(tmp_path):
    path = folder(tmp_path) / "images/4.png"
    path.write_bytes(path.read_bytes()[:90])
    told = on_ranks(2, refused, tmp_path)
    assert told[0] == told[1] and f"cannot read the image {path}" in told[0]


def test_the_numbers_are_stored_and_used_again(tmp_path):
    place, run = folder(tmp_path / "data"), tmp_path / "run"
    run.mkdir()
    parts = assemble(config(place, "percentiles"), Mesh(Plan(), World(), CPU))
    write_model_of(run, parts)
    stored = read_model(run)
    assert stored.intensity == parts.dataset.intensity and stored.dtype == torch.uint16 and stored.intensity.clip is not None
    assert '"percentiles"' in (run / STATISTICS).read_text()
    assert any("pixels are scaled from low [" in reason for reason in parts.reasons)
    Image.fromarray(np.full((12, 10), 65535, dtype=np.uint16)).save(place / "images/0.png")
    again = assemble(config(place, "percentiles"), Mesh(Plan(), World(), CPU), stored=stored)
    assert again.dataset.intensity == stored.intensity
