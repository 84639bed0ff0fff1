"""Which slices make a volume, where it is, what its numbers mean, and what cannot be read."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from widefield.geometry import Interval
from widefield.image_files import open_image
from widefield.image_files.dicom_header import INSTALL
from widefield.image_files.image_file import ImageFileError

pydicom = pytest.importorskip("pydicom")
PIXELS = np.arange(4 * 6 * 5, dtype=np.uint16).reshape(4, 6, 5)
STEP = 2.5


def dataset(pixels, position=None, orientation=(1, 0, 0, 0, 1, 0), **fields):
    """fields: of DICOM by their names; None leaves one out."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    found, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found.file_meta = meta
    found.SOPClassUID, found.SOPInstanceUID, found.SeriesInstanceUID = "1.2.840.10008.5.1.4.1.1.2", "1.2.3.4", "1.2.3"
    found.Rows, found.Columns = pixels.shape[-2:]
    found.SamplesPerPixel, found.PhotometricInterpretation, found.PixelRepresentation = 1, "MONOCHROME2", 0
    found.BitsAllocated = found.BitsStored = 8 * pixels.itemsize
    found.HighBit = found.BitsStored - 1
    found.ImageOrientationPatient, found.PixelSpacing = list(orientation), [0.75, 0.5]
    if position is not None:
        found.ImagePositionPatient = [float(number) for number in position]
    found.PixelData = pixels.tobytes()
    found["PixelData"].VR = "OW"
    for name, value in fields.items():
        if value is None:
            del found[name]
        else:
            setattr(found, name, value)
    return found


def save(data, path):
    data.save_as(path, enforce_file_format=True)
    return path


def save_series(folder, positions, name="{}.dcm", changes=None, **fields):
    """One slice at each position; changes: fields of some slices, by their number."""
    folder.mkdir()
    for z, position in enumerate(positions):
        save(dataset(PIXELS[z % 4], position, **{**fields, **(changes or {}).get(z, {})}), folder / name.format(z))
    return folder


def refused(path, words):
    with pytest.raises(ImageFileError, match=words) as caught:
        open_image(path)
    assert str(path) in str(caught.value)


ALONG_Z = [(10, -20, STEP * z) for z in range(4)]

# ---------------------------------------------------------------------------------------------- order and place


def test_slices_are_in_the_order_of_their_places_whatever_their_names_and_numbers(tmp_path):
    path = save_series(
        tmp_path / "s", ALONG_Z[::-1], changes={z: {"InstanceNumber": (z * 3) % 4} for z in range(4)}
    )  # fmt: skip
    with open_image(path) as image:
        assert np.array_equal(image.read()[0], PIXELS[::-1])


def test_an_index_leads_to_ras(tmp_path):
    """DICOM: the place of a pixel is the position, its column times the first direction, its row times the second, in LPS."""
    turn = math.radians(20)
    orientation = (math.cos(turn), math.sin(turn), 0, -math.sin(turn), math.cos(turn), 0)
    info = open_image(save_series(tmp_path / "s", ALONG_Z, orientation=orientation)).info
    z, y, x = 3, 5, 2
    lps = np.array(ALONG_Z[z]) + x * 0.5 * np.array(orientation[:3]) + y * 0.75 * np.array(orientation[3:])
    np.testing.assert_allclose(np.array(info.affine) @ [z, y, x, 1], [*(lps * [-1, -1, 1]), 1])
    assert info.world == "RAS" and info.spacing == pytest.approx((STEP, 0.75, 0.5)) and info.unit == "mm"


def test_sagittal_slices_go_along_their_normal(tmp_path):
    """Rows go to the back and columns to the feet, so the normal is to the right of the patient."""
    path = save_series(tmp_path / "s", [(3.0 * z, 0, 0) for z in range(4)], orientation=(0, 1, 0, 0, 0, -1))
    with open_image(path) as image:
        assert np.array_equal(image.read()[0], PIXELS[::-1])
        assert image.info.affine[0] == pytest.approx((3.0, 0, 0, -9.0))


