"""What a first recipe chooses for volumes: spacing, patch or whole, network, intensity, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widefield.config import ModelConfig
from widefield.data import spacing_if_told
from widefield.data.nnunet import channel_names, is_nnunet
from widefield.data.resampled import median_of
from widefield.data.spatial.resampling import Resampling
from widefield.first_recipe import choices
from widefield.first_recipe.choices import RecipeEntry
from widefield.first_recipe.look import Look
from widefield.first_recipe.nnunet_plans import PLANS, with_plans
from widefield.first_recipe.volume_plan import (
    ANISOTROPIC,
    SAME,
    Lengths,
    Size,
    VolumePlan,
    common_spacing,
    levels_of,
    patch_of,
    widths_of,
)
from widefield.quantity import bytes_text

MOST_VOXELS = {True: 2**22, False: 2**18}
"""Of a patch, or of a volume that is trained on as a whole, with and without a GPU: a step is to take seconds, not minutes."""
BATCH = 2
OPAQUE = -500
"""Whole numbers below it are of CT: air has -1,000 Hounsfield units."""
FLIPS = ["RandomHorizontalFlip", "RandomVerticalFlip", "RandomDepthFlip"]


@dataclass(frozen=True)
class FoundVolumes:
    """sizes, spacings: of the volumes to train on, as they are; in mm; spacings None where a file tells none.

    median: of the spacings, or 1 where they are not known.  names: of the channels, "" where they are not known.
    """

    sizes: list[Size]
    spacings: list[Lengths] | None
    names: list[str]

    @property
    def median(self) -> Lengths:
        return tuple(median_of(self.spacings)) if self.spacings else (1.0,) * 3

    def resampled(self, spacing: Lengths | None) -> list[Size]:
        """Their sizes at a common spacing."""
        if spacing is None or self.spacings is None:
            return self.sizes
        grid = Resampling(spacing)
        return [grid.map_of(size, own).output for size, own in zip(self.sizes, self.spacings, strict=True)]


def volumes_of(look: Look) -> FoundVolumes:
    """From the headers of all volumes to train on."""
    images, folder = look.dataset.train, Path(look.data.path or "")
    spacings = [spacing_if_told(images, index) for index in range(len(images))]
    sizes = [tuple(images.shape(index)[1:]) for index in range(len(images))]  # type: ignore[attr-defined]
    known = [one for one in spacings if one is not None and all(length > 0 for length in one)]
    names = channel_names(folder) if is_nnunet(folder) else []
    names = names if len(names) == look.dataset.channels else [""] * look.dataset.channels
    return FoundVolumes(sizes, known if len(known) == len(spacings) else None, names)


def plan_of(look: Look, found: FoundVolumes) -> VolumePlan:
    """The plan for a folder, without nnUNetPlans.json."""
    spacing = None if found.spacings is None else common_spacing(found.spacings, found.sizes)
    sizes, unit = found.resampled(spacing), spacing or found.median
    size = tuple(sorted(side)[len(side) // 2] for side in zip(*sizes, strict=True))
    least = tuple(min(side) for side in zip(*sizes, strict=True))
    first = 16 if len(look.dataset.train) < 500 else 32
    shrink, kernels = levels_of(least, unit)
    widths = widths_of(first, len(kernels))
    voxels = _voxels(look, size, model_of(shrink, kernels, widths, batch_norm=False))
    largest = max(math.prod(one) for one in sizes)
    whole = largest <= voxels
    batch = BATCH if not whole or (len(set(sizes)) == 1 and BATCH * largest <= voxels) else 1
    patch = least
    if not whole:
        patch = patch_of(least, unit, max(1, voxels // BATCH))
        shrink, kernels = levels_of(patch, unit)
    schemes = tuple(_scheme(look, name) for name in found.names)
    widths = widths_of(first, len(kernels))
    return VolumePlan(spacing, unit, size, patch, whole, min(batch, len(sizes)), shrink, kernels, widths, schemes)


def _scheme(look: Look, name: str) -> str:
    """A channel's intensity by its name, as nnU-Net chooses it; of a channel without name, by what was seen."""
    named = {"ct": "CTNormalization", "nonorm": "NoNormalization", "rgb_to_0_1": "RGBTo01Normalization"}
    if name:
        return named.get(name.lower(), "ZScoreNormalization")
    return "CTNormalization" if look.dtype == torch.int16 and look.least < OPAQUE else "ZScoreNormalization"


def _voxels(look: Look, size: Size, model: dict[str, Any]) -> int:
    """How many voxels may be trained on at once."""
    kept = choices.kept_bytes(look, ModelConfig(name="unet", options=model), size) / math.prod(size)
    return min(MOST_VOXELS[torch.cuda.is_available()], int(choices.free_memory() / 2 / kept))


def model_of(
    shrink: tuple[Size, ...], kernels: tuple[Size, ...], widths: tuple[int, ...], *, batch_norm: bool
) -> dict[str, Any]:
    """The options of the U-Net."""
    options: dict[str, Any] = {"widths": list(widths), "shrink": [list(by) for by in shrink]}
    if any(set(kernel) != {3} for kernel in kernels):
        options["kernels"] = [list(kernel) for kernel in kernels]
    return options | ({} if batch_norm else {"norm": "group"})


