"""Does a rank read its window, the halo of the augmentation and the blocks around, and no more, and is that told?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import record
from ranks import on_ranks

from widefield.comm.mesh import World
from widefield.config import parse_config
from widefield.quantity import size_text
from widefield.run import train

SIDE, BLOCK, STEPS = 128, 16, 4
CONFIG = """
model: {name: unet, options: {widths: [2, 3]}}
data: {name: masks, batch_size: 2, hold_out: 0.25}
task: {name: segmentation}
optimizer: {name: sgd, lr: 0.05}
schedule: {name: constant, length: 4step}
evaluate: {every: 4step}
precision: float64
log: {tensorboard: false}
"""
PIXEL = 3 + 1
"""Bytes of a pixel and its label."""
HALO = 8
"""Pixels that a rotation by 3 degrees and its interpolation reach: 90 px from the middle times sin 3 degrees, and 2."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Four images with masks, as TIFFs in blocks of 16 x 16 pixels."""
    tifffile = pytest.importorskip("tifffile")
    folder = tmp_path_factory.mktemp("scenes")
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(4):
        image = random.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        about = {"tile": (BLOCK, BLOCK), "compression": "zlib"}
        tifffile.imwrite(folder / f"images/{number}.tif", image, photometric="rgb", **about)
        tifffile.imwrite(folder / f"masks/{number}.tif", image[..., 0] // 128, photometric="minisblack", **about)
    return folder


def config_of(scenes: Path, settings: list[str]):
    return parse_config(CONFIG, [f"data.path={scenes}", *settings])


def go(mesh, folder: Path, scenes: Path, settings: list[str]) -> str:
    return train(config_of(scenes, settings), folder, mesh.world).reason


def reads(folder: Path) -> list[dict]:
    return record(folder, "read")[-1]["ranks"]


def most(rows: int, columns: int, *, halo: int = 0) -> int:
    """Bytes of a window with the halo and the blocks around."""
    return (rows + 2 * halo + 2 * (BLOCK - 1)) * (columns + 2 * halo + 2 * (BLOCK - 1)) * PIXEL


KINDS = {
    "halves": ([], SIDE // 2, SIDE, 0),
    "halves, rotated": (["data.augment=[{RandomRotation: {degrees: 3}}]"], SIDE // 2, SIDE, HALO),
    "halves of patches": (["data.patches={size: [40, 36], draw: cover}"], 20, 36, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_reads_its_window_and_the_blocks_around(kind, scenes, tmp_path):
    settings, rows, columns, halo = KINDS[kind]
    settings = ["data.workers=0", *settings, "mesh.replicate=1", "mesh.space=[2,1]"]
    assert on_ranks(2, go, tmp_path / "run", scenes, settings) == ["complete"] * 2
    samples = sum(line["samples"] for line in record(tmp_path / "run", "step"))
    for of_rank in reads(tmp_path / "run"):
        assert of_rank["samples"] == samples and of_rank["epochs"] == record(tmp_path / "run", "step")[-1]["epoch"]
        assert 0 < of_rank["asked"] <= of_rank["decoded"] <= samples * most(rows, columns, halo=halo)
    if kind == "halves":
        assert [of_rank["asked"] for of_rank in reads(tmp_path / "run")] == [samples * rows * columns * PIXEL] * 2


def test_what_a_worker_reads_is_counted_by_its_rank(scenes, tmp_path):
    train(config_of(scenes, ["data.workers=1", "mesh.replicate=1"]), tmp_path / "run", World())
    (of_rank,) = reads(tmp_path / "run")
    assert of_rank == {"asked": 6 * SIDE * SIDE * PIXEL, "decoded": 6 * SIDE * SIDE * PIXEL, "samples": 6, "epochs": 2.0}


def test_the_report_has_a_line_for_each_rank(scenes, tmp_path):
    assert (
        on_ranks(2, go, tmp_path / "run", scenes, ["data.workers=0", "data.batch_size=3", "mesh.replicate=2"])
        == ["complete"] * 2
    )
    page = (tmp_path / "run/report.html").read_text()
    for rank, of_rank in enumerate(reads(tmp_path / "run")):
        each = size_text(of_rank["decoded"] / of_rank["samples"])
        assert f"rank {rank}: {size_text(of_rank['decoded'] / of_rank['epochs'])} an epoch, {each} a sample" in page
    assert sum(of_rank["decoded"] for of_rank in reads(tmp_path / "run")) == STEPS * 3 * SIDE * SIDE * PIXEL


def test_files_that_are_read_whole_cost_the_whole_and_generated_images_nothing(scenes, tmp_path):
    from PIL import Image

    for name in ("images", "masks"):
        (tmp_path / "png" / name).mkdir(parents=True)
        for number in range(4):
            random = np.random.default_rng(number)
            shape = (24, 20, 3) if name == "images" else (24, 20)
            pixels = random.integers(0, 256, shape).astype(np.uint8) // (1 if name == "images" else 128)
            Image.fromarray(pixels).save(tmp_path / "png" / name / f"{number}.png")
    settings = ["data.workers=0", "mesh.replicate=1", "data.patches={size: [8, 8], per_image: 2}"]
    train(config_of(tmp_path / "png", settings), tmp_path / "run", World())
    (of_rank,) = reads(tmp_path / "run")
    assert of_rank["decoded"] >= of_rank["samples"] * 24 * 20 * PIXEL and of_rank["asked"] < of_rank["decoded"]
    reasons = "\n".join(record(tmp_path / "run", "start")[0]["reasons"])
    assert "data.patches: 3 of 3 images are files of which no window is read alone" in reasons and "24 x 20 px" in reasons
    scene = ["data.name=scene", "data.path=null", "data.hold_out=null", "data.options={size: [24, 20], scenes: [2, 1]}"]
    train(config_of(scenes, ["data.workers=0", "mesh.replicate=1", *scene]), tmp_path / "generated", World())
    assert not record(tmp_path / "generated", "read")
    assert "Bytes of images read" not in (tmp_path / "generated/report.html").read_text()
