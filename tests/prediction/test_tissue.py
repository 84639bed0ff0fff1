"""Is a slide predicted as it is evaluated where a model pools over its tissue: with the tissue of its own?"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import widefield as wf
from widefield.comm.mesh import World
from widefield.config import parse_config
from widefield.data.formats.slide import Slides
from widefield.run import train

CONFIG = """
model: {name: resnet, options: {widths: [4, 6], blocks: 1, pooling: attention, attention: 4, tissue: true}}
data: {name: manifest, batch_size: 2, workers: 0, tissue: otsu}
optimizer: {name: sgd, lr: 0.05}
schedule: {name: constant, length: 3step}
evaluate: {every: 3step}
precision: float64
log: {tensorboard: false}
mesh: {replicate: 1}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """Six slides as TIFF in blocks, and a mask of each: its left half."""
    tifffile = pytest.importorskip("tifffile")
    folder = tmp_path_factory.mktemp("study")
    (folder / "masks").mkdir()
    rows = [["image", "label", "split"]]
    for number in range(6):
        image, label = Slides("train", 6, 0, (93, 71), 20).read(number)
        tifffile.imwrite(folder / f"{number}.tif", np.moveaxis(image.numpy(), 0, -1), tile=(16, 16), photometric="rgb")
        mask = np.zeros((31, 24), dtype=np.uint8)
        mask[:, :12] = 255
        Image.fromarray(mask).save(folder / f"masks/{number}.png")
        rows.append([f"{number}.tif", ["normal", "tumour"][label], "train" if number < 4 else "val"])
    with (folder / "slides.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def trained(study: Path, folder: Path, *settings: str) -> Path:
    config = parse_config(CONFIG, [f"data.path={study / 'slides.csv'}", *settings])
    assert train(config, folder, World()).reason == "complete"
    return folder


@pytest.mark.parametrize("how", ["otsu", "masks"])
def test_a_slide_is_predicted_as_it_is_evaluated(how, study, tmp_path):
    settings = [] if how == "otsu" else [f"data.tissue={study / 'masks'}"]
    run = trained(study, tmp_path / "run", *settings)
    found = wf.predict(run, [study / "4.tif", study / "5.tif"])
    told = [[dict(zip(one.classes, one.probabilities, strict=True)) for one in found][number] for number in range(2)]
    wanted = -sum(np.log(told[number][name]) for number, name in enumerate(["normal", "tumour"])) / 2
    assert wf.evaluate(run).loss == pytest.approx(wanted, rel=1e-6)


def test_a_slide_without_a_mask_is_left_out_by_name(study, tmp_path):
    run = trained(study, tmp_path / "run", f"data.tissue={study / 'masks'}")
    other = tmp_path / "other.tif"
    other.write_bytes((study / "4.tif").read_bytes())
    with pytest.raises(ValueError, match="has no mask for the slide .*other.tif; one named other.png is wanted"):
        wf.predict(run, [other])
