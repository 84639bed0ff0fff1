"""Layers for images, of 2 dims, and for volumes, of 3; and whether a network is for those that the data has."""

from __future__ import annotations

from torch import nn

from widefield.models._first_convolution import CONVOLUTIONS

CONV = {2: nn.Conv2d, 3: nn.Conv3d}
MAX_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
CONV_TRANSPOSE = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
AVERAGE_POOL = {2: nn.AvgPool2d, 3: nn.AvgPool3d}
INSTANCE_NORM = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
REFLECTION_PAD = {2: nn.ReflectionPad2d, 3: nn.ReflectionPad3d}
BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def check_dims(dims: int) -> None:
    """ValueError: it is neither."""
    if dims not in CONV:
        raise ValueError(f"model.options.dims is {dims!r}; it is 2 for images, or 3 for volumes")


def refuse_other_dims(name: str, model: nn.Module, dims: int) -> None:
    """ValueError: all convolutions of a named network are for another number of dims than images have."""
    found = {len(module.kernel_size) for module in model.modules() if isinstance(module, CONVOLUTIONS)}
    if not found or dims in found:
        return
    cure = (
        "take unet, resnet, a network of MONAI's, as monai/UNet, or one for videos, as torchvision/r3d_18"
        if dims == 3
        else "set model.options.dims or spatial_dims to 2, or take a network for images"
    )
    what = "volumes (C, D, H, W)" if dims == 3 else "images (C, H, W)"
    raise ValueError(f"model.name={name} convolves over {max(found)} dims and the data has {what}; {cure}")
