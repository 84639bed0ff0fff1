"""Which dataset of an HDF5 file is the image, what its dims are, and what lies elsewhere or nowhere."""

from __future__ import annotations

import json

import numpy as np
import pytest

from widefield.image_files import is_image_file, open_image
from widefield.image_files.image_file import ImageFileError

h5py = pytest.importorskip("h5py")
PIXELS = np.arange(24 * 36, dtype=np.uint16).reshape(24, 36)


@pytest.fixture
def path(tmp_path):
    """A file of two images and of what is none."""
    found = tmp_path / "scan.h5"
    with h5py.File(found, "w") as file:
        file["raw/left"] = PIXELS
        file["raw/right"] = PIXELS[::-1]
        file["times"] = np.arange(7)
        file["names"] = np.array([[b"a", b"b"]])
    return found


def test_two_images_are_named_and_a_name_in_the_path_picks_one(path):
    with pytest.raises(
        ImageFileError, match="2 datasets that may be images: /raw/left, /raw/right; name one, as scan.h5#/raw/left"
    ):
        open_image(path)
    with open_image(f"{path}#/raw/right") as image:
        assert np.array_equal(image.read()[0], PIXELS[::-1]) and str(image.path) == f"{path}#/raw/right"
    assert is_image_file(path) and is_image_file(type(path)(f"{path}#/raw/right"))


@pytest.mark.parametrize("name", ["/raw/middle", "/raw", "/raw/left/deep"])
def test_a_name_that_is_no_dataset_is_refused_with_those_there_are(path, name):
    with pytest.raises(ImageFileError, match="/raw/left, /raw/right") as caught:
        open_image(f"{path}#{name}")
    assert str(path) in str(caught.value)


def test_a_name_in_the_path_of_another_format_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", PIXELS)
    with pytest.raises(ImageFileError, match="a.npy is NumPy, whose files hold one image; leave #/raw out"):
        open_image(f"{tmp_path}/a.npy#/raw")


def test_a_file_whose_own_name_looks_like_one_with_a_name_is_opened(tmp_path):
    (tmp_path / "a.h5#").mkdir()
    np.save(tmp_path / "a.h5#" / "b.npy", PIXELS)
    with open_image(tmp_path / "a.h5#" / "b.npy") as image:
        assert image.info.format == "NumPy"


def test_a_file_without_an_image_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["times"] = np.arange(7)
    with pytest.raises(ImageFileError, match="none of its datasets is of numbers and of two dims or more"):
        open_image(tmp_path / "a.h5")


@pytest.mark.parametrize("name", ["", "#/elsewhere", "#/by/link"])
def test_links_into_other_files_are_not_followed(path, tmp_path, name):
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["elsewhere"] = h5py.ExternalLink(str(path), "/raw/left")
        file["by/link"] = h5py.SoftLink("/elsewhere")
    with pytest.raises(ImageFileError, match="is a link to|is no dataset of this file|none of its datasets"):
        open_image(f"{tmp_path}/b.h5{name}")


def test_pixels_that_lie_in_other_files_are_refused(path, tmp_path):
    layout = h5py.VirtualLayout(shape=PIXELS.shape, dtype=PIXELS.dtype)
    layout[...] = h5py.VirtualSource(str(path), "raw/left", shape=PIXELS.shape)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("image", layout)
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("image", PIXELS.shape, PIXELS.dtype, external=[(str(tmp_path / "raw.bin"), 0, 4096)])
    for name in ("virtual.h5", "external.h5"):
        with pytest.raises(ImageFileError, match="the pixels of /image lie in other files"):
            open_image(tmp_path / name)


def test_chunks_that_were_never_written_are_counted(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("image", (24, 36), "uint16", chunks=(8, 12), fillvalue=9)
        dataset[:8] = PIXELS[:8]
    with open_image(tmp_path / "a.h5") as image:
        assert image.info.advice == "6 of 9 chunks were never written and read as 9" and (image.read()[0, 8:] == 9).all()


def test_a_huge_chunk_is_not_read_by_window(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("image", (9000, 9000), "uint8", chunks=(9000, 9000))
    info = open_image(tmp_path / "a.h5").info
    assert not info.by_window and "one chunk holds 77 MiB" in info.advice


@pytest.mark.parametrize("way", ["labels", "axistags"])
def test_dims_that_are_named_are_known_by_their_names(tmp_path, way):
    stored = np.stack([PIXELS] * 6, axis=-1)[None]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = stored
        if way == "labels":
            for dimension, name in zip(file["image"].dims, "txyc", strict=True):
                dimension.label = name
        else:
            file["image"].attrs["axistags"] = json.dumps({"axes": [{"key": name} for name in "txyc"]})
    with open_image(tmp_path / "a.h5") as image:
        assert image.info.axes == "YX" and np.array_equal(image.read(), np.stack([PIXELS.T] * 6))


def test_the_size_of_an_element_is_the_spacing(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = PIXELS
        file["image"].attrs["element_size_um"] = np.array([2.0, 0.5, 0.25], dtype=np.float32)
    info = open_image(tmp_path / "a.h5").info
    assert info.spacing == (0.5, 0.25) and info.unit == "um"


def test_a_filter_that_is_missing_is_named(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("image", data=PIXELS, chunks=(8, 12), compression="lzf")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    with pytest.raises(ImageFileError, match="/image is compressed by lzf .filter 32000., which is missing here"):
        open_image(tmp_path / "a.h5")


def test_a_file_that_another_process_has_locked_is_read(path):
    """As on file systems of the network, where locks fail: none is taken."""
    import fcntl

    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with open_image(f"{path}#/raw/left") as image:
            assert np.array_equal(image.read()[0], PIXELS)
