"""Place, nodata, masks, bands and overviews of GeoTIFFs, and what the settings of GDAL are for."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import rasterio
import tifffile
from rasterio.enums import ColorInterp, Resampling
from rasterio.env import get_gdal_config
from rasterio.transform import Affine

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.formats.geotiff import GeoTiffFile, gdal
from widefield.image_files.formats.tiff import TiffFile
from widefield.image_files.image_file import ImageFileError

PIXELS = (np.arange(3 * 60 * 80) % 251).astype(np.uint8).reshape(3, 60, 80)
PLACE = Affine(0.5, 0.0, 100.0, 0.0, -0.25, 50.0)


def write(path, pixels=PIXELS, *, after=lambda dataset: None, **options):
    about = {"count": len(pixels), "height": pixels.shape[1], "width": pixels.shape[2], "dtype": pixels.dtype.name, **options}
    with gdal(), rasterio.open(path, "w", driver="GTiff", **about) as dataset:
        dataset.write(pixels)
        after(dataset)
    return path


@pytest.mark.parametrize("point", ["AREA", "POINT"])
def test_the_affine_takes_row_and_column_of_a_pixels_centre_to_x_and_y(tmp_path, point):
    path = write(
        tmp_path / "a.tif", transform=PLACE, crs="EPSG:4326", after=lambda dataset: dataset.update_tags(AREA_OR_POINT=point)
    )
    info = open_image(path).info
    affine = np.array(info.affine)
    with rasterio.open(path) as dataset:
        for row, column in ((0, 0), (7, 11), (59, 79)):
            assert (affine @ (row, column, 1))[:2] == pytest.approx(dataset.xy(row, column))
    assert info.spacing == pytest.approx((0.25, 0.5)) and info.unit == "deg"
    assert "WGS 84" in info.world and rasterio.crs.CRS.from_wkt(info.world).to_epsg() == 4326


def test_a_turned_image_has_its_spacing_from_the_lengths_of_columns(tmp_path):
    turned = Affine.translation(500_000.0, 4_600_000.0) @ Affine.rotation(30.0) @ Affine.scale(2.0, -3.0)
    info = open_image(write(tmp_path / "a.tif", transform=turned, crs="EPSG:32632")).info
    assert info.spacing == pytest.approx((3.0, 2.0)) and info.unit == "m"


def test_an_image_with_nodata_and_no_place_has_neither_affine_nor_warning(tmp_path):
    info = open_image(write(tmp_path / "a.tif", nodata=0)).info
    assert info.affine == () and info.spacing == () and info.world == "" and info.unit == "" and info.nodata == (0, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "nodata", "expected"), [("float32", float("nan"), "nan"), ("int16", -9999, -9999), ("uint16", 7, 7)]
)
def test_pixels_that_hold_nothing_are_those_of_which_all_bands_are_nodata(tmp_path, dtype, nodata, expected):
    pixels = np.ones((2, 20, 30), dtype=dtype)
    pixels[:, 3, 4], pixels[0, 5, 6] = nodata, nodata
    with open_image(write(tmp_path / "a.tif", pixels, nodata=nodata)) as image:
        valid = image.valid((Interval(2, 10), Interval(2, 10)))
    assert str(image.info.nodata[0]) == str(expected)
    assert np.argwhere(~valid).tolist() == [[1, 2]]


def test_a_nodata_that_no_pixel_can_be_is_none(tmp_path):
    tags = [(42113, "s", 0, "-9999", True)]
    tifffile.imwrite(tmp_path / "a.tif", PIXELS[0], extratags=tags)
    assert open_image(tmp_path / "a.tif").info.nodata == ()


@pytest.mark.parametrize("inside", [True, False])
def test_a_mask_in_the_file_or_beside_it_says_which_pixels_hold_something(tmp_path, inside):
    mask = np.full((60, 80), 255, np.uint8)
    mask[10:20, 30:40] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=inside):
        path = write(tmp_path / "a.tif", transform=PLACE, after=lambda dataset: dataset.write_mask(mask))
    assert (tmp_path / "a.tif.msk").exists() != inside
    with open_image(path) as image:
        assert image.valid().tolist() == (mask > 0).tolist()
        assert image.valid((Interval(5, 15), Interval(35, 50))).tolist() == (mask[5:15, 35:50] > 0).tolist()


def test_alpha_says_it_too(tmp_path):
    rgba = np.concatenate([PIXELS, np.full((1, 60, 80), 255, np.uint8)])
    rgba[3, :30] = 0
    path = write(tmp_path / "a.tif", rgba, transform=PLACE, photometric="rgb", alpha="yes")
    with open_image(path) as image:
        assert image.info.colours == "RGBA" and image.info.channels == 4
        assert image.valid()[:, 0].tolist() == [False] * 30 + [True] * 30


def test_bands_have_their_names(tmp_path):
    def name(dataset):
        dataset.descriptions = ("B02", "B03", None)
        dataset.colorinterp = [ColorInterp.undefined] * 3

    info = open_image(write(tmp_path / "a.tif", transform=PLACE, photometric="minisblack", after=name)).info
    assert info.channel_names == ("B02", "B03", "") and info.colours == ""


def test_a_palette_stays_class_numbers(tmp_path):
    def paint(dataset):
        dataset.write_colormap(1, {0: (0, 0, 0, 255), 1: (255, 0, 0, 255), 2: (0, 9, 0, 255)})

    classes = (np.arange(60 * 80) % 3).astype(np.uint8).reshape(1, 60, 80)
    with open_image(write(tmp_path / "a.tif", classes, transform=PLACE, photometric="palette", after=paint)) as image:
        assert image.read().tolist() == classes.tolist()
        assert image.info.palette[:3] == ((0, 0, 0, 255), (255, 0, 0, 255), (0, 9, 0, 255))
        assert image.info.channel_names == ("palette",) and image.info.colours == ""


@pytest.mark.parametrize("beside", [False, True])
def test_overviews_are_levels_in_the_file_or_beside_it(tmp_path, beside):
    path = write(tmp_path / "a.tif", transform=PLACE, tiled=True, blockxsize=16, blockysize=16)
    with rasterio.Env(TIFF_USE_OVR=beside), rasterio.open(path, "r+") as dataset:
        dataset.build_overviews((2, 4), Resampling.nearest)
    assert (tmp_path / "a.tif.ovr").exists() == beside
    with open_image(path) as image:
        assert [level.size for level in image.info.levels] == [(60, 80), (30, 40), (15, 20)]
        assert image.info.levels[2].scale == (4.0, 4.0)
        window = (Interval(3, 9), Interval(11, 20))
        assert image.read(window, level=2).tolist() == image.read(level=2)[:, 3:9, 11:20].tolist()


def test_the_cache_of_blocks_is_bounded_while_it_reads_and_left_to_others_after(tmp_path, monkeypatch):
    before = get_gdal_config("GDAL_CACHEMAX")
    seen, path = [], write(tmp_path / "a.tif", transform=PLACE)

    class Watched(GeoTiffFile):
        def _dataset(self, handle, level):
            seen.append((get_gdal_config("GDAL_CACHEMAX"), get_gdal_config("GDAL_NUM_THREADS")))
            return super()._dataset(handle, level)

    with Watched(path, GeoTiffFile.read_info(path)) as image:
        image.read()
    assert seen == [(64 * 2**20, 1)] and get_gdal_config("GDAL_CACHEMAX") == before
    monkeypatch.setenv("GDAL_NUM_THREADS", "3")
    with gdal():
        assert get_gdal_config("GDAL_NUM_THREADS") == 3


def test_a_world_file_beside_a_plain_tiff_is_its_place(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", PIXELS[0])
    (tmp_path / "a.tfw").write_text("2.0\n0.0\n0.0\n-3.0\n501.0\n797.5\n", encoding="ascii")
    info = open_image(tmp_path / "a.tif").info
    assert info.affine == ((0.0, 2.0, 501.0), (-3.0, 0.0, 797.5), (0.0, 0.0, 1.0)) and info.spacing == (3.0, 2.0)
    assert info.unit == "" and info.world == ""


def test_levels_have_the_mask_of_their_own_size(tmp_path):
    mask = np.full((60, 80), 255, np.uint8)
    mask[:20] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        path = write(tmp_path / "a.tif", transform=PLACE, after=lambda dataset: dataset.write_mask(mask))
        with rasterio.open(path, "r+") as dataset:
            dataset.build_overviews((2,), Resampling.nearest)
    with open_image(path) as image:
        assert image.valid(level=1).tolist() == (mask[::2, ::2] > 0).tolist()


def test_bands_of_several_types_and_complex_ones_are_refused(tmp_path):
    path = write(tmp_path / "a.tif", np.zeros((1, 20, 30), np.complex64), transform=PLACE)
    with pytest.raises(ImageFileError, match="its bands are complex64"):
        open_image(path)


def test_a_tiff_without_a_place_is_tifffiles_and_one_with_it_names_the_extra(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "plain.tif", PIXELS[0])
    path = write(tmp_path / "a.tif", transform=PLACE)
    assert isinstance(open_image(tmp_path / "plain.tif"), TiffFile)
    assert isinstance(open_image(path), GeoTiffFile)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(ImageFileError, match=r"is GeoTIFF, which rasterio reads; pip install 'widefield\[geo\]'"):
        open_image(path)


def test_levels_of_a_jpeg_2000(tmp_path):
    from rasterio.shutil import copy

    large = (np.add.outer(np.arange(900), np.arange(1100)) % 251).astype(np.uint8)[None]
    plain = write(tmp_path / "a.tif", large, transform=PLACE, crs="EPSG:4326")
    copy(plain, tmp_path / "a.jp2", driver="JP2OpenJPEG", QUALITY="100", REVERSIBLE="YES")
    with open_image(tmp_path / "a.jp2") as image:
        assert image.read().tolist() == large.tolist()
        assert image.info.format == "JPEG 2000" and image.info.compression == "jpeg2000" and image.info.unit == "deg"
        assert len(image.info.levels) > 1
        window = (Interval(30, 90), Interval(100, 130))
        assert image.read(window, level=1).tolist() == image.read(level=1)[:, 30:90, 100:130].tolist()


def test_a_file_that_is_cut_anywhere_is_named_or_whole(tmp_path):
    """GDAL gives zeros for strips that say they have fewer bytes, and for blocks that are not there."""
    options = [
        {},
        {"compress": "deflate"},
        {"tiled": True, "blockxsize": 16, "blockysize": 16},
        {"BIGTIFF": "YES", "ENDIANNESS": "BIG"},
    ]
    for number, option in enumerate(options):
        path = write(tmp_path / f"{number}.tif", transform=PLACE, **option)
        content = path.read_bytes()
        for length in range(40, len(content), max(1, len(content) // 40)):
            path.write_bytes(content[:length])
            try:
                with open_image(path) as image:
                    assert image.read().tolist() == PIXELS.tolist(), (option, length)
            except ImageFileError as error:
                assert str(path) in str(error)


def test_a_strip_that_says_it_has_fewer_bytes_is_refused(tmp_path):
    path = write(tmp_path / "a.tif", transform=PLACE)
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].tags[279].valueoffset
    content = bytearray(path.read_bytes())
    content[place : place + 2] = (100).to_bytes(2, "little")
    path.write_bytes(content)
    with pytest.raises(ImageFileError, match=r"block 0 has 100 of its \d+ bytes"):
        open_image(path)
