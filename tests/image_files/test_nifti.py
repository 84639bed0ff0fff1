"""Where the voxels of NIfTI are, what their numbers mean, and what a .nii.gz costs."""

from __future__ import annotations

import gzip
import tempfile

import numpy as np
import pytest

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.image_file import ImageFileError

nibabel = pytest.importorskip("nibabel")
VOLUME = np.arange(5 * 6 * 7, dtype=np.int16).reshape(5, 6, 7)
"""(x, y, z), as nibabel has it."""
OBLIQUE = np.array([[0.8, 0.1, 0.0, -7.0], [-0.1, 0.9, 0.2, 3.0], [0.0, -0.2, 2.5, 11.0], [0.0, 0.0, 0.0, 1.0]])


def save(path, pixels=VOLUME, affine=OBLIQUE, kind=None, **header):
    """header: fields, set at the end."""
    image = (kind or nibabel.Nifti1Image)(pixels, affine)
    for name, value in header.items():
        image.header[name] = value
    nibabel.save(image, path)
    return path


def test_an_index_leads_to_the_same_place_as_nibabels(tmp_path):
    path = save(tmp_path / "a.nii")
    info = open_image(path).info
    assert info.axes == "ZYX" and info.shape == (1, 7, 6, 5) and info.world == "RAS" and info.unit == "mm"
    x, y, z = 4, 1, 6
    expected = nibabel.load(path).affine @ [x, y, z, 1]
    np.testing.assert_allclose(np.array(info.affine) @ [z, y, x, 1], expected)
    np.testing.assert_allclose(info.spacing, np.linalg.norm(nibabel.load(path).affine[:3, :3], axis=0)[::-1])


def test_the_sform_goes_before_the_qform_and_a_code_of_0_counts_for_nothing(tmp_path):
    image = nibabel.Nifti1Image(VOLUME, OBLIQUE)
    image.header.set_qform(np.diag([3.0, 2.0, 1.0, 1.0]), code=1)
    image.header.set_sform(OBLIQUE, code=2)
    nibabel.save(image, tmp_path / "both.nii")
    assert open_image(tmp_path / "both.nii").info.affine[0][2] == pytest.approx(0.8)
    image.header["sform_code"] = 0
    image.update_header = lambda: None
    nibabel.save(image, tmp_path / "qform.nii")
    assert open_image(tmp_path / "qform.nii").info.spacing == pytest.approx((1.0, 2.0, 3.0))


def test_without_codes_there_is_a_spacing_and_no_place(tmp_path):
    path = rewritten(save(tmp_path / "a.nii"), sform_code=0, qform_code=0, pixdim=[1, 0.5, 0.75, 2.0, 1, 1, 1, 1])
    info = open_image(path).info
    assert info.affine == () and info.world == "" and info.spacing == pytest.approx((2.0, 0.75, 0.5))


@pytest.mark.parametrize(("unit", "factor"), [("meter", 1000.0), ("micron", 0.001), ("unknown", 1.0)])
def test_lengths_are_in_mm(tmp_path, unit, factor):
    image = nibabel.Nifti1Image(VOLUME, np.diag([1.0, 2.0, 3.0, 1.0]))
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / "a.nii")
    info = open_image(tmp_path / "a.nii").info
    assert info.unit == "mm" and info.spacing == pytest.approx((3 * factor, 2 * factor, factor))


def rewritten(path, **fields):
    """With fields of the header set as they are, whatever nibabel thinks of them."""
    content = bytearray(path.read_bytes())
    header = nibabel.Nifti1Header(bytes(content[:348]), check=False)
    for name, value in fields.items():
        header[name] = value
    content[:348] = header.binaryblock
    path.write_bytes(content)
    return path


def test_a_slope_and_an_intercept_give_what_nibabel_gives_in_float32(tmp_path):
    path = rewritten(save(tmp_path / "a.nii"), scl_slope=0.1, scl_inter=-1024.0)
    with open_image(path) as image:
        assert image.info.dtype == "float32"
        expected = nibabel.load(path).get_fdata().astype(np.float32)
        assert np.array_equal(image.read()[0], expected.T)


def test_stored_numbers_of_32_bits_are_scaled_to_float64(tmp_path):
    path = rewritten(save(tmp_path / "a.nii", VOLUME.astype(np.int32) * 1_000_003), scl_slope=0.5, scl_inter=1.0)
    with open_image(path) as image:
        assert image.info.dtype == "float64" and np.array_equal(image.read()[0], nibabel.load(path).get_fdata().T)


@pytest.mark.parametrize("slope", [0.0, 1.0, np.nan])
def test_a_slope_that_says_nothing_leaves_the_stored_dtype(tmp_path, slope):
    path = rewritten(save(tmp_path / "a.nii"), scl_slope=slope, scl_inter=0.0)
    with open_image(path) as image:
        assert image.info.dtype == "int16" and np.array_equal(image.read()[0], VOLUME.T)


