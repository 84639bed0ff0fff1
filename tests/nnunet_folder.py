"""A folder of nnU-Net with volumes of two channels and several spacings, sizes and dtypes, made from the built-in volumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from widefield.config import DataConfig
from widefield.data import open_dataset

SPACINGS = ((2.0, 1.0, 1.0), (2.5, 0.8, 0.9), (1.6, 1.0, 1.2))
"""Depth, height, width, in turns."""
SIZES = ((9, 22, 17), (8, 25, 19), (11, 21, 15))


def volume(number: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Voxels and labels (D, H, W) of a built-in volume with the size and spacing of this number."""
    about = {
        "size": SIZES[number % 3],
        "spacing": SPACINGS[number % 3],
        "volumes": [number + 1, 1],
        "vessels": 1.0,
        "blobs": 1.0,
    }
    image, labels = open_dataset(DataConfig(name="volume", options=about | options)).train.read(number)
    return image[0].numpy(), labels.numpy()


def affine_of(spacing: tuple[float, ...], number: int = 0) -> np.ndarray:
    """From (x, y, z) to mm; of odd numbers the world is turned about z, as in scans of another orientation."""
    affine = np.diag([*spacing[::-1], 1.0])
    if number % 2:
        affine = np.array([[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]) @ affine
    affine[:3, 3] = [12.5, -3.25, number]
    return affine


def save(array_DHW: np.ndarray, path: Path, spacing: tuple[float, ...], number: int = 0) -> None:
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array_DHW.T, affine_of(spacing, number)), path)


def write(folder: Path, *, count: int = 6, tests: int = 3, channels: tuple[str, ...] = ("CT", "PET"), **options: Any) -> Path:
    """Cases case_0, ...: channel 0 is int16, of -1,000 to 1,040, and channel 1 float32, brighter where blobs are."""
    for number in range(count + tests):
        split = "Tr" if number < count else "Ts"
        image, labels = volume(number, **options)
        spacing = SPACINGS[number % 3]
        for channel, _ in enumerate(channels):
            values = (image.astype(np.int16) * 8 - 1000) if channel == 0 else (image / 50 + (labels == 2)).astype(np.float32)
            save(values, folder / f"images{split}/case_{number}_{channel:04}.nii.gz", spacing, number)
        save(labels, folder / f"labels{split}/case_{number}.nii.gz", spacing, number)
    about = {
        "channel_names": {str(number): name for number, name in enumerate(channels)},
        "labels": {"background": 0, "vessel": 1, "blob": 2}, "numTraining": count, "file_ending": ".nii.gz",
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder
