"""Lengths are in millimetres, whatever unit a format tells them in; a spacing in no unit of length is refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from widefield.comm.mesh import World
from widefield.config import DataConfig, parse_config
from widefield.data import BadImageError, open_dataset, spacing_if_told, spacing_of
from widefield.image_files import open_image
from widefield.image_files.info import spacing_in_mm
from widefield.inference import single_rank
from widefield.naming import load
from widefield.prediction import session
from widefield.prediction.answers import Answer
from widefield.prediction.session import predict_files
from widefield.run import train

SPACING = (2.0, 0.5, 0.8)
"""In mm, of depth, height and width."""
SIZE = (6, 16, 12)


def voxels(number: int = 0) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 255, SIZE).astype(np.uint8)


def write_nifti(path: Path, array: np.ndarray, unit: str = "mm", scale: float = 1.0) -> Path:
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(array.T, np.diag([*(length * scale for length in SPACING[::-1]), 1.0]))
    image.header.set_xyzt_units(unit)
    nibabel.save(image, path)
    return path


def write_zarr(path: Path, array: np.ndarray, unit: str | None = "micrometer", scale: float = 1000.0) -> Path:
    zarr = pytest.importorskip("zarr")
    stored = zarr.create_array(str(path / "0"), shape=array.shape, dtype=array.dtype, zarr_format=2)
    stored[...] = array
    axes = [{"name": name, "type": "space", **({"unit": unit} if unit else {})} for name in "zyx"]
    scaled = {"type": "scale", "scale": [length * scale for length in SPACING]}
    levels = [{"path": "0", "coordinateTransformations": [scaled]}]
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    (path / ".zattrs").write_text(json.dumps({"multiscales": [{"version": "0.4", "axes": axes, "datasets": levels}]}))
    return path


def write_tiff(path: Path, array: np.ndarray, unit: str = "µm", scale: float = 1000.0) -> Path:
    tifffile = pytest.importorskip("tifffile")
    lengths = dict(zip("ZYX", SPACING, strict=True))
    about = {f"PhysicalSize{axis}": length * scale for axis, length in lengths.items()}
    units = {f"PhysicalSize{axis}Unit": unit for axis in "ZYX"}
    tifffile.imwrite(path, array, metadata={"axes": "ZYX", **about, **units}, ome=True)
    return path


def write_dicom(path: Path, array: np.ndarray) -> Path:
    pytest.importorskip("pydicom")
    from widefield.image_files.formats import dicom

    header = dicom._example_header(array[None, :1], [])
    header.PixelSpacing = [SPACING[1], SPACING[2]]
    path.mkdir()
    for z, plane in enumerate(array):
        header.ImagePositionPatient = [0.0, 0.0, SPACING[0] * z]
        header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = f"1.2.3.{z + 1}"
        dicom._save(header, path / f"{z}.dcm", plane[None, None], [])
    return path


def write_hdf5(path: Path, array: np.ndarray) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["raw"] = array
        file["raw"].attrs["element_size_um"] = [1000 * length for length in SPACING]
    return path


WRITERS: dict[str, tuple[str, Callable[[Path, np.ndarray], Path]]] = {
    "NIfTI": ("scan.nii", write_nifti),
    "NIfTI in um": ("scan.nii", lambda path, array: write_nifti(path, array, "micron", 1000)),
    "NIfTI in m": ("scan.nii", lambda path, array: write_nifti(path, array, "meter", 0.001)),
    "DICOM": ("scan", write_dicom),
    "OME-Zarr": ("scan.zarr", write_zarr),
    "OME-Zarr in nm": ("scan.zarr", lambda path, array: write_zarr(path, array, "nanometer", 1e6)),
    "OME-Zarr in cm": ("scan.zarr", lambda path, array: write_zarr(path, array, "centimeter", 0.1)),
    "OME-TIFF": ("scan.ome.tif", write_tiff),
    "OME-TIFF in mm": ("scan.ome.tif", lambda path, array: write_tiff(path, array, "mm", 1.0)),
    "HDF5": ("scan.h5", write_hdf5),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_tells_its_spacing_in_mm(kind: str, tmp_path):
    name, write = WRITERS[kind]
    with open_image(write(tmp_path / name, voxels())) as image:
        assert np.array_equal(image.read()[0], voxels())
        assert spacing_in_mm(image.info) == pytest.approx(SPACING, rel=1e-6)


CONFIG = """
model: {{name: unet, options: {{widths: [4, 6], shrink: [[1, 2, 2]]}}}}
data: {{name: masks, path: {path}, batch_size: 1, workers: 0, hold_out: 0.34, options: {{spacing: [1.5, 0.75, 0.75]}}}}
task: {{name: segmentation, metrics: [{surface}]}}
optimizer: {{name: sgd, lr: 0.1}}
schedule: {{name: constant, length: 2step}}
log: {{tensorboard: false}}
"""


def folder_of(place: Path, write: Callable[[Path, np.ndarray], Path], ending: str) -> Path:
    """Three volumes with masks of the same format."""
    for kind in ("images", "masks"):
        (place / kind).mkdir(parents=True)
        for number in range(3):
            write(place / kind / f"case{number}{ending}", voxels(number) if kind == "images" else voxels(number) // 128)
    return place


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """On NIfTI, resampled to a spacing in mm."""
    place = tmp_path_factory.mktemp("units")
    folder = folder_of(place / "data", write_nifti, ".nii")
    return train(parse_config(CONFIG.format(path=folder, surface="surface")), place / "run", World()).run


def test_a_run_on_a_spacing_in_mm_predicts_every_format_alike(run: Path, tmp_path):
    paths = []
    for number, kind in enumerate(["NIfTI", "DICOM", "NIfTI in um", "OME-Zarr", "OME-TIFF", "HDF5"]):
        name, write = WRITERS[kind]
        paths.append(write(tmp_path / f"{number}{name}", voxels(7)))
    found = predict_files(run, paths, [], World(), output=tmp_path / "out")
    assert not found.lefts and len(found.answers) == len(paths)
    expected, *others = map(labels_in, found.answers)
    assert expected.shape == (1, *SIZE) and len(np.unique(expected)) > 1, "too easy"
    assert all(np.array_equal(labels, expected) for labels in others)


def labels_in(answer: Answer) -> np.ndarray:
    with open_image(Path(answer.labels or "")) as image:
        return image.read()


@pytest.mark.parametrize("kind", ["NIfTI", "OME-Zarr", "OME-TIFF"])
def test_training_brings_every_format_to_the_same_grid(kind: str, tmp_path):
    name, write = WRITERS[kind]
    folder = folder_of(tmp_path / "data", write, name.partition(".")[2] and "." + name.partition(".")[2])
    options = {"spacing": [1.5, 0.75, 0.75]}
    found = open_dataset(DataConfig(name="masks", path=str(folder), hold_out=0.34, options=options)).evaluate
    assert found.shape(0) == (1, 8, 11, 13) and spacing_of(found, 0) == pytest.approx((1.5, 8 / 11, 12 * 0.8 / 13))


def test_a_folder_of_slices_per_patient_is_trained_on(tmp_path):
    """images/ID/ has a DICOM series, and masks/ID.nii its labels, on the same voxels of the world."""
    nibabel = pytest.importorskip("nibabel")
    for kind in ("images", "masks"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for number in range(3):
        write_dicom(tmp_path / "data" / "images" / f"case{number}", voxels(number))
        affine = np.diag([-SPACING[2], -SPACING[1], SPACING[0], 1.0])  # DICOM's x and y go the other way
        nibabel.save(nibabel.Nifti1Image(voxels(number).T // 128, affine), tmp_path / "data" / "masks" / f"case{number}.nii")
    config = parse_config(CONFIG.format(path=tmp_path / "data", surface="surface"))
    found = open_dataset(config.data)
    assert (found.dims, found.channels, found.dtype, len(found.train) + len(found.evaluate)) == (3, 1, torch.uint8, 3)
    plain = open_dataset(DataConfig(name="masks", path=str(tmp_path / "data"), hold_out=0.34)).evaluate
    number = int(Path(plain.name_of(0)).name[-1])
    image, labels = plain.read(0)
    assert np.array_equal(image[0], voxels(number)) and np.array_equal(labels, voxels(number) // 128)
    assert train(config, tmp_path / "run", World()).evaluation is not None
    array = np.diag([*SPACING[::-1], 1.0])
    nibabel.save(nibabel.Nifti1Image(voxels(0).T // 128, array), tmp_path / "data" / "masks" / "case0.nii")
    with pytest.raises(ValueError, match=r"case0.nii lies up to [\d.]+ away from .*case0"):
        open_dataset(config.data)


def test_a_spacing_without_a_unit_is_refused_where_lengths_count(run: Path, tmp_path):
    path = write_zarr(tmp_path / "scan.zarr", voxels(), unit=None)
    found = predict_files(run, [path], [], World(), output=tmp_path / "out")
    why = "its spacing of 2000 x 500 x 800 is in no unit, and lengths in mm are wanted; save it with a unit of length"
    assert not found.answers and why in found.lefts[0].reason and "scan.zarr" in found.lefts[0].reason
    folder = folder_of(tmp_path / "data", lambda path, array: write_zarr(path, array, None), ".zarr")
    with pytest.raises(BadImageError, match=r"case0.zarr: its spacing of 2000 x 500 x 800 is in no unit"):
        open_dataset(DataConfig(name="masks", path=str(folder), hold_out=0.34, options={"spacing": "median"}))
    plain = CONFIG.replace(", options: {{spacing: [1.5, 0.75, 0.75]}}", "")
    with pytest.raises(ValueError, match=r"surface, whose distances are in mm, and of .*case\d.zarr: .* in no unit.*; or give"):
        train(parse_config(plain.format(path=folder, surface="surface")), tmp_path / "run", World())
    given = parse_config(plain.format(path=folder, surface="{surface: {spacing: [2, 0.5, 0.8]}}"))
    assert train(given, tmp_path / "given", World()).evaluation is not None
    images = open_dataset(given.data).evaluate
    assert spacing_if_told(images, 0) is None


def test_a_spacing_in_another_unit_than_mm_is_refused(run: Path, tmp_path):
    """As if a file in um said that it is in mm."""
    path = write_zarr(tmp_path / "scan.zarr", voxels(), unit="millimeter")
    found = predict_files(run, [path], [], World(), output=tmp_path / "out")
    assert "has a spacing of 2000 x 500 x 800 mm, and images are brought to 1.5 x 0.75 x 0.75 mm" in found.lefts[0].reason
    folder = folder_of(tmp_path / "data", write_nifti, ".nii")
    with pytest.raises(
        ValueError, match=r"case\d.nii has a spacing of 2 x 0.5 x 0.8 mm, .* more than 500 times as much or less"
    ):
        options = {"spacing": [0.002, 0.0005, 0.0008]}
        open_dataset(DataConfig(name="masks", path=str(folder), hold_out=0.34, options=options))


def test_an_image_with_several_classes_per_voxel_is_not_resampled_back(run: Path):
    parts, _ = single_rank(run, None)
    layers = SimpleNamespace(dataset=parts.dataset, task=load("widefield.tasks", "multilabel_segmentation").build(3))
    with pytest.raises(
        ValueError, match=r"scan.nii is taken as it is, .* 1.5 x 0.75 x 0.75 mm; that is done by window, for one"
    ):
        session._pixels_of("scan.nii", "scan.nii", parts=layers)


def test_distances_of_volumes_with_and_without_spacing_are_refused(tmp_path):
    folder = folder_of(tmp_path / "data", write_nifti, ".nii")
    tifffile = pytest.importorskip("tifffile")
    for kind in ("images", "masks"):
        array = voxels(3) if kind == "images" else voxels(3) // 128
        (folder / kind / "case2.nii").unlink()
        for name in ("case2.tif", "case3.tif"):
            tifffile.imwrite(folder / kind / name, array, metadata={"axes": "ZYX"}, ome=True)
    plain = CONFIG.replace(", options: {{spacing: [1.5, 0.75, 0.75]}}", "").replace("hold_out: 0.34", "hold_out: 0.75")
    with pytest.raises(ValueError, match=r"whose distances are in mm, and .*case\d.tif tells no spacing while .*nii does"):
        train(parse_config(plain.format(path=folder, surface="surface")), tmp_path / "run", World())
