"""Volumes with class numbers, as a folder that nnU-Net and widefield read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from widefield.data import Dataset, Images, spacing_of

ENDING = ".nii.gz"


def write_nnunet(dataset: Dataset, folder: Path) -> str:
    """Write a dataset of volumes: those to train on to imagesTr and labelsTr, those to evaluate to imagesTs and labelsTs.

    A volume without spacing gets 1 mm.  Returns what was written, in words.
    ValueError: images, or labels of another kind; a folder that has something in it, or that cannot be written; no nibabel.
    """
    if dataset.dims != 3 or dataset.labels != "pixels":
        raise ValueError(
            f"the data has {dataset.dims} dims and labels of the kind '{dataset.labels}'; volumes whose voxels have one class "
            "each are written, as those of data.name=volume"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already, and is not overwritten; name another --output")
    try:
        for images, place in ((dataset.train, "Tr"), (dataset.evaluate, "Ts")):
            _write_split(images, folder / f"images{place}", folder / f"labels{place}")
        about: dict[str, Any] = {
            "channel_names": {str(number): "intensity" for number in range(dataset.channels)},
            "labels": {name: number for number, name in enumerate(dataset.classes)},
            "numTraining": len(dataset.train),
            "file_ending": ENDING,
        }
        (folder / "dataset.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error}); name another --output") from None
    counts = f"{len(dataset.train)} volumes to train on and {len(dataset.evaluate)} to evaluate"
    return f"{counts} written to {folder}; train with: widefield train {folder}"


def _write_split(images: Images, place: Path, labels: Path) -> None:
    for folder in (place, labels):
        folder.mkdir(parents=True)
    for index in range(len(images)):
        image, target = images.read(index)
        assert isinstance(target, Tensor)
        spacing = spacing_of(images, index) or (1.0, 1.0, 1.0)
        for number, channel in enumerate(image):
            _save(channel, spacing, place / f"case_{index:03}_{number:04}{ENDING}")
        _save(target, spacing, labels / f"case_{index:03}{ENDING}")


def _save(volume_DHW: Tensor, spacing: tuple[float, ...], path: Path) -> None:
    """As NIfTI, whose dims are x, y, z."""
    try:
        import nibabel
    except ImportError:
        raise ValueError(
            "volumes are written as NIfTI by nibabel, which is not installed; pip install 'widefield[medical]'"
        ) from None
    array = np.ascontiguousarray(volume_DHW.numpy())
    array = array.astype(np.uint8) if array.dtype == np.int64 else array
    image = nibabel.Nifti1Image(array.T, np.diag([*spacing[::-1], 1.0]))
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)