def test_a_tilted_gantry_makes_the_affine_oblique(tmp_path):
    path = save_series(tmp_path / "s", [(0, 0.4 * z, 2.0 * z) for z in range(4)])
    affine = open_image(path).info.affine
    assert [row[0] for row in affine[:3]] == pytest.approx([0, -0.4, 2.0])


def test_positions_that_are_rounded_are_even_enough(tmp_path):
    path = save_series(tmp_path / "s", [(0, 0, round(0.625 * z, 2)) for z in range(4)])
    assert open_image(path).info.spacing[0] == pytest.approx(1.88 / 3)


def test_a_missing_slice_is_named_by_its_neighbours(tmp_path):
    positions = [(0, 0, STEP * z) for z in (0, 1, 2, 4, 5, 6)]
    refused(save_series(tmp_path / "s", positions), "2.dcm and 3.dcm are 5 mm apart, and most of the 6 slices 2.5 mm")


def test_two_slices_at_one_place_are_named(tmp_path):
    refused(save_series(tmp_path / "s", [*ALONG_Z, ALONG_Z[1]]), "1.dcm and 4.dcm are at the same place, .10, -20, 2.5. mm")


def test_two_directions_in_a_series_are_named(tmp_path):
    path = save_series(tmp_path / "s", ALONG_Z, changes={2: {"ImageOrientationPatient": [0, 1, 0, 0, 0, -1]}})
    refused(path, "0.dcm and 2.dcm have the directions .1, 0, 0, 0, 1, 0. and .0, 1, 0, 0, 0, -1.: they are no slices of one")


def test_two_series_in_a_folder_are_named(tmp_path):
    path = save_series(tmp_path / "s", ALONG_Z, changes={3: {"SeriesInstanceUID": "1.2.9"}})
    refused(path, "0.dcm and 3.dcm differ .series 1.2.3 and 1.2.9., and 2 kinds of files are in the folder")


def test_slices_without_a_place_are_refused(tmp_path):
    path = save_series(tmp_path / "s", ALONG_Z, changes={1: {"ImagePositionPatient": None}})
    refused(path, "1.dcm does not say where its slice is")


def test_a_film_is_refused(tmp_path):
    film = dataset(PIXELS, NumberOfFrames=4, ImageOrientationPatient=None)
    refused(save(film, tmp_path / "a.dcm"), "a.dcm does not say where its slice is, so that 4 of them are no volume")


def test_a_radiograph_is_an_image_with_the_spacing_of_its_detector(tmp_path):
    picture = dataset(PIXELS[0], PixelSpacing=None, ImagerPixelSpacing=[0.2, 0.1], PhotometricInterpretation="MONOCHROME1")
    info = open_image(save(picture, tmp_path / "a.dcm")).info
    assert info.axes == "YX" and info.spacing == (0.2, 0.1) and info.affine == () and not info.by_window
    assert "large numbers are dark" in info.advice and "decoded whole" in info.advice


# ---------------------------------------------------------------------------------------------- files


def test_only_the_slices_of_a_window_are_read(tmp_path):
    path = save_series(tmp_path / "s", ALONG_Z)
    with open_image(path) as image:
        for z in (0, 3):
            (path / f"{z}.dcm").unlink()
        assert np.array_equal(image.read((Interval(1, 3), Interval(2, 5), Interval(0, 3)))[0], PIXELS[1:3, 2:5, :3])
        with pytest.raises(ImageFileError, match="0.dcm"):
            image.read()


def test_texts_and_hidden_files_beside_a_series_are_passed_over(tmp_path):
    path = save_series(tmp_path / "s", ALONG_Z, name="1.2.3.{}")
    (path / "LICENSE").write_text("a licence")
    (path / ".DS_Store").write_bytes(bytes(200))
    (path / "DICOMDIR").write_bytes(bytes(200))
    (path / "view.png").write_bytes(b"\x89PNG" + bytes(200))
    assert open_image(path).info.size[0] == 4


