"""Is every level of the pyramids what the whole array gives?"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from viewer.pages import data, level, shown, write

from widefield.image_files import open_image
from widefield.viewer.pyramid import Place, TileGrid, walk
from widefield.viewer.reading import REGION_BYTES, RegionReader

SIZE = (1301, 700)
RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (3, *SIZE), dtype=np.uint8)
TRUTH = (RNG.random(SIZE) < 0.3).astype(np.uint8) * 2
PREDICTION = np.where(RNG.random(SIZE) < 0.01, 1, TRUTH).astype(np.uint8)
TRUTH[:40, :40] = 255  # no class


def sums(array: np.ndarray, number: int) -> np.ndarray:
    """Over the pixels (..., rows, columns) that each pixel of a level covers."""
    starts = [np.arange(0, extent, 2**number) for extent in array.shape[-2:]]
    return np.add.reduceat(np.add.reduceat(array.astype(np.float64), starts[0], axis=-2), starts[1], axis=-1)


def means(array: np.ndarray, number: int) -> np.ndarray:
    return sums(array, number) / sums(np.ones(array.shape[-2:]), number)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write(tmp_path_factory.mktemp("viewer"), IMAGE, prediction=PREDICTION, truth=TRUTH)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_pixel_of_the_image_is_the_mean_of_those_that_it_covers(page, number):
    wanted = np.floor(means(IMAGE, number) + 0.5)
    assert np.array_equal(level(page, "image", number, SIZE), np.moveaxis(wanted, 0, -1))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_pixel_of_disagreement_is_zero_only_if_none_differs_and_else_their_share(page, number):
    wrong = (PREDICTION != TRUTH) & (TRUTH != 255)
    found = level(page, "disagreement", number, SIZE)
    assert np.array_equal(found > 0, sums(wrong, number) > 0) and (found > 0).any()
    shares = np.floor(255 * means(wrong, number) + 0.5)
    assert np.array_equal(found, np.where(found > 0, np.maximum(shares, 1), 0))


def most_frequent(labels: np.ndarray, number: int) -> np.ndarray:
    """By counting, level after level; of equal counts the greatest number.  The last pixel of an odd extent counts twice."""
    for _ in range(number):
        labels = np.pad(labels, [(0, extent % 2) for extent in labels.shape], mode="edge")
        counts = np.stack([sums(labels == one, 1) for one in range(labels.max() + 1)][::-1])
        labels = labels.max() - counts.argmax(0)
    return labels


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("name", "labels"), [("prediction", PREDICTION), ("truth", TRUTH)])
def test_a_pixel_of_labels_is_the_most_frequent_of_four(page, name, labels, number):
    stored = np.where(labels == 255, 0, labels.astype(int) + 1)
    assert np.array_equal(level(page, name, number, SIZE), most_frequent(stored, number))


def test_probabilities_are_means_for_each_class(tmp_path):
    likely = RNG.random((3, 600, 530)).astype(np.float16)
    page = write(tmp_path, IMAGE[:, :600, :530], probabilities=likely)
    assert data(page)["scenes"][0]["layers"] == ["image", "probability-0", "probability-1", "probability-2"]
    for number in (0, 1):
        for one in range(3):
            wanted = np.floor(255 * means(likely[one], number) + 0.5)
            assert np.array_equal(level(page, f"probability-{one}", number, (600, 530)), wanted)


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_a_voxel_without_probability_in_nifti_is_shown_as_0(tmp_path, dtype):
    """Steps of 16 bits are read with their scale, as floating-point numbers: that of no probability is above 1 then."""
    pytest.importorskip("nibabel")
    from widefield.geometry.box import slices
    from widefield.image_files import open_image
    from widefield.image_files.band_image import BandImage
    from widefield.image_files.info import ImageInfo, one_level
    from widefield.image_files.label_files import nifti
    from widefield.viewer.likely import BandProbabilities

    likely = RNG.random((2, 3, 6, 5)).astype(np.float32)
    likely[0, 0, 0] = 1
    stored = likely if dtype == "float32" else np.rint(likely * np.float64(65534)).astype(np.uint16)
    stored[:, 1:, 2:4] = np.nan if dtype == "float32" else 65535
    info = ImageInfo("NumPy", "", "ZYX", 1, "uint8", one_level((3, 6, 5)))
    bands = BandImage(tmp_path / "scan.npy", info, dtype, ("a", "b"), stored.flat[-1], 1.0 if dtype == "float32" else 1 / 65534)
    nifti.write_bands(tmp_path / "likely.nii", bands, lambda number, box: stored[number][slices(box)])
    with open_image(tmp_path / "likely.nii") as file:
        found = BandProbabilities(file)[slice(None), slice(0, 3), slice(0, 6), slice(0, 5)]
    likely[:, 1:, 2:4] = 0
    np.testing.assert_allclose(found, likely, rtol=0, atol=1e-5)
    assert (found[:, 1:, 2:4] == 0).all() and (found[0, 0, 0] == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_probabilities_in_a_file_of_bands_are_shown_as_an_array_is(tmp_path, dtype):
    rasterio = pytest.importorskip("rasterio")
    from widefield.viewer import Viewer, open_scene

    likely = RNG.random((3, 60, 53)).astype(np.float32)
    likely[:, :5, :7] = np.nan
    stored = likely if dtype == "float32" else np.where(np.isnan(likely), 65535, np.rint(likely * 65534)).astype(dtype)
    place = rasterio.Affine(10, 0, 5e5, 0, -10, 4e6)
    about = {"driver": "GTiff", "count": 3, "height": 60, "width": 53, "crs": "EPSG:32632", "transform": place}
    with rasterio.open(tmp_path / "likely.tif", "w", dtype=dtype, **about) as file:
        file.write(stored)
    np.save(tmp_path / "image.npy", IMAGE[:, :60, :53])
    scene = open_scene("scene", tmp_path / "image.npy", {}, tmp_path / "likely.tif")
    Viewer([scene], shown()).write(tmp_path / "page")
    for one in range(3):
        wanted = np.floor(255 * np.nan_to_num(likely[one]).astype(np.float64) + 0.5)
        found = level(tmp_path / "page", f"probability-{one}", 0, (60, 53)).astype(int)
        assert np.abs(found - wanted).max() <= (0 if dtype == "float32" else 1), "steps of 1 / 65,534 round otherwise"
    np.save(tmp_path / "small.npy", IMAGE[:, :50, :53])
    with pytest.raises(ValueError, match="likely.tif has 1 x 60 x 53 pixels"):
        open_scene("scene", tmp_path / "small.npy", {}, tmp_path / "likely.tif")


def test_pixels_without_data_are_transparent_and_left_out_of_means(tmp_path):
    image = RNG.random((1, 1100, 600)).astype(np.float32)
    image[:, :513, :513] = np.nan
    image[:, 1000, 300] = np.nan
    page = write(tmp_path, image, settings=shown(limits=(0.0, 1.0)))
    assert data(page)["same"]["0/image/0-0/0/0_0"] == -1
    holds = sums(~np.isnan(image[0]), 2)
    wanted = sums(np.nan_to_num(image[0]), 2) / np.maximum(holds, 1)
    found = level(page, "image", 2, (1100, 600))
    assert np.array_equal(found[..., 1] == 0, holds == 0) and (holds == 0).sum() == 128**2
    assert np.array_equal(found[..., 0], np.floor(255 * wanted + 0.5))


def test_slices_of_a_volume_are_its_planes_along_all_three_axes(tmp_path):
    volume = RNG.integers(0, 256, (1, 5, 40, 30), dtype=np.uint8)
    truth, prediction = (RNG.integers(0, 4, volume.shape[1:], dtype=np.uint8) for _ in range(2))
    page = write(tmp_path, volume, truth=truth, prediction=prediction, settings=shown(planes=True))
    for plane, size in ((0, (40, 30)), (1, (5, 30)), (2, (5, 40))):
        for at in range(volume.shape[1 + plane]):
            assert np.array_equal(level(page, "image", 0, size, at=f"{plane}-{at}"), volume[0].take(at, plane))
            assert np.array_equal(level(page, "truth", 0, size, at=f"{plane}-{at}"), truth.take(at, plane) + 1)
            wrong = (truth != prediction).take(at, plane)
            assert np.array_equal(level(page, "disagreement", 0, size, at=f"{plane}-{at}"), 255 * wrong)


def test_coarser_levels_alone_are_the_same_tiles(page, tmp_path):
    coarse = write(tmp_path, IMAGE, prediction=PREDICTION, truth=TRUTH, settings=shown(level=1))
    assert not (coarse / "tiles/0/image/0-0/0").exists()
    for path in (coarse / "tiles").rglob("*.*"):
        assert path.read_bytes() == (page / path.relative_to(coarse)).read_bytes()
    one, other = (data(folder)["scenes"][0] for folder in (page, coarse))
    assert (one["wrong"], one["worst"], one["legend"]) == (other["wrong"], other["worst"], other["legend"])


def test_every_tile_of_level_0_is_read_once_and_few_are_in_memory():
    grid, reads, alive, most = TileGrid(512 * 40, 512 * 40), [], weakref.WeakSet(), 0

    class Sums(np.ndarray):
        """Arrays that can be counted: those of NumPy have no hash."""

        __hash__ = object.__hash__

    def read(place):
        nonlocal most
        reads.append(place)
        sums = np.ones((512, 512), np.float32).view(Sums)
        alive.add(sums)
        most = max(most, len(alive))
        return {"sum": sums}

    places = [place for place, node in walk(grid, read, frozenset()) if node["sum"].flat[0] == 4**place.level]
    assert len(reads) == len(set(reads)) == 1600 and len(places) == len(set(places)) == grid.tiles()
    assert places[-1] == Place(grid.levels - 1, 0, 0) and most <= 4


@pytest.mark.parametrize("block", [(1, 1), (64, 64), (1, 5000), (2000, 2000)])
def test_blocks_of_a_file_are_decoded_about_once(tmp_path, block):
    """With blocks that are whole rows, windows in the order of a walk would otherwise decode every row several times."""
    np.save(tmp_path / "a.npy", np.broadcast_to(np.arange(5000, dtype=np.uint8), (3000, 5000)))
    image = open_image(tmp_path / "a.npy")
    (only,) = image.info.levels
    object.__setattr__(image.info, "levels", (type(only)(only.size, block, only.scale),))
    reader, grid = RegionReader(image), TileGrid(3000, 5000)
    for _ in walk(grid, lambda place: {"x": reader.read(0, *grid.window(place))[0][0]}, frozenset({"x"})):
        pass
    assert image.bytes_asked == 3000 * 5000 < REGION_BYTES
    assert image.bytes_decoded <= (2.2 if block == (2000, 2000) else 1.1) * 3000 * 5000
