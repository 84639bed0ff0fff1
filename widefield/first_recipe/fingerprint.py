"""What nnU-Net knows of a dataset before it trains: dataset_fingerprint.json and nnUNetPlans.json, written beside dataset.json.

Shapes and spacings are depth, height, width, and of the whole volumes: nothing is cropped here.  Statistics of intensities are
over all voxels of the foreground; nnU-Net draws 10,000 of each case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from widefield.config import DataConfig
from widefield.data import open_dataset
from widefield.data.nnunet import is_nnunet
from widefield.data.statistics import statistics_of
from widefield.first_recipe.look import look_at
from widefield.first_recipe.nnunet_plans import PLANS, plans_tree
from widefield.first_recipe.volumes import FoundVolumes, plan_of, volumes_of

FINGERPRINT = "dataset_fingerprint.json"


def write_fingerprint(folder: Path, config: DataConfig) -> list[Path]:
    """Write both files; returns their paths.  config: of the folder, whose images to train on they are of.

    ValueError: no nnU-Net folder of volumes; a volume tells no spacing; a file that is there; the disk refuses.
    """
    paths = [folder / FINGERPRINT, folder / PLANS]
    there = next((path for path in paths if path.exists()), None)
    if there is not None:
        raise ValueError(f"{there} is there already, and is not overwritten; move it away")
    if not is_nnunet(folder):
        raise ValueError(
            f"{folder} is no folder of nnU-Net with imagesTr/ and labelsTr/, which fingerprints are of; leave --fingerprint out"
        )
    look = look_at(folder)
    if look.dataset.dims != 3:
        raise ValueError(
            f"{folder} has images of {look.dataset.dims} dims, and fingerprints are of volumes; leave --fingerprint out"
        )
    found = volumes_of(look)
    if found.spacings is None:
        raise ValueError(f"{folder} has volumes that tell no spacing, and a fingerprint is of these; save them with a spacing")
    properties = _properties(config)
    plan = plan_of(look, found)
    trees = [
        _fingerprint(found, properties),
        plans_tree(plan, name=folder.resolve().name, spacing=found.median, properties=properties),
    ]
    try:
        for path, tree in zip(paths, trees, strict=True):
            path.write_text(json.dumps(tree, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error}); make it writable") from None
    return paths


def _fingerprint(found: FoundVolumes, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "spacings": [list(one) for one in found.spacings or []],
        "shapes_after_crop": [list(size) for size in found.sizes],
        "median_relative_size_after_cropping": 1.0,
        "foreground_intensity_properties_per_channel": properties,
    }


def _properties(config: DataConfig) -> dict[str, Any]:
    """By the number of a channel, statistics of the foreground's voxels."""
    dataset = open_dataset(config)
    kind: dict[str, Any] = {"channels": dataset.channels, "dtype": dataset.dtype, "labels": dataset.labels}
    statistics = statistics_of(dataset.train, **kind, foreground=len(dataset.classes))
    return {
        str(number): {
            "max": channel.percentiles[100.0],
            "mean": channel.mean,
            "median": channel.percentiles[50.0],
            "min": channel.percentiles[0.0],
            "percentile_00_5": channel.percentiles[0.5],
            "percentile_99_5": channel.percentiles[99.5],
            "std": channel.std,
        }
        for number, channel in enumerate(statistics.channels)
    }
