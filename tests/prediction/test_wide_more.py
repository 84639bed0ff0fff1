"""Probabilities, mirror images, overlays and outlines by window: what the whole image has, on any ranks."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import on_ranks
from wide_scene import PLACE, Stopped, as_geotiff, as_zarr, labels_in, patched, predicted, reason, stop_after

from widefield.data.spatial.resampling import GridMap
from widefield.image_files import open_image
from widefield.prediction import wide_files
from widefield.prediction.raw_labels import RawLabels
from widefield.prediction.session import Predicted, predict_files
from widefield.prediction.wide_files import WideFiles
from widefield.prediction.wide_source import WideSource
from widefield.prediction.wishes import Wishes

rasterio = pytest.importorskip("rasterio")
pytestmark = pytest.mark.usefixtures("always_wide")
ALL = {"probabilities": "npy", "overlays": True, "outlines": True}


@pytest.fixture(scope="module")
def geotiff(scene, tmp_path_factory) -> Path:
    return as_geotiff(np.load(scene), tmp_path_factory.mktemp("placed") / "scene.tif")


@pytest.fixture(scope="module", params=[False, True], ids=["", "flips"])
def wholes(request, run, scene, tmp_path_factory) -> tuple[bool, np.ndarray, np.ndarray]:
    """Whether mirror images are averaged, labels, and probabilities of float16, without windows."""
    output = tmp_path_factory.mktemp("wholes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("widefield.prediction.wide.WIDE_PIXELS", 2**40)
        found = predicted(run, scene, output, flips=request.param, probabilities="npy")
    labels = np.asarray(Image.open(found.answers[0].labels))
    return request.param, labels, np.load(output / "probabilities" / "scene.npy")


def likely_in(output: Path, name: str = "scene.tif") -> np.ndarray:
    with open_image(output / "probabilities" / name) as image:
        return image.read()


def test_probabilities_are_those_of_the_whole(run, geotiff, wholes, tmp_path):
    flips, labels, likely = wholes
    found = predicted(run, geotiff, tmp_path, flips=flips, probabilities="npy")
    assert np.array_equal(labels_in(found), labels)
    by_window = likely_in(tmp_path)
    assert by_window.dtype == np.float32 and by_window.shape == likely.shape
    np.testing.assert_allclose(by_window, likely.astype(np.float32), rtol=0, atol=2**-12)  # the whole's are float16
    np.testing.assert_allclose(by_window.sum(0), 1, atol=2**-20)
    assert (by_window.max(0) > by_window.min(0) + 0.01).mean() > 0.5, "too easy"


@pytest.mark.long
def test_mirror_images_change_something(run, geotiff, tmp_path):
    predicted(run, geotiff, tmp_path / "a", probabilities="npy")
    predicted(run, geotiff, tmp_path / "b", probabilities="npy", flips=True)
    assert np.abs(likely_in(tmp_path / "a") - likely_in(tmp_path / "b")).max() > 1e-3


def test_probabilities_lie_where_the_scene_lies(run, geotiff, tmp_path):
    predicted(run, geotiff, tmp_path, probabilities="npy")
    with rasterio.open(geotiff) as image, rasterio.open(tmp_path / "probabilities" / "scene.tif") as file:
        assert (file.crs, file.transform, file.shape, file.count) == (image.crs, image.transform, image.shape, 11)
        assert np.isnan(file.nodata) and file.descriptions[:2] == ("background", "0")
        assert file.tags()["CLASSES"].startswith('["background", "0"') and file.interleaving.name == "band"


@pytest.mark.long
def test_probabilities_of_16_bits_are_steps(run, geotiff, tmp_path):
    predicted(run, geotiff, tmp_path / "float", probabilities="npy")
    predicted(run, geotiff, tmp_path / "steps", probabilities="png")
    with rasterio.open(tmp_path / "steps" / "probabilities" / "scene.tif") as file:
        assert file.dtypes[0] == "uint16" and file.nodata == 65535
        found = file.read() * file.scales[0]
    np.testing.assert_allclose(found, likely_in(tmp_path / "float"), rtol=0, atol=0.51 / 65534)  # half a step, and float32


def test_pixels_of_nodata_have_no_probability(run, scene, tmp_path):
    pixels = np.maximum(np.load(scene), 1)
    pixels[:, :40, :90] = 0
    path = as_geotiff(pixels, tmp_path / "scene.tif", nodata=0)
    for kind in ("npy", "png"):
        predicted(run, path, tmp_path / kind, probabilities=kind)
        found = likely_in(tmp_path / kind)
        empty = np.isnan(found) if kind == "npy" else found == 65535
        assert empty[:, :40, :90].all() and not empty[:, 40:].any() and not empty[:, :, 90:].any()


def _on_ranks(mesh, run: Path, scene: Path, output: Path, overrides: list[str], wishes: Wishes) -> Predicted:
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests afterwards
        patched(patch)
        drawn = str(run / "drawn.safetensors")
        return predict_files(run, [scene], overrides, mesh.world, output=output, wishes=wishes, weights=drawn)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "overrides", "flips"),
    [(2, ["mesh.space=[2,1]"], False), (2, ["mesh.space=[1,2]"], True), (3, ["mesh.space=[3,1]"], True)],
)
def test_ranks_write_what_one_writes(run, geotiff, tmp_path, ranks, overrides, flips):
    """To the bit: the network runs in float64 here, and its last bits are lost in float32."""
    predicted(run, geotiff, tmp_path / "one", **ALL, flips=flips)
    on_ranks(ranks, _on_ranks, run, geotiff, tmp_path / "out", overrides, Wishes(**ALL, flips=flips))
    assert np.array_equal(likely_in(tmp_path / "out"), likely_in(tmp_path / "one"))
    for name in ("scene.geojson", "overlays/scene.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_a_command_that_was_stopped_goes_on_with_its_probabilities(run, geotiff, tmp_path, monkeypatch):
    predicted(run, geotiff, tmp_path / "one", probabilities="npy")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            predicted(run, geotiff, tmp_path / "out", probabilities="npy")
    assert not (tmp_path / "out" / "probabilities").exists()
    written = stop_after(monkeypatch, 100)
    predicted(run, geotiff, tmp_path / "out", probabilities="npy")
    assert written == [9 - 4] and np.array_equal(likely_in(tmp_path / "out"), likely_in(tmp_path / "one"))
    assert not list((tmp_path / "out" / ".predictions" / "wide").glob("*"))


def test_probabilities_that_became_shorter_are_made_again(run, geotiff, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            predicted(run, geotiff, tmp_path / "out", probabilities="npy")
    (place,) = (tmp_path / "out" / ".predictions" / "wide").iterdir()
    (place / "probabilities.raw").write_bytes(b"")
    written = stop_after(monkeypatch, 100)
    predicted(run, geotiff, tmp_path / "out", probabilities="npy")
    assert written == [9]


def test_a_disk_without_place_for_probabilities_is_told_before_anything_is_computed(run, geotiff, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)  # labels take 25 KiB, probabilities 1.1 MiB
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    written = stop_after(monkeypatch, 0)
    words = reason(run, geotiff, tmp_path / "out", probabilities="npy")
    assert "are needed for the labels and twice the probabilities" in words and "977 KiB are free" in words and written == [0]


@pytest.mark.parametrize("format", ["zarr", "npy"])
def test_other_formats_have_probabilities_of_their_own(run, scene, geotiff, tmp_path, format):
    pixels, path = np.load(scene), tmp_path / f"scene.{format}"
    if format == "zarr":
        as_zarr(pixels, path)
    else:
        np.save(path, pixels)
    predicted(run, geotiff, tmp_path / "tif", probabilities="npy")
    predicted(run, path, tmp_path / "out", probabilities="npy")
    stored = np.load(tmp_path / "out" / "probabilities" / "scene.npy") if format == "npy" else None
    found = likely_in(tmp_path / "out", path.name) if stored is None else stored
    assert np.array_equal(found, likely_in(tmp_path / "tif"))


# ---------------------------------------------------------------------------------------------- overlays and outlines


def test_outlines_are_the_labels_where_the_scene_lies(run, geotiff, whole, tmp_path):
    from rasterio.features import rasterize

    predicted(run, geotiff, tmp_path, outlines=True)
    tree = json.loads((tmp_path / "scene.geojson").read_text())
    assert tree["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32632"
    shapes = [(feature["geometry"], feature["properties"]["number"]) for feature in tree["features"]]
    assert np.array_equal(rasterize(shapes, whole.shape, fill=255, transform=rasterio.Affine(*PLACE), dtype="uint8"), whole)


def test_outlines_of_an_image_that_is_read_as_a_whole_are_in_pixels(run, scene, whole, tmp_path, monkeypatch):
    from rasterio.features import rasterize

    monkeypatch.setattr("widefield.prediction.wide.WIDE_PIXELS", 2**40)
    found = predicted(run, scene, tmp_path, outlines=True)
    assert found.answers[0].labels.endswith(".png")
    tree = json.loads((tmp_path / "scene.geojson").read_text())
    shapes = [(feature["geometry"], feature["properties"]["number"]) for feature in tree["features"]]
    assert "crs" not in tree and np.array_equal(rasterize(shapes, whole.shape, fill=255, dtype="uint8"), whole)


def test_pixels_of_nodata_have_no_outlines(run, scene, tmp_path):
    pixels = np.maximum(np.load(scene), 1)
    pixels[:, :40, :90] = 0
    found = predicted(run, as_geotiff(pixels, tmp_path / "scene.tif", nodata=0), tmp_path / "out", outlines=True)
    numbers = {one["properties"]["number"] for one in json.loads((tmp_path / "out" / "scene.geojson").read_text())["features"]}
    assert numbers == set(np.unique(labels_in(found)).tolist()) - {255}


@pytest.mark.parametrize("side", [2048, 100, 40])
def test_an_overlay_is_a_picture_of_bounded_size(run, geotiff, scene, whole, tmp_path, monkeypatch, side):
    monkeypatch.setattr(wide_files, "OVERLAY_SIDE", side)
    monkeypatch.setattr(wide_files, "BAND_BYTES", 4 * 170 * 20)
    predicted(run, geotiff, tmp_path, overlays=True)
    picture = np.asarray(Image.open(tmp_path / "overlays" / "scene.png"))
    factor = {2048: 1, 100: 2, 40: 8}[side]
    assert picture.shape == (-(-150 // factor), -(-170 // factor), 3) and max(picture.shape) <= max(side, 170)
    if factor == 1:
        grey = np.repeat(np.load(scene)[0][..., None], 3, axis=2)
        assert np.array_equal(picture[whole == 0], grey[whole == 0]) and (picture[whole > 0] != grey[whole > 0]).any()


def test_an_overlay_shows_all_files_of_a_case(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 48), dtype=np.uint8)
    files = [tmp_path / f"case_000{number}.npy" for number in range(3)]
    for file, plane in zip(files, pixels, strict=True):
        np.save(file, plane)
    raw = RawLabels(tmp_path / "wide", (40, 48), "uint8")
    raw.begin({})
    raw.write((slice(0, 40), slice(0, 48)), np.zeros((40, 48), dtype=np.uint8))
    source = WideSource(tuple(files), 3, torch.uint8, GridMap((40, 48), (40, 48)))
    with open_image(files[0]) as image:
        written = WideFiles({"overlay": tmp_path / "case.png"}, image, ("none", "ink"), 255, source, {}).write(raw)
    assert written[0] == 40 * 48
    assert np.array_equal(np.asarray(Image.open(tmp_path / "case.png")), pixels.transpose(1, 2, 0))


def _heard_on_ranks(mesh, run: Path, scene: Path, output: Path) -> int:
    """How often a rank exchanged something while the first wrote a file slowly."""
    write, count, least = wide_files.write_outlines, [0], type(mesh).least_of_copy

    def slowly(*given):
        count[0] = 0
        time.sleep(0.5)
        write(*given)

    def counted(self, numbers):
        count[0] += 1
        return least(self, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide_files, "write_outlines", slowly)
        patch.setattr(type(mesh), "least_of_copy", counted)
        found = _on_ranks(mesh, run, scene, output, ["mesh.space=[2,1]"], Wishes(outlines=True))
    assert not found.lefts
    return count[0]


@pytest.mark.long
def test_ranks_hear_from_each_other_while_the_first_writes_files(run, geotiff, tmp_path):
    """A message that takes longer than minutes is an error, and a large file may take longer."""
    assert min(on_ranks(2, _heard_on_ranks, run, geotiff, tmp_path)) > 5


def test_nothing_of_a_file_that_the_disk_refuses_is_left(run, geotiff, tmp_path, monkeypatch):
    def refuses(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wide_files, "write_outlines", refuses)
    assert "No space left on device" in predicted(run, geotiff, tmp_path, outlines=True).lefts[0].reason
    assert not list(tmp_path.glob("*.geojson")) and not list(tmp_path.glob(".scene*"))
