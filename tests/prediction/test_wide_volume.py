"""A volume is predicted by window into labels that lie on it, and are those of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from marks import few
from ranks import on_ranks
from wide_scene import labels_in, patched

from widefield.comm.mesh import World
from widefield.config import parse_config
from widefield.data import open_dataset
from widefield.prediction.session import Predicted, Wishes, predict_files
from widefield.run import train

nibabel = pytest.importorskip("nibabel")
pytestmark = pytest.mark.usefixtures("always_wide")
AFFINE = np.array([[0, -0.7, 0.1, 12.5], [0.8, 0, 0, -3.25], [0, 0.1, 2.5, 7.75], [0, 0, 0, 1]])
CONFIG = """
model: {name: unet, options: {widths: [4, 6], shrink: [[1, 2, 2]]}}
data: {name: volume, batch_size: 2, workers: 0, options: {size: [10, 22, 17], volumes: [6, 3], vessels: 1, blobs: 1}}
task: {name: segmentation}
optimizer: {name: sgd, lr: 0.5}
schedule: {name: constant, length: 12step}
precision: float64
log: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def volume_run(tmp_path_factory) -> Path:
    return train(parse_config(CONFIG), tmp_path_factory.mktemp("volumes") / "run", World()).run


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """(Z, Y, X)."""
    larger = CONFIG.replace("size: [10, 22, 17]", "size: [25, 41, 33]")
    return open_dataset(parse_config(larger).data).evaluate.read(0)[0][0].numpy()


@pytest.fixture(scope="module")
def whole_labels(volume_run, pixels, tmp_path_factory) -> np.ndarray:
    """Of a .npy, which is read as a whole: as channels first, so that nothing takes it for an image of channels."""
    place = tmp_path_factory.mktemp("whole")
    np.save(place / "volume.npy", pixels[None])
    found = predict_files(volume_run, [place / "volume.npy"], [], World(), output=place / "out")
    labels = np.load(found.answers[0].labels)
    assert labels.shape == pixels.shape and len(np.unique(labels)) > 1, "too easy"
    return labels


def nifti_of(pixels: np.ndarray, path: Path) -> Path:
    nibabel.save(nibabel.Nifti1Image(pixels.T, AFFINE), path)
    return path


def _on_ranks(mesh, run: Path, volume: Path, output: Path, overrides: list[str]) -> Predicted:
    with pytest.MonkeyPatch.context() as patch:  # the ranks serve other tests afterwards
        patched(patch)
        return predict_files(run, [volume], overrides, mesh.world, output=output)


@pytest.mark.parametrize(
    ("ranks", "overrides"), [(1, []), (1, ["stream.tiles=[2,3,2]"]), (2, ["mesh.space=[2,1,1]"]), (3, ["mesh.space=[1,3,1]"])]
)
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_labels_of_a_volume_are_those_of_the_whole_and_lie_on_it(
    volume_run, pixels, whole_labels, tmp_path, ranks, overrides, suffix
):
    path = nifti_of(pixels, tmp_path / f"scan{suffix}")
    for found in on_ranks(ranks, _on_ranks, volume_run, path, tmp_path / "out", overrides):
        assert np.array_equal(labels_in(found), whole_labels)
        labels = nibabel.load(found.answers[0].labels)
        assert found.answers[0].labels == str(tmp_path / "out" / "scan.nii.gz")
        assert np.array_equal(labels.affine, nibabel.load(path).affine)
        assert labels.header.get_zooms() == nibabel.load(path).header.get_zooms()


def test_a_volume_is_not_predicted_by_a_run_of_images(run, pixels, tmp_path):
    path = nifti_of(pixels, tmp_path / "scan.nii")
    found = predict_files(run, [path], [], World(), output=tmp_path / "out")
    assert not found.answers and "scan.nii" in found.lefts[0].reason


@pytest.mark.long
@pytest.mark.parametrize("suffix", few([".nii", ".nii.gz"], ".nii.gz", is_sweep=True))
def test_probabilities_of_a_volume_are_those_of_the_whole_and_lie_on_it(volume_run, pixels, tmp_path, suffix):
    path = nifti_of(pixels, tmp_path / f"scan{suffix}")
    np.save(tmp_path / "whole.npy", pixels[None])
    wishes = Wishes(flips=True, probabilities="npy")
    predict_files(volume_run, [tmp_path / "whole.npy"], [], World(), output=tmp_path / "whole", wishes=wishes)
    for found in on_ranks(2, _wished_on_ranks, volume_run, path, tmp_path / "out", wishes):
        assert not found.lefts
    likely = nibabel.load(tmp_path / "out" / "probabilities" / "scan.nii")
    expected = np.load(tmp_path / "whole" / "probabilities" / "whole.npy")
    assert likely.get_data_dtype() == np.float32 and np.array_equal(likely.affine, nibabel.load(path).affine)
    found = np.asarray(likely.dataobj).T
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=0, atol=2**-12)  # the whole's are float16


def _wished_on_ranks(mesh, run: Path, volume: Path, output: Path, wishes: Wishes) -> Predicted:
    with pytest.MonkeyPatch.context() as patch:
        patched(patch)
        return predict_files(run, [volume], ["mesh.space=[1,2,1]"], mesh.world, output=output, wishes=wishes)