def test_large_integers_of_the_other_byte_order_stay_exact(tmp_path):
    large = VOLUME.astype(np.int64) + 2**60
    header = nibabel.Nifti1Header(endianness=">")
    header.set_data_dtype(np.int64)
    nibabel.save(nibabel.Nifti1Image(large, OBLIQUE, header), tmp_path / "a.nii")
    with open_image(tmp_path / "a.nii") as image:
        assert np.array_equal(image.read()[0], large.T)


def test_either_dim_above_the_third_is_channels_and_two_are_refused(tmp_path):
    for shape in ((5, 6, 7, 3), (5, 6, 7, 1, 3), (5, 6, 7, 3, 1)):
        pixels = np.arange(np.prod(shape), dtype=np.int16).reshape(shape, order="F")
        with open_image(save(tmp_path / "a.nii", pixels)) as image:
            assert image.info.shape == (3, 7, 6, 5)
            assert np.array_equal(image.read(), pixels.reshape(5, 6, 7, 3, order="F").T)
    with pytest.raises(ImageFileError, match=r"its shape \(5, 6, 7, 2, 3\) has 2 dims above the third"):
        open_image(save(tmp_path / "a.nii", np.zeros((5, 6, 7, 2, 3), np.int16)))


def test_a_file_of_x_and_y_is_a_volume_of_one_slice(tmp_path):
    with open_image(save(tmp_path / "a.nii", VOLUME[:, :, 0])) as image:
        assert image.info.axes == "ZYX" and np.array_equal(image.read(), VOLUME[:, :, :1].T[None])


def test_complex_numbers_are_refused(tmp_path):
    with pytest.raises(ImageFileError, match="an array of complex64 .* is no image"):
        open_image(save(tmp_path / "a.nii", VOLUME.astype(np.complex64)))


def test_a_header_of_a_pair_finds_its_pixels(tmp_path):
    save(tmp_path / "a.img", kind=nibabel.Nifti1Pair)
    with open_image(tmp_path / "a.hdr") as image:
        assert np.array_equal(image.read()[0], VOLUME.T)
    (tmp_path / "a.img").unlink()
    with pytest.raises(ImageFileError, match="a.hdr.*No such file"):
        open_image(tmp_path / "a.hdr")


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_a_header_that_says_more_than_there_is_is_refused_before_anything_is_read(tmp_path, name):
    path = tmp_path / "a.nii"
    rewritten(save(path), dim=[3, 30000, 30000, 30000, 1, 1, 1, 1])
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ImageFileError, match=r"its header says 1 x 30000 x 30000 x 30000 of int16 .* copy it again"):
        open_image(tmp_path / name)


def test_a_sform_of_zeros_is_refused(tmp_path):
    path = rewritten(save(tmp_path / "a.nii"), srow_x=0, srow_y=0, srow_z=0)
    with pytest.raises(ImageFileError, match="is no place in the world; correct its sform"):
        open_image(path)


# ---------------------------------------------------------------------------------------------- .nii.gz


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of temporary files."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def test_a_nii_gz_is_unpacked_once_to_a_file_that_leaves_nothing_behind(tmp_path, place, monkeypatch):
    path = save(tmp_path / "a.nii.gz")
    opened = []
    open_gzip = gzip.open
    monkeypatch.setattr(gzip, "open", lambda *args: opened.append(args) or open_gzip(*args))
    with open_image(path) as image:
        assert not image.info.by_window and str(place) in image.info.advice and "gunzip" in image.info.advice
        for z in range(7):
            part = image.read((Interval(z, z + 1), Interval(1, 4), Interval(2, 5)))
            assert np.array_equal(part[0, 0], VOLUME.T[z, 1:4, 2:5])
        assert len(opened) == 1 and list(place.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut short", "other bytes"])
def test_a_damaged_nii_gz_is_named(tmp_path, place, damage):
    random = np.random.default_rng(0).integers(0, 1000, (20, 20, 20)).astype(np.int16)
    path = save(tmp_path / "a.nii.gz", random)
    content = bytearray(path.read_bytes())
    content[-8] ^= 255  # of the check sum
    path.write_bytes(content[: len(content) // 2] if damage == "cut short" else content)
    with open_image(path) as image, pytest.raises(ImageFileError, match="a.nii.gz"):
        image.read((Interval(0, 1), Interval(0, 1), Interval(0, 1)))


def test_a_nii_gz_whose_pixels_do_not_fit_the_disk_is_refused(tmp_path, place, monkeypatch):
    path = save(tmp_path / "a.nii.gz")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with open_image(path) as image, pytest.raises(ImageFileError, match="set TMPDIR to another folder"):
        image.read()