@pytest.mark.parametrize("content", [b"", bytes(200)])
def test_a_slice_that_has_become_no_dicom_is_named(tmp_path, content):
    path = save_series(tmp_path / "s", ALONG_Z, name="1.2.3.{}")
    (path / "1.2.3.3").write_bytes(content)
    refused(path, "1.2.3.3 is no DICOM file .its bytes 128 to 132 are not DICM.; copy it again, or remove it")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_slice_that_is_cut_short_is_refused_when_it_is_opened(tmp_path, compressed):
    path = save_series(tmp_path / "s", ALONG_Z)
    if compressed:
        data = pydicom.dcmread(path / "2.dcm")
        data.compress(pydicom.uid.RLELossless)
        data.save_as(path / "2.dcm")
    content = (path / "2.dcm").read_bytes()
    (path / "2.dcm").write_bytes(content[:-20])
    refused(path, "2.dcm: it (has 40 bytes of pixels, and its header says 60|ends before its pixels do); copy it again")


def test_more_frames_than_there_are_pixels_of_are_refused(tmp_path):
    data = dataset(PIXELS[0], ALONG_Z[0])
    data.compress(pydicom.uid.RLELossless)
    data.NumberOfFrames = 2_000_000_000
    refused(save(data, tmp_path / "a.dcm"), "it has 1 frames of pixels, and its header says 2000000000")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ImageType": ["ORIGINAL", "PRIMARY", "MOSAIC"]}, "Siemens mosaic.; convert the series to NIfTI with dcm2niix"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "PALETTE COLOR.; convert it to RGB"),
        ({"PixelData": None}, "it ends before its pixels do"),
        ({"Rows": None, "PixelData": None}, "it has no pixels, as a report or a plan has none; remove it"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "its RescaleSlope is 0"),
    ],
)
def test_what_is_no_picture_of_numbers_is_refused(tmp_path, fields, words):
    refused(save(dataset(PIXELS[0], ALONG_Z[0], **fields), tmp_path / "a.dcm"), words)


# ---------------------------------------------------------------------------------------------- numbers


def test_each_slice_has_its_own_slope(tmp_path):
    slopes = [0.5, 1.5, 2.0, 0.1]
    changes = {z: {"RescaleSlope": slope, "RescaleIntercept": -1.0} for z, slope in enumerate(slopes)}
    with open_image(save_series(tmp_path / "s", ALONG_Z, changes=changes)) as image:
        expected = PIXELS * np.array(slopes)[:, None, None] - 1
        assert image.info.dtype == "float32" and np.array_equal(image.read()[0], expected.astype(np.float32))


def test_signed_numbers_of_12_bits_keep_their_sign_whatever_is_above_them(tmp_path):
    signed = np.array([[-2048, -1, 0, 2047]], dtype=np.int16)
    stored = (signed.view(np.uint16) & 0x0FFF) | 0x5000
    data = dataset(stored, BitsStored=12, HighBit=11, PixelRepresentation=1)
    with open_image(save(data, tmp_path / "a.dcm")) as image:
        assert image.info.dtype == "int16" and np.array_equal(image.read()[0], signed)


def test_padding_is_nodata_in_the_numbers_that_are_read(tmp_path):
    fields = {"PixelPaddingValue": 7, "RescaleSlope": 2.0, "RescaleIntercept": -1000.0}
    with open_image(save_series(tmp_path / "s", ALONG_Z, **fields)) as image:
        assert image.info.nodata == (-986.0,)
        assert np.array_equal(image.valid(), PIXELS != 7)


def test_frames_of_one_file_have_places_and_slopes_of_their_own(tmp_path):
    from pydicom.dataset import Dataset

    data = dataset(PIXELS, NumberOfFrames=4, ImageOrientationPatient=None, PixelSpacing=None)
    shared, direction, measures = Dataset(), Dataset(), Dataset()
    direction.ImageOrientationPatient, measures.PixelSpacing = [1, 0, 0, 0, 1, 0], [0.75, 0.5]
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = [direction], [measures]
    frames = []
    for z in range(4):
        frame, place, change = Dataset(), Dataset(), Dataset()
        place.ImagePositionPatient = [0, 0, -3.0 * z]
        change.RescaleSlope, change.RescaleIntercept = 1 + z, 0
        frame.PlanePositionSequence, frame.PixelValueTransformationSequence = [place], [change]
        frames.append(frame)
    data.SharedFunctionalGroupsSequence, data.PerFrameFunctionalGroupsSequence = [shared], frames
    with open_image(save(data, tmp_path / "a.dcm")) as image:
        expected = (PIXELS * np.arange(1, 5)[:, None, None])[::-1]
        assert np.array_equal(image.read()[0], expected) and image.info.spacing == (3.0, 0.75, 0.5)