# ---------------------------------------------------------------------------------------------- the recipe


def choices_for(look: Look) -> list[RecipeEntry]:
    """All choices, in the order of the recipe."""
    found = volumes_of(look)
    ours = plan_of(look, found)
    theirs = with_plans(Path(look.data.path or ""), ours)
    plan = theirs or ours
    source = f"of {PLANS}" if theirs else ""
    learning = [*_task(look, found), *choices.optimizer_of(False), *choices.schedule_of(look, False)]
    return [*_model(plan, source), *_data(look, found, plan, source), *learning]


def _model(plan: VolumePlan, source: str) -> Iterator[RecipeEntry]:
    whole = "statistics of single volumes" if plan.whole else "statistics of many patches, which also fit whole volumes"
    options = model_of(plan.shrink, plan.kernels, plan.widths, batch_norm=not plan.whole)
    seen = " x ".join(str(math.prod(by)) for by in zip(*plan.shrink, strict=True)) if plan.shrink else "1"
    lengths = " x ".join(f"{length:g}" for length in plan.unit_spacing)
    yield RecipeEntry("model.name", "unet", f"{len(plan.widths)} levels; the norm has {whole}")
    why = source or f"axes are shrunk by {seen} in all, those with long voxels ({lengths}) later"
    yield RecipeEntry("model.options", options, why)


def _data(look: Look, found: FoundVolumes, plan: VolumePlan, source: str) -> Iterator[RecipeEntry]:
    yield from choices.data_of(look)
    if plan.spacing is not None:
        yield RecipeEntry("data.options", {"spacing": list(plan.spacing)}, source or _why_spacing(found))
    size = " x ".join(map(str, plan.size))
    memory = f"{bytes_text(choices.free_memory())} of memory are free"
    why = (
        f"whole volumes, {size} voxels in the middle" if plan.whole else f"patches of {' x '.join(map(str, plan.patch))} voxels"
    )
    yield RecipeEntry("data.batch_size", plan.batch, f"{source or why}; {memory}")
    yield RecipeEntry("data.evaluate_batch_size", 1, "volumes are evaluated as a whole")
    yield RecipeEntry("data.intensity", *_intensity(plan, found))
    if not plan.whole:
        crop = {"ClassBalancedCrop": {"size": list(plan.patch), "share": 0.33}}
        yield RecipeEntry("data.read", [crop], f"of {size} voxels; a third of the patches are around a voxel of a class")
    yield RecipeEntry("data.augment", FLIPS, "of volume and labels as one; delete those of axes whose ends mean something")


def _why_spacing(found: FoundVolumes) -> str:
    assert found.spacings is not None
    least, most = (" x ".join(f"{end(one):g}" for one in zip(*found.spacings, strict=True)) for end in (min, max))
    return (
        f"files have {least} to {most} mm: all are brought to the median (depth, height, width), a tenth percentile where the "
        f"median is {ANISOTROPIC:g} times the others"
    )


def _intensity(plan: VolumePlan, found: FoundVolumes) -> tuple[Any, str]:
    """The value, and its reason."""
    schemes, names = set(plan.schemes), ", ".join(name or "no name" for name in found.names)
    if schemes == {"CTNormalization"}:
        value = {"name": "zscore", "percentiles": [0.5, 99.5], "area": "foreground"}
        return value, f"channels: {names}; CT is clipped and scaled by the voxels of all classes but background, as in nnU-Net"
    if schemes == {"NoNormalization"}:
        return "values", f"channels: {names}"
    if schemes == {"RGBTo01Normalization"}:
        return "range", f"channels: {names}"
    mixed = "; CT among other channels is scaled as these are" if "CTNormalization" in schemes else ""
    return "image", f"channels: {names}; each volume has the mean 0 and the deviation 1{mixed}"


def _task(look: Look, found: FoundVolumes) -> Iterator[RecipeEntry]:
    for entry in choices.task_of(look):
        yield RecipeEntry(entry.key, entry.value, entry.reason.replace("pixels", "voxels"))
    if look.dataset.labels in ("pixels", "layers"):
        surface: Any = "surface" if found.spacings else {"surface": {"spacing": [1, 1, 1]}}
        unit = "mm" if found.spacings else "voxels, for not every file tells its spacing"
        yield RecipeEntry("task.metrics", ["dice_cases", surface], f"means over volumes; distances of surfaces in {unit}")


def spacing_in_words(found: FoundVolumes) -> str:
    """As `spacing 2.5 x 1 x 1`, or a range."""
    if found.spacings is None:
        return "without spacing"
    same = all(max(one) <= min(one) * (1 + SAME) for one in zip(*found.spacings, strict=True))
    lengths = " x ".join(f"{length:g}" for length in found.median)
    return f"spacing {lengths} mm" if same else f"of several spacings, {lengths} mm in the middle"
