"""The page on remote sensing: its commands, in its order, on small scenes with polygons."""

from __future__ import annotations

import glob
import json
import re
import shlex
from pathlib import Path

import command
import numpy as np
import pytest

from widefield import cli
from widefield.config import DataConfig
from widefield.data import open_dataset
from widefield.geometry.box import slices
from widefield.outlines.geojson import Legend, write_outlines
from widefield.outlines.place import Georeference
from widefield.outlines.tracing import traced

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.long
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "remote_sensing.md"
SMALL = [
    "schedule.length=3step", "schedule.warmup=1step", "model.options.widths=[4,6]", "log.tensorboard=false", "data.workers=0",
]  # fmt: skip
PLACE = (10.0, 0.0, 500_000.0, 0.0, -10.0, 4_600_000.0)


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == "widefield"]


def save_scene(path: Path, pixels: np.ndarray) -> None:
    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2], "dtype": "uint16", "nodata": 0}
    with rasterio.open(path, "w", driver="GTiff", crs="EPSG:32632", transform=rasterio.Affine(*PLACE), **about) as file:
        file.write(pixels)


@pytest.fixture
def scenes(tmp_path, monkeypatch) -> Path:
    """Five scenes with polygons, and a new one."""
    monkeypatch.chdir(tmp_path)
    made = open_dataset(DataConfig(name="scene", options={"size": [96, 128], "scenes": [5, 1], "feature_px": 16}))
    legend = Legend(("water", "forest", "field", "built"), ((0, 0, 0),) * 4)
    place = Georeference(np.array([*np.reshape(PLACE, (2, 3)), [0, 0, 1]]), rasterio.crs.CRS.from_epsg(32632).to_wkt())
    for folder in ("images", "masks"):
        (tmp_path / "scenes" / folder).mkdir(parents=True)
    for number in range(5):
        image, labels = (one.numpy() for one in made.train.read(number))
        save_scene(tmp_path / "scenes" / "images" / f"{number}.tif", image)
        regions = traced(lambda box, labels=labels: labels[slices(box)], labels.shape, keep=lambda one: one < 4)
        write_outlines(tmp_path / "scenes" / "masks" / f"{number}.geojson", regions, legend, place)
    save_scene(tmp_path / "new.tif", made.evaluate.read(0)[0].numpy())
    return tmp_path


def test_the_commands_of_the_page_make_maps(scenes, capsys):
    ran = []
    for words in commands():
        words = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
        if words[0] == "train":
            command.run(*words, *SMALL, cwd=scenes)
        else:
            assert cli.main(words) == 0, capsys.readouterr()
        ran.append(words[0])
    assert ran == ["inspect", "train", "predict", "predict", "view"]
    assert "EPSG" in capsys.readouterr().out or (scenes / "maps").is_dir()
    _check_maps(scenes)


def _check_maps(place: Path) -> None:
    from rasterio.features import rasterize

    with rasterio.open(place / "maps" / "new.tif") as labels, rasterio.open(place / "new.tif") as scene:
        assert (labels.crs, labels.transform, labels.shape) == (scene.crs, scene.transform, scene.shape)
        stored, empty = labels.read(1), (scene.read() == 0).all(0)
        assert (stored[empty] == 255).all() and empty.any() and (stored[~empty] < 5).all()
        tree = json.loads((place / "maps" / "new.geojson").read_text())
        shapes = [(one["geometry"], one["properties"]["number"]) for one in tree["features"]]
        assert np.array_equal(rasterize(shapes, stored.shape, fill=255, transform=scene.transform, dtype="uint8"), stored)
    with rasterio.open(place / "maps" / "probabilities" / "new.tif") as likely:
        assert likely.count == 5 and likely.descriptions == ("background", "built", "field", "forest", "water")
        assert np.array_equal(np.isnan(likely.read(1)), empty)
    assert (place / "maps" / "overlays" / "new.png").is_file()
    apart = json.loads((place / "blended" / "predictions.json").read_text())["predictions"][0]["apart"]
    assert 0 <= apart["share"] <= 1 and apart["pixels"] == round(apart["share"] * (~empty).sum())