@pytest.mark.parametrize("first", [0.0, 5.0])
def test_a_dose_says_where_its_frames_are_by_their_distances(tmp_path, first):
    distances = [first, first + 3.0, first + 6.0, first + 9.0]
    data = dataset(PIXELS, (0, 0, 7), NumberOfFrames=4, GridFrameOffsetVector=distances, DoseGridScaling=0.5)
    path = save(data, tmp_path / "a.dcm")
    if first:
        refused(path, "do not begin at 0")
        return
    with open_image(path) as image:
        assert np.array_equal(image.read()[0], PIXELS * 0.5) and image.info.affine[2] == pytest.approx((3, 0, 0, 7))


def test_descriptions_of_other_frames_than_there_are_are_refused(tmp_path):
    data = dataset(PIXELS, (0, 0, 7), NumberOfFrames=4, GridFrameOffsetVector=[0.0, 1.0, 2.0])
    refused(save(data, tmp_path / "a.dcm"), "it has 4 frames, and says the places of 3")


# ---------------------------------------------------------------------------------------------- codecs


def encapsulated(data, content, syntax):
    data.file_meta.TransferSyntaxUID = syntax
    data.PixelData = pydicom.encaps.encapsulate([content])
    data["PixelData"].is_undefined_length = True
    return data


def test_jpeg_2000_of_16_bits_is_exact(tmp_path):
    from PIL import Image, features

    if not features.check("jpg_2000"):
        pytest.skip("Pillow has no JPEG 2000 here")
    pixels = (PIXELS[0] * 500).repeat(8, 0).repeat(8, 1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG2000", no_jp2=True, num_resolutions=2)
    data = encapsulated(dataset(pixels), file.getvalue(), pydicom.uid.JPEG2000Lossless)
    with open_image(save(data, tmp_path / "a.dcm")) as image:
        assert image.info.compression.startswith("JPEG 2000") and np.array_equal(image.read()[0], pixels)


def test_pixels_that_a_decoder_cannot_read_are_named_with_another(tmp_path):
    data = encapsulated(dataset(PIXELS[0]), b"\xff\x4f\xff\x51" + b"\xff" * 40, pydicom.uid.JPEG2000Lossless)
    with open_image(save(data, tmp_path / "a.dcm")) as image:
        with pytest.raises(ImageFileError, match="others may decode it: pip install pylibjpeg pylibjpeg-openjpeg"):
            image.read()


@pytest.mark.parametrize(
    ("syntax", "package"),
    [
        ("1.2.840.10008.1.2.4.70", "python-gdcm"),
        ("1.2.840.10008.1.2.4.80", "pyjpegls"),
        ("1.2.840.10008.1.2.4.51", "python-gdcm"),
    ],
)
def test_a_codec_that_is_missing_is_named_with_a_package_that_is_not_under_the_gpl(tmp_path, monkeypatch, syntax, package):
    from pydicom.pixels.common import CoderBase

    plugins = property(lambda self: ("pillow",) if syntax.endswith("51") else ())
    monkeypatch.setattr(CoderBase, "available_plugins", plugins)
    monkeypatch.setattr(CoderBase, "is_available", property(lambda self: bool(self.available_plugins)))
    refused(save(encapsulated(dataset(PIXELS[0]), b"\xff" * 40, syntax), tmp_path / "a.dcm"), f"; pip install {package}")


def test_no_package_under_the_gpl_is_advised():
    assert not any("libjpeg" in word.split("pylibjpeg-")[-1] for words in INSTALL.values() for word in words.split()[1:])
    assert {word for words in INSTALL.values() for word in words.split()} == {
        "python-gdcm", "pyjpegls", "pylibjpeg", "pylibjpeg-openjpeg",
    }  # fmt: skip
