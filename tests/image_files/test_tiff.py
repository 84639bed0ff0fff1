"""What TIFFs say beside their pixels, which are refused and why, and files of which tifffile would show less."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.formats.tiff import CASES, TiffFile, write_example
from widefield.image_files.image_file import ImageFileError
from widefield.image_files.orientation import upright

GREY = np.arange(31 * 43, dtype=np.uint16).reshape(31, 43)
COLOUR = (np.arange(40 * 50 * 3) % 251).astype(np.uint8).reshape(40, 50, 3)


def info_of(path: Path, array, **options):
    tifffile.imwrite(path, array, **options)
    return open_image(path).info


def refusal_of(path: Path, array, **options) -> str:
    tifffile.imwrite(path, array, **options)
    with pytest.raises(ImageFileError) as caught:
        open_image(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- what files say


def test_ome_says_the_size_of_a_pixel_in_its_unit_and_the_names_of_channels(tmp_path):
    metadata = {
        "axes": "CZYX", "PhysicalSizeX": 250.0, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.3, "PhysicalSizeYUnit": "µm",
        "PhysicalSizeZ": 0.002, "PhysicalSizeZUnit": "mm", "Channel": {"Name": ["DAPI", "GFP"]},
    }  # fmt: skip
    info = info_of(tmp_path / "a.ome.tif", np.zeros((2, 3, 20, 30), np.uint16), metadata=metadata)
    assert info.spacing == pytest.approx((2.0, 0.3, 0.25)) and info.unit == "um"
    assert info.channel_names == ("DAPI", "GFP") and info.format == "OME-TIFF" and info.axes == "ZYX"


def test_a_volume_whose_depth_has_no_size_has_none_at_all(tmp_path):
    metadata = {"axes": "ZYX", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    assert info_of(tmp_path / "a.ome.tif", np.zeros((6, 20, 30), np.uint16), metadata=metadata).spacing == ()


@pytest.mark.parametrize(
    ("options", "spacing"),
    [
        ({"resolution": (20_000, 10_000), "resolutionunit": "CENTIMETER"}, (1.0, 0.5)),
        ({"resolution": (300, 300), "resolutionunit": "INCH"}, (25400 / 300,) * 2),
        ({"resolution": (72, 72), "resolutionunit": "INCH"}, ()),
        ({"resolution": (96, 96), "resolutionunit": "INCH"}, ()),
        ({"resolution": (5, 5), "resolutionunit": "NONE"}, ()),
        ({}, ()),
    ],
)
def test_tags_say_the_size_of_a_pixel_unless_it_is_a_screens(tmp_path, options, spacing):
    info = info_of(tmp_path / "a.tif", GREY, **options)
    assert info.spacing == pytest.approx(spacing) and info.unit == ("um" if spacing else "")


def test_imagej_says_it_in_its_own_text(tmp_path):
    metadata = {"axes": "ZYX", "spacing": 3.0, "unit": "um"}
    info = info_of(tmp_path / "a.tif", np.zeros((5, 20, 30), np.uint16), imagej=True, resolution=(2, 4), metadata=metadata)
    assert info.spacing == pytest.approx((3.0, 0.25, 0.5)) and info.unit == "um" and info.format == "ImageJ TIFF"


@pytest.mark.parametrize(
    ("options", "colours", "names"),
    [
        ({"photometric": "rgb"}, "RGB", ()),
        ({"photometric": "minisblack", "planarconfig": "contig"}, "", ()),
        ({"photometric": "cielab"}, "", ("L*", "a*", "b*")),
    ],
)
def test_colours_are_said_where_the_file_says_them(tmp_path, options, colours, names):
    info = info_of(tmp_path / "a.tif", COLOUR, **options)
    assert info.colours == colours and info.channel_names == names


def test_a_palette_stays_class_numbers_and_its_colours_are_told(tmp_path):
    colours = np.zeros((3, 256), dtype=np.uint16)
    colours[:, 1], colours[:, 2] = (65535, 0, 0), (0, 128 * 257, 255)
    classes = np.array([[0, 1], [2, 1]], dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", classes, photometric="palette", colormap=colours)
    with open_image(tmp_path / "a.tif") as image:
        assert image.read()[0].tolist() == classes.tolist()
    assert image.info.palette[:3] == ((0, 0, 0), (255, 0, 0), (0, 128, 0))
    assert image.info.colours == "" and image.info.channel_names == ("palette",)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_is_followed_as_pillow_follows_it(tmp_path, orientation):
    stored = np.arange(20 * 33, dtype=np.uint8).reshape(20, 33)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, stored, tile=(16, 16), photometric="minisblack", extratags=[(274, 3, 1, orientation, True)])
    expected = upright(stored, orientation)
    with open_image(path) as image:
        assert isinstance(image, TiffFile)
        assert image.read()[0].tolist() == expected.tolist()
        assert image.read((Interval(3, 9), Interval(5, 17)))[0].tolist() == expected[3:9, 5:17].tolist()
    with Image.open(path) as pillows:
        assert np.asarray(pillows).tolist() == expected.tolist()


def test_an_orientation_in_a_microscopes_file_is_left(tmp_path):
    metadata = {"axes": "YX"}
    info = info_of(tmp_path / "a.ome.tif", GREY, metadata=metadata, extratags=[(274, 3, 1, 6, True)])
    assert info.size == GREY.shape


# ---------------------------------------------------------------------------------------------- windows of odd files


def test_a_large_strip_of_raw_pixels_is_read_by_rows(tmp_path):
    """What tifffile and ImageJ write if nobody says otherwise: one strip, which a decoder would read whole."""
    tall = np.arange(3000 * 20, dtype=np.uint32).reshape(3000, 20)
    tifffile.imwrite(tmp_path / "a.tif", tall)
    window = (Interval(2001, 2004), Interval(3, 8))
    with open_image(tmp_path / "a.tif") as image:
        assert image.read(window)[0].tolist() == tall[2001:2004, 3:8].tolist()
    assert image.bytes_decoded == image.bytes_asked == 3 * 5 * 4


@pytest.mark.parametrize(("kind", "fill"), [("svs", 255), ("plain", 0)])
def test_an_empty_tile_is_zero_and_in_a_slide_it_is_glass(tmp_path, kind, fill):
    tiles = [np.full((16, 16, 3), 7, np.uint8), None, np.full((16, 16, 3), 9, np.uint8), None]
    description = "Aperio Image Library v1" if kind == "svs" else None
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(
            iter(tiles), shape=(32, 32, 3), dtype=np.uint8, tile=(16, 16), photometric="rgb", compression="zlib",
            description=description, metadata=None,
        )  # fmt: skip
    with open_image(tmp_path / "a.tif") as image:
        assert image.read()[0, ::16, ::16].tolist() == [[7, fill], [9, fill]]
        valid = image.valid()
        assert (valid is None) if kind == "plain" else (valid[::16, ::16].tolist() == [[True, False], [True, False]])
        assert image.valid((Interval(0, 32), Interval(0, 16))) is None


def test_an_imagej_stack_whose_planes_have_no_pages_of_their_own(tmp_path):
    """Above 4 GB ImageJ writes the tags of the first plane alone."""
    planes = np.arange(7 * 20 * 30, dtype=">u2").reshape(7, 20, 30)
    text = b"ImageJ=1.53t\nimages=7\nslices=7\n\0"
    path = tmp_path / "a.tif"
    tags = [(256, 4, 1, 30), (257, 4, 1, 20), (258, 3, 1, 16 << 16), (262, 3, 1, 1 << 16), (270, 2, len(text), 200),
            (273, 4, 1, 512), (277, 3, 1, 1 << 16), (278, 4, 1, 20), (279, 4, 1, 1200)]  # fmt: skip
    head = b"MM\0*" + struct.pack(">IH", 8, len(tags)) + b"".join(struct.pack(">HHII", *tag) for tag in tags) + bytes(4)
    path.write_bytes(head.ljust(200, b"\0") + text.ljust(312, b"\0") + planes.tobytes())
    window = (Interval(2, 6), Interval(3, 19), Interval(4, 9))
    with open_image(path) as image:
        assert image.info.shape == (1, 7, 20, 30) and image.info.axes == "ZYX"
        assert image.read(window)[0].tolist() == planes[2:6, 3:19, 4:9].tolist()
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ImageFileError, match="it is cut short"):
        open_image(path)


def test_an_ome_image_in_several_files(tmp_path):
    first, second = np.full((20, 30), 3, np.uint16), np.full((20, 30), 5, np.uint16)
    for name, array in (("a.ome.tif", first), ("b.ome.tif", second)):
        xml = (
            '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:%s"><Image ID="I:0"><Pixels '
            'ID="P:0" DimensionOrder="XYCZT" Type="uint16" SizeX="30" SizeY="20" SizeC="2" SizeZ="1" SizeT="1">'
            '<Channel ID="C:0" Name="red"/><Channel ID="C:1" Name="green"/>'
            '<TiffData FirstC="0" IFD="0" PlaneCount="1"><UUID FileName="a.ome.tif">urn:uuid:1</UUID></TiffData>'
            '<TiffData FirstC="1" IFD="0" PlaneCount="1"><UUID FileName="b.ome.tif">urn:uuid:2</UUID></TiffData>'
            "</Pixels></Image></OME>"
        ) % ("1" if name[0] == "a" else "2")
        tifffile.imwrite(tmp_path / name, array, description=xml, metadata=None)
    with open_image(tmp_path / "a.ome.tif") as image:
        assert image.read()[:, 4, 5].tolist() == [3, 5] and image.info.channel_names == ("red", "green")
    (tmp_path / "b.ome.tif").unlink()
    with pytest.raises(ImageFileError, match="1 of its 2 pages are in no file that is there"):
        open_image(tmp_path / "a.ome.tif")


def test_blocks_that_are_too_large_for_windows_are_told_with_what_to_do(tmp_path):
    large = np.zeros((9000, 9000), np.uint8)
    info = info_of(tmp_path / "a.tif", large, compression="zlib", rowsperstrip=9000)
    assert not info.by_window and "blocks of 9000 x 9000 pixels (77 MiB each)" in info.advice
    assert "tile=(512, 512)" in info.advice and info_of(tmp_path / "b.tif", large).by_window


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "axes", "words"),
    [
        ((4, 20, 30), "TYX", r"4 points in time \(T\), and an image has one"),
        ((2, 3, 4, 20, 30), "TZCYX", r"2 points in time"),
        ((5, 20, 30), "RYX", r"5 positions \(R\)"),
        ((5, 20, 30), "AYX", r"5 angles"),
        ((6, 20, 30), "QYX", None),
    ],
)
def test_what_one_image_has_not_is_refused_in_words(tmp_path, shape, axes, words):
    array, path = np.zeros(shape, np.uint16), tmp_path / "a.tif"
    tifffile.imwrite(path, array, metadata={"axes": axes}, photometric="minisblack")
    if words is None:
        assert open_image(path).info.shape == (1, *shape)
        return
    with pytest.raises(ImageFileError, match=words):
        open_image(path)


def test_several_positions_of_an_ome_file_are_refused_and_its_label_image_is_not(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as writer:
        writer.write(GREY, metadata={"axes": "YX"})
        writer.write(np.zeros((5, 8), np.uint16), metadata={"axes": "YX"})
    assert open_image(tmp_path / "a.ome.tif").info.size == GREY.shape
    with tifffile.TiffWriter(tmp_path / "b.ome.tif", ome=True) as writer:
        for _ in range(3):
            writer.write(GREY, metadata={"axes": "YX"})
    with pytest.raises(ImageFileError, match=r"it holds 3 images of 31 x 43 \(YX\), as of several positions"):
        open_image(tmp_path / "b.ome.tif")


def test_complex_numbers_and_unnamed_pages_of_colours_are_refused(tmp_path):
    assert "its pixels are complex64" in refusal_of(tmp_path / "a.tif", np.zeros((20, 30), np.complex64))
    said = refusal_of(tmp_path / "b.tif", np.zeros((5, 20, 30, 3), np.uint8), photometric="rgb")
    assert "5 pages of 3 channels that are not named" in said and "'axes': 'ZYX'" in said


def test_codecs_that_imagecodecs_decodes_name_the_extra(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", GREY, compression="lzw")
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with pytest.raises(ImageFileError, match=r"lzw needs imagecodecs; pip install 'widefield\[tiff\]'"):
        open_image(tmp_path / "a.tif")


def test_pillow_reads_a_plain_tiff_where_tifffile_is_not_installed(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", COLOUR, photometric="rgb")
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((3, 20, 30), np.uint8), photometric="minisblack")
    tifffile.imwrite(tmp_path / "c.tif", GREY)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with open_image(tmp_path / "a.tif") as image:
        assert image.read().transpose(1, 2, 0).tolist() == COLOUR.tolist()
    assert image.info.reader.startswith("Pillow") and "pip install 'widefield[tiff]'" in image.info.advice
    assert open_image(tmp_path / "c.tif").read()[0].tolist() == GREY.tolist()
    with pytest.raises(ImageFileError, match=r"is TIFF, which tifffile reads; pip install 'widefield\[tiff\]'"):
        open_image(tmp_path / "b.tif")


@pytest.mark.parametrize(("name", "shape", "dtype"), CASES, ids=[case[0] for case in CASES])
def test_what_pillow_reads_is_what_tifffile_reads(tmp_path, monkeypatch, name, shape, dtype):
    """Of several channels, planes or pages Pillow would show the first, and say nothing."""
    path = tmp_path / name
    write_example(path, (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype))
    with open_image(path) as image:
        expected = image.read()
    monkeypatch.setitem(sys.modules, "tifffile", None)
    try:
        with open_image(path) as image:
            found = image.read()
    except ImageFileError as error:
        assert "pip install 'widefield[tiff]'" in str(error)
    else:
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()


# ---------------------------------------------------------------------------------------------- damage


def test_a_file_that_is_cut_anywhere_is_named_or_whole(tmp_path):
    """Where the last pages are gone, tifffile would show fewer planes, as of another image."""
    stack = np.arange(6 * 20 * 30, dtype=np.uint16).reshape(6, 20, 30)
    kinds = {
        "a.tif": {"photometric": "minisblack", "compression": "zlib"},
        "b.ome.tif": {"metadata": {"axes": "ZYX"}, "compression": "zlib"},
        "c.tif": {"imagej": True, "metadata": {"axes": "ZYX"}},
    }
    for name, options in kinds.items():
        tifffile.imwrite(tmp_path / name, stack, **options)
        content = (tmp_path / name).read_bytes()
        for length in range(40, len(content), max(1, len(content) // 60)):
            (tmp_path / name).write_bytes(content[:length])
            try:
                with open_image(tmp_path / name) as image:
                    assert image.read()[0].tolist() == stack.tolist(), (name, length)
            except ImageFileError as error:
                assert name in str(error)


@pytest.mark.parametrize(("tag", "value"), [(256, 2**31 - 1), (257, 2**31 - 1), (278, 0), (277, 60_000), (258, 5000)])
def test_a_header_that_claims_absurd_sizes_is_refused_at_once(tmp_path, tag, value):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, GREY, compression="zlib", rowsperstrip=31, metadata=None)
    with tifffile.TiffFile(path) as file:
        place, kind = file.pages[0].tags[tag].valueoffset, file.pages[0].tags[tag].dtype
    content = bytearray(path.read_bytes())
    content[place : place + (2 if kind == 3 else 4)] = value.to_bytes(2 if kind == 3 else 4, "little")
    path.write_bytes(content)
    with pytest.raises(ImageFileError, match=r"a\.tif"), open_image(path) as image:
        image.read()


def test_ome_xml_that_claims_a_billion_planes_is_refused_before_it_is_believed(tmp_path):
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="I:0"><Pixels ID="P:0" '
        'DimensionOrder="XYCZT" Type="uint16" SizeX="43" SizeY="31" SizeC="1" SizeZ="1" SizeT="999999999"><TiffData/>'
        "</Pixels></Image></OME>"
    )
    said = refusal_of(tmp_path / "a.ome.tif", GREY, description=xml, metadata=None)
    assert "1 x 1 x 999999999 planes" in said


def test_a_jpeg_tile_that_claims_more_pixels_than_its_tile_is_refused(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, COLOUR, tile=(16, 16), compression="jpeg", photometric="rgb")
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[0]
    content = bytearray(path.read_bytes())
    place = content.index(b"\xff\xc0", start) + 5
    content[place : place + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    with pytest.raises(ImageFileError, match="a block claims 4,294,836,225 pixels"), open_image(path) as image:
        image.read()
