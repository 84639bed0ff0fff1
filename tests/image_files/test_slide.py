"""What a slide of OpenSlide's shows where it is transparent, where levels have no whole scale, and which files it is for."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from widefield.geometry import Interval
from widefield.image_files.formats import slide as format_of_slides
from widefield.image_files.formats.slide import SlideFile, claims
from widefield.image_files.opening import format_of


@pytest.fixture
def slide(tmp_path):
    """Sides of 310 and 411 pixels, so that the scale of the second level is 3.98."""
    path = tmp_path / "a.bif"
    format_of_slides.write_example(path, (np.arange(3 * 310 * 411) % 251).astype(np.uint8).reshape(3, 310, 411))
    with SlideFile(path, SlideFile.read_info(path)) as image:
        yield image


class Painted:
    """A slide that is opaque, half transparent and transparent by thirds of its rows, dark grey everywhere."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked = path, []
        self.properties = {"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.26", "openslide.vendor": "painted"}
        self.level_dimensions, self.level_downsamples, self.level_count = ((90, 90), (30, 30)), (1.0, 3.0), 2

    def set_cache(self, cache) -> None:
        self.cache = cache

    def read_region(self, place, level, size):
        self.asked.append((place, level, size))
        scale = self.level_downsamples[level]
        rows = np.arange(size[1]) * int(scale) + place[1]
        pixels = np.full((size[1], size[0], 4), 40, np.uint8)
        pixels[..., 3] = np.select([rows < 30, rows < 60], [255, 128], 0)[:, None]
        return pixels

    def close(self) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def painted(tmp_path, monkeypatch):
    monkeypatch.setattr(openslide, "OpenSlide", Painted)
    path = tmp_path / "painted.mrxs"
    path.write_bytes(b"no TIFF")
    return SlideFile(path, SlideFile.read_info(path))


def test_transparent_pixels_have_the_background_and_are_told_to_hold_nothing(painted):
    pixels, valid = painted.read(), painted.valid()
    assert pixels[:, ::30, 0].tolist() == [[40, 147, 255]] * 3  # (40 x 128 + 255 x 127) / 255 = 147.1
    assert valid[::30, 5].tolist() == [True, True, False]
    handle = painted.open_handle()
    handle.properties["openslide.background-color"] = "0010FF"
    assert painted.read_box(handle, (Interval(60, 61), Interval(0, 1)), 0)[:, 0, 0].tolist() == [0, 16, 255]


def test_spacing_is_in_micrometres_and_the_place_of_a_window_in_pixels_of_level_0(painted):
    assert painted.info.spacing == (0.26, 0.25) and painted.info.unit == "um" and painted.info.format == "painted"
    handle = painted.open_handle()
    painted.read_box(handle, (Interval(10, 20), Interval(5, 9)), 1)
    assert handle.asked == [((15, 30), 1, (4, 10))]


def test_windows_of_a_level_whose_scale_is_no_whole_number_are_crops_of_it(slide):
    level = slide.info.levels[2]
    assert level.scale[0] % 1 != 0
    whole, random = slide.read(level=2), np.random.default_rng(0)
    for _ in range(50):
        top, left = (int(random.integers(extent - 10)) for extent in level.size)
        window = (Interval(top, top + 10), Interval(left, left + 10))
        assert slide.read(window, 2).tolist() == whole[:, top : top + 10, left : left + 10].tolist()


def test_it_is_for_slides_whose_tiles_overlap_and_for_those_that_are_no_tiff(tmp_path):
    def written(name: str, **options) -> Path:
        tifffile.imwrite(tmp_path / name, np.zeros((40, 50, 3), np.uint8), photometric="rgb", metadata=None, **options)
        return tmp_path / name

    xmp = b"<EncodeInfo><iScan Magnification='20'/></EncodeInfo>"
    ventana = written("ventana.tif", extratags=[(700, 1, len(xmp), xmp, True)])
    trestle, aperio = written("trestle.tif", software="MedScan 1"), written("a.svs", description="Aperio Image Library v1")
    plain = written("plain.tif")
    assert [format_of(path).NAME for path in (ventana, trestle, aperio, plain)] == ["slide", "slide", "TIFF", "TIFF"]
    assert claims(Path("a.mrxs"), b"\xff\xd8\xff\xe0")
    sop = b"1.2.840.10008.5.1.4.1.1.77.1.6"
    meta = bytes(128) + b"DICM" + struct.pack("<HH2sH", 2, 2, b"UI", len(sop)) + sop
    assert claims(Path("a.dcm"), meta) and not claims(Path("a.dcm"), meta.replace(sop, b"1.2.840.10008.5.1.4.1.1.2"))


def test_tiles_for_which_openslide_would_end_the_process_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.bif"
    format_of_slides.write_example(path, np.zeros((3, 64, 64), np.uint8))
    monkeypatch.setattr(format_of_slides, "MOST_TILE_PIXELS", 1000)
    with pytest.raises(ValueError, match="level 0 has tiles of 64 x 64 pixels"):
        SlideFile.read_info(path)
