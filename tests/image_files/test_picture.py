"""Pictures that Pillow decodes: how they are turned, which bits they keep, what is refused, and how often they are decoded."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.formats.picture import PictureFile
from widefield.image_files.image_file import ImageFileError
from widefield.image_files.orientation import upright

GREY = (np.arange(20 * 33) % 251).astype(np.uint8).reshape(20, 33)


@pytest.mark.parametrize("suffix", ["png", "webp", "jpg"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_an_image(tmp_path, orientation, suffix):
    path, exif = tmp_path / f"a.{suffix}", Image.Exif()
    exif[274] = orientation
    smooth = np.add.outer(np.arange(20) * 3, np.arange(33)).astype(np.uint8)
    options = {"quality": 100} if suffix == "jpg" else {"lossless": True} if suffix == "webp" else {}
    Image.fromarray(smooth).convert("RGB").save(path, exif=exif, **options)
    with open_image(path) as image:
        found = image.read()
    assert found.shape == image.info.shape
    assert np.abs(found[0].astype(int) - upright(smooth, orientation)).max() <= (4 if suffix == "jpg" else 0)


def test_windows_of_one_image_cost_one_decode(tmp_path, monkeypatch):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    decoded = []
    real = PictureFile._decoded
    monkeypatch.setattr(PictureFile, "_decoded", lambda self: decoded.append(self) or real(self))
    with open_image(tmp_path / "a.png") as image:
        for row in range(10):
            image.read((Interval(row, row + 5), Interval(3, 9)))
        assert len(decoded) == 1
    assert not image.info.by_window and "decodes all of it" in image.info.advice and "tile=(512, 512)" in image.info.advice


def test_a_palette_stays_numbers_and_its_colours_have_alpha_where_some_are_transparent(tmp_path):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8))
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 9, 0])
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.png", transparency=0)
    with open_image(tmp_path / "a.png") as plain, open_image(tmp_path / "b.png") as clear:
        assert plain.read()[0].tolist() == clear.read()[0].tolist() == [[0, 1, 2]]
    assert plain.info.palette[:3] == ((0, 0, 0), (255, 0, 0), (0, 9, 0)) and plain.info.colours == ""
    assert clear.info.palette[:3] == ((0, 0, 0, 0), (255, 0, 0, 255), (0, 9, 0, 255))


def test_cmyk_becomes_rgb(tmp_path):
    Image.fromarray(GREY).convert("CMYK").save(tmp_path / "a.jpg", quality=95)
    with open_image(tmp_path / "a.jpg") as image:
        assert image.read().shape == (3, 20, 33) and image.info.colours == "RGB"
        assert np.abs(image.read()[0].astype(int) - GREY).mean() < 20


def _png(width: int, height: int, bits: int, kind: int, pixels: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def test_colours_of_16_bits_which_pillow_would_cut_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(_png(2, 2, 16, 2, (b"\0" + bytes(12)) * 2))
    with pytest.raises(ImageFileError, match="it is RGB with 16 bits per channel, of which Pillow reads 8; save it as TIFF"):
        open_image(tmp_path / "a.png")


def test_a_header_that_claims_what_the_file_cannot_hold_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(_png(2**30, 2**30, 8, 2, b""))
    with pytest.raises(ImageFileError, match="claims 3,458,764,513,820,540,928 bytes of pixels in 65 bytes of the file"):
        open_image(tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["png", "bmp"])
def test_the_header_alone_is_read_before_a_window_is(tmp_path, monkeypatch, kind):
    """Pillow would decode a PNG to see whether EXIF follows its pixels, and any image to give its palette."""
    image = Image.fromarray(GREY)
    image.putpalette(list(range(256)) * 3)
    image.save(tmp_path / f"a.{kind}")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("it was decoded"))
    info = open_image(tmp_path / f"a.{kind}").info
    assert len(info.palette) == 256 and info.palette[1] == (3, 4, 5)


def test_postscript_is_never_tried_whatever_its_name(tmp_path):
    """Pillow would have Ghostscript run it."""
    program = io.BytesIO()
    Image.fromarray(GREY).save(program, format="EPS")
    (tmp_path / "a.png").write_bytes(program.getvalue())
    with pytest.raises(ImageFileError, match="no format that is known"):
        open_image(tmp_path / "a.png")
    with pytest.raises(Exception, match="cannot identify"):
        PictureFile.read_info(tmp_path / "a.png")
