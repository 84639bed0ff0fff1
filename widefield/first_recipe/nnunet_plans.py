"""nnU-Net's plan of a dataset, nnUNetPlans.json: its configuration 3d_fullres read, and one written from ours.

nnU-Net orders axes by `transpose_forward`; here they are depth, height, width, as its files are read.  What is taken from a
plan is what a network of ours can have too: spacing, patch, batch, by what levels shrink, kernels, channels, intensity.  The
network is another one (nnU-Net's has strided convolutions and LeakyReLU), so its weights do not fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from widefield.first_recipe.volume_plan import VolumePlan, widths_of

PLANS = "nnUNetPlans.json"
_CONFIGURATION = "3d_fullres"
SCHEMES = ("CTNormalization", "ZScoreNormalization", "NoNormalization", "RGBTo01Normalization")
"""Those that recipes have."""


def with_plans(folder: Path, ours: VolumePlan) -> VolumePlan | None:
    """Our plan with what nnUNetPlans.json in the folder says; None where there is none.

    ValueError: it cannot be read, has no 3d_fullres, or something that recipes do not have.
    """
    path = folder / PLANS
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        found = _read(tree["configurations"][_CONFIGURATION], tree.get("transpose_forward") or [0, 1, 2], ours)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it is nnU-Net's, with the configuration "
            f"{_CONFIGURATION}: mend it, or move it away to have the folder looked at"
        ) from None
    odd = next((scheme for scheme in found.schemes if scheme not in SCHEMES), None)
    if odd is not None:
        raise ValueError(f"{path} has the normalization {odd}, and recipes have {', '.join(SCHEMES)}; change it there")
    return found


def _read(about: dict[str, Any], order: list[int], ours: VolumePlan) -> VolumePlan:
    """ValueError, TypeError, LookupError: it is not as nnU-Net writes it."""
    inside = about.get("architecture", {}).get("arch_kwargs", {})
    strides = inside.get("strides") or about["pool_op_kernel_sizes"]
    kernels = inside.get("kernel_sizes") or about["conv_kernel_sizes"]
    patch = _reordered(about["patch_size"], order)
    shrink, kernels = (tuple(_reordered(one, order) for one in some) for some in (strides[1:], kernels))
    first = int(about.get("UNet_base_num_features", 32))
    widths = inside.get("features_per_stage") or widths_of(first, len(kernels))
    schemes = tuple(str(one) for one in about["normalization_schemes"])
    spacing = tuple(float(length) for length in _reordered(about["spacing"], order, kind=float))
    if len(kernels) != len(shrink) + 1 or len(widths) != len(kernels) or len(schemes) != len(ours.schemes):
        raise ValueError(
            f"{len(shrink) + 1} strides, {len(kernels)} kernels, {len(widths)} widths, and {len(schemes)} normalizations for "
            f"{len(ours.schemes)} channels"
        )
    same = ours.spacing is None and all(abs(a / b - 1) < 0.01 for a, b in zip(spacing, ours.unit_spacing, strict=True))
    batch = int(about["batch_size"])
    return replace(
        ours, spacing=None if same else spacing, unit_spacing=spacing, patch=patch, whole=False, batch=batch, shrink=shrink,
        kernels=kernels, widths=tuple(int(one) for one in widths), schemes=schemes,
    )  # fmt: skip


def _reordered(values: list[Any], order: list[int], kind: type = int) -> tuple[Any, ...]:
    """Values along nnU-Net's axes, of which axis i is ours number order[i], along ours."""
    found: list[Any] = [None] * len(order)
    for axis, value in zip(order, values, strict=True):
        found[axis] = kind(value)
    return tuple(found)


def _network_tree(plan: VolumePlan) -> dict[str, Any]:
    """The arguments of nnU-Net's PlainConvUNet."""
    stages = len(plan.kernels)
    return {
        "n_stages": stages,
        "features_per_stage": list(plan.widths),
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [list(one) for one in plan.kernels],
        "strides": [[1, 1, 1], *(list(one) for one in plan.shrink)],
        "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }


def _configuration_tree(plan: VolumePlan) -> dict[str, Any]:
    return {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": plan.batch,
        "patch_size": list(plan.patch),
        "median_image_size_in_voxels": [float(side) for side in plan.size],
        "spacing": list(plan.unit_spacing),
        "normalization_schemes": list(plan.schemes),
        "use_mask_for_norm": [False] * len(plan.schemes),
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None},
        "resampling_fn_seg_kwargs": {"is_seg": True, "order": 1, "order_z": 0, "force_separate_z": None},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None},
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": _network_tree(plan),
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": False,
    }


def plans_tree(plan: VolumePlan, *, name: str, spacing: tuple[float, ...], properties: dict[str, Any]) -> dict[str, Any]:
    """The plan in the keys of nnU-Net v2.  name: of the dataset.  spacing: the median.  properties: of its intensities."""
    return {
        "dataset_name": name,
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": list(spacing),
        "original_median_shape_after_transp": list(plan.size),
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {_CONFIGURATION: _configuration_tree(plan)},
        "experiment_planner_used": "widefield",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": properties,
    }
