"""The tags of any TIFF without a library, and what is not to be believed; and the examples of this room's smaller modules."""

from __future__ import annotations

import doctest
import struct

import numpy as np
import pytest
import tifffile
from PIL import Image

from widefield.image_files import block_sizes, codestreams, info, orientation, tags
from widefield.image_files.formats import picture, tiff

PIXELS = np.arange(3 * 40 * 50, dtype=np.uint16).reshape(3, 40, 50)
WANTED = (tags.WIDTH, tags.HEIGHT, tags.SOFTWARE, tags.TILE_OFFSETS, tags.TILE_BYTES, 282)


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_tags_are_those_that_tifffile_reads(tmp_path, byteorder, bigtiff):
    path = tmp_path / "a.tif"
    options = {"photometric": "minisblack", "planarconfig": "separate", "software": "a name that is longer than a tag"}
    tifffile.imwrite(path, PIXELS, byteorder=byteorder, bigtiff=bigtiff, tile=(16, 16), resolution=(2.5, 3), **options)
    found = tags.read_tags(path, WANTED)
    with tifffile.TiffFile(path) as file:
        theirs = file.pages[0].tags
        assert list(found) == [tag.code for tag in theirs]
        for code in (tags.WIDTH, tags.HEIGHT, tags.TILE_OFFSETS, tags.TILE_BYTES, 282):
            assert found[code].tolist() == np.ravel(theirs[code].value).tolist()
    assert tags.text_in(found, tags.SOFTWARE).startswith(b"a name that is longer than a tag")
    assert tags.number_in(found, tags.HEIGHT) == 40 and tags.number_in(found, tags.XMP) is None
    assert found[tags.BITS] == b""
    tags.check_first_image(path)
    tags.check_values(path)
    tags.check_chain(path)


def test_any_bytes_give_tags_or_none(tmp_path):
    """Formats are asked in turn whether they have a file, so none may raise."""
    path, random = tmp_path / "a.tif", np.random.default_rng(0)
    tifffile.imwrite(path, PIXELS[0], software="a name that is longer than a tag")
    content = path.read_bytes()[:600]
    for number in range(400):
        damaged = bytearray(content[: int(random.integers(1, 600))] if number % 2 else content)
        for _ in range(20):
            damaged[int(random.integers(len(damaged)))] = int(random.integers(256))
        path.write_bytes(b"II*\0" + bytes(damaged[4:]))
        found = tags.read_tags(path, range(65536))
        for code in found:
            tags.text_in(found, code), tags.number_in(found, code)


def test_a_tag_that_claims_more_than_the_file_is_not_read(tmp_path):
    path = tmp_path / "a.tif"
    entry = struct.pack("<HHII", 270, 2, 2**31, 26)
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4))
    assert tags.read_tags(path, (270,))[270] is tags.OUTSIDE
    with pytest.raises(ValueError, match="the value of tag 270 is not in the file"):
        tags.check_values(path)


def test_a_chain_that_leaves_the_file_or_closes_a_ring_is_named(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, PIXELS, photometric="minisblack")
    tags.check_chain(path)
    tags.check_end(path)
    with tifffile.TiffFile(path) as file:
        first = file.pages[0]
        place = first.offset + 2 + 12 * len(first.tags)
    content = bytearray(path.read_bytes())
    outside, ring = "image 2 would begin at byte 1000000000", "behind its image 1 follows the one at byte .* have no end"
    for following, words in ((10**9, outside), (first.offset, ring)):
        content[place : place + 4] = struct.pack("<I", following)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            tags.check_chain(path)
    with pytest.raises(ValueError, match=ring):
        tiff.open_image(path)


def test_blocks_that_are_missing_outside_or_short_are_named():
    with pytest.raises(ValueError, match="it has 2 of the 3 blocks"):
        tags.check_blocks([8, 16], [8, 8], wanted=3, file_bytes=100)
    with pytest.raises(ValueError, match="block 1 of 2 ends at byte 124, and the file has 100"):
        tags.check_blocks([8, 116], [8, 8], wanted=2, file_bytes=100)
    tags.check_blocks([8, 10**12], [8, 0], wanted=2, file_bytes=100)  # an empty block is nowhere
    tags.check_raw_blocks([50, 20, 50, 20], row_bytes=10, rows=5, last=2, down=2)
    with pytest.raises(ValueError, match="block 3 has 19 of its 20 bytes"):
        tags.check_raw_blocks([50, 20, 50, 19], row_bytes=10, rows=5, last=2, down=2)


def test_a_block_of_gibibytes_in_few_bytes_is_not_believed():
    with pytest.raises(ValueError, match=r"claims 1,073,741,824 bytes of pixels in 1,000 bytes of the file"):
        block_sizes.require_plausible(2**30, 1000)


def test_a_jpeg_2000_that_claims_more_than_its_block_is_refused():
    data = b"\xff\x4f\xff\x51" + struct.pack(">HHII", 47, 0, 60_000, 60_000)
    with pytest.raises(ValueError, match="a block claims 3,600,000,000 pixels"):
        codestreams.require_small(data, pixels=256)
    assert codestreams.claimed_pixels(b"\xff\xd8\xff\xda\0\0\0\0\0\0\0\0\0\0\0\0") is None


@pytest.mark.parametrize("kind", ["noise", "smooth", "constant"])
def test_lzw_of_libtiff_is_lzw_and_damaged_it_is_refused_or_decoded(tmp_path, kind):
    """What is let through may be decoded: of 60,000 damaged blocks none ended the process, which some did without the check."""
    random = np.random.default_rng(0)
    pixels = {
        "noise": random.integers(0, 256, (90, 300)),
        "smooth": np.add.outer(np.arange(90), np.arange(300)),
        "constant": np.zeros((90, 300)),
    }
    Image.fromarray(pixels[kind].astype(np.uint8)).save(tmp_path / "a.tif", compression="tiff_lzw")
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages[0]
        content = (tmp_path / "a.tif").read_bytes()
        strips = [content[place : place + size] for place, size in zip(page.dataoffsets, page.databytecounts, strict=True)]
    for strip in strips:
        codestreams.check_lzw(strip)
    refused = 0
    for _ in range(200):
        damaged = bytearray(strips[0])
        damaged[int(random.integers(2, len(damaged))) :] = random.bytes(len(damaged))
        try:
            codestreams.check_lzw(bytes(damaged))
        except ValueError:
            refused += 1
    assert refused > 100
    with pytest.raises(ValueError, match="does not begin as LZW"):
        codestreams.check_lzw(b"\0\x0b of raw pixels")


@pytest.mark.parametrize("module", [block_sizes, codestreams, info, orientation, picture, tags], ids=lambda one: one.__name__)
def test_the_examples_are_true(module):
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0
