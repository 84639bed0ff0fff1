"""The guide's pages on fields, from a person's own files to predictions: every command and recipe as it is on the page."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from command import record, run

from widefield.data.formats.slide import Slides
from widefield.image_files import open_image

GUIDE = Path(__file__).parent.parent.parent / "docs/guide"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUMOUR_PX = 40
SHORT = ("schedule.length=1ep", "schedule.warmup=1step", "evaluate.every=1ep")
"""The page's recipe of whole slides is longer; what is asked here is whether its three commands give the same."""


def recipes_of(page: str, folder: Path) -> None:
    """Write the page's recipes, each under the name in its first line."""
    for language, text in FENCE.findall((GUIDE / page).read_text()):
        if language == "yaml":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)


def commands_of(page: str) -> list[list[str]]:
    blocks = [text for language, text in FENCE.findall((GUIDE / page).read_text()) if language == "bash"]
    lines = [shlex.split(line, comments=True) for text in blocks for line in text.splitlines()]
    return [words[1:] for words in lines if words and words[0] == "widefield"]


def write_tiff(path: Path, planes: np.ndarray, **about) -> None:
    """Planes (C, H, W), or a mask (H, W), in blocks, with one smaller level."""
    tifffile = pytest.importorskip("tifffile")
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.moveaxis(planes, 0, -1) if len(planes) == 3 else planes
    kind = {"tile": (64, 64), "compression": "zlib", "photometric": "rgb" if pixels.ndim == 3 else "minisblack"}
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, subifds=1, **kind, **about)
        file.write(pixels[::2, ::2], subfiletype=1, **kind)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """12 slides of two sizes, half of them with a tumour, of 6 patients, and regions with masks of the tumours."""
    folder = tmp_path_factory.mktemp("study")
    rows = []
    for number in range(12):
        slides = Slides("train", 12, 0, [(261, 243), (230, 290)][number % 3 == 0], TUMOUR_PX)
        image, label = slides.read(number)
        write_tiff(folder / f"slides/{'abcdefghijkl'[number]}.tif", image.numpy())
        split = "train" if number < 8 else "val"
        rows.append([f"slides/{'abcdefghijkl'[number]}.tif", ["normal", "tumour"][label], f"p{number // 2}", split])
        if label:
            middle = slides._tumour(_key_of(number))
            far = sum((at - place) ** 2 for at, place in zip(np.indices(image.shape[1:]), middle, strict=True))
            write_tiff(folder / f"regions/images/r{number}.tif", image.numpy())
            write_tiff(folder / f"regions/masks/r{number}.tif", (far < TUMOUR_PX**2).astype(np.uint8))
    with (folder / "slides.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "label", "patient", "split"], *rows])
    return folder


def _key_of(number: int) -> int:
    from widefield.data.transforms import seed_of

    return seed_of(0, "slide", "train", number)


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.alone
def test_the_commands_of_pathology_lead_from_slides_to_a_classifier_and_maps(study):
    recipes_of("pathology.md", study)
    said = [run(*words, *(SHORT if "slides.yaml" in words else ()), cwd=study) for words in commands_of("pathology.md")]
    assert len(said) == 8 and "data.tissue: " in said[1]
    losses = [[line["loss"] for line in record(study / "runs" / name, "step")] for name in ("slides", "streamed", "shared")]
    assert len(losses[0]) == len(losses[1]) == len(losses[2]) > 0
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-4) and losses[2][0] == pytest.approx(losses[0][0], rel=1e-4)
    with (study / "answers/predictions.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12
    maps = sorted((study / "maps").glob("r*"))
    assert len(maps) == 6 and record(study / "runs/regions", "evaluation")[-1]["metrics"]["dice"] > 80
    assert (study / "runs/slides/tissue.json").is_file() and record(study / "runs/slides", "read")


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    """8 planes of two channels of 16 bits, with bright discs, as OME-TIFF, and their masks."""
    tifffile = pytest.importorskip("tifffile")
    folder = tmp_path_factory.mktemp("cells")
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(8):
        rows, columns = np.indices((150, 131))
        mask = np.zeros((150, 131), dtype=np.uint8)
        for row, column in random.integers(10, 120, (9, 2)):
            mask[(rows - row) ** 2 + (columns - column) ** 2 < 80] = 1
        noise = random.normal(0, 60, (2, 150, 131))
        planes = (np.stack([400 + 900 * mask.astype(int), 3000 + 200 * mask.astype(int)]) + noise).astype(np.uint16)
        about = {"axes": "CYX", "Channel": {"Name": ["nuclei", "actin"]}, "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
        tifffile.imwrite(folder / f"images/{number}.ome.tif", planes, metadata=about, tile=(32, 32), photometric="minisblack")
        tifffile.imwrite(folder / f"masks/{number}.tif", mask, tile=(32, 32), photometric="minisblack")
    (folder / "images/0.ome.tif").rename(folder / "images/a.ome.tif")
    (folder / "masks/0.tif").rename(folder / "masks/a.tif")
    return folder


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.alone
def test_the_commands_of_microscopy_lead_from_planes_to_labels(cells):
    recipes_of("microscopy.md", cells)
    said = [run(*words, cwd=cells) for words in commands_of("microscopy.md")]
    assert len(said) == 4 and "nuclei" in said[0]
    assert record(cells / "runs/cells", "evaluation")[-1]["metrics"]["dice"] > 90
    labels = [path for path in sorted((cells / "labels").glob("*")) if path.stem.startswith("a")]
    assert labels
    with open_image(labels[0]) as found:
        assert found.info.size == (150, 131)
