"""The section `model` of a recipe: the network and its initial weights."""

from __future__ import annotations

from widefield.config.field_types import Options
from widefield.section import Section


class ModelConfig(Section):
    name: str
    """`resnet` or `unet` (ours), `torchvision/resnet50`, `timm/resnet50`, or `package.module:callable`."""
    options: Options = {}
    """Keyword arguments of the model's constructor."""
    weights: str | None = None
    """A .safetensors file to start from; its names must be the model's."""
    channels_last: bool | None = None
    """Memory format of images and weights; chosen by the device where null."""
    compile: bool = False
    """Compile the model with torch.compile."""
