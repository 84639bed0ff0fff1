"""The section `model` of a recipe: the network, its initial weights, and what of it does not learn."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from widefield.config.field_types import Options
from widefield.section import Section


def _whole_numbers(value: Any) -> Any:
    """Keys of digits as numbers: JSON, and `model.unfreeze.2=...` on the command line, have texts."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: inner for key, inner in value.items()}


Patterns = list[Annotated[str, Field(min_length=1)]]
Epoch = Annotated[int, Field(ge=1)]


class ModelConfig(Section):
    name: str
    """`resnet` or `unet` (ours), `torchvision/resnet50`, `timm/resnet50`, `smp/Unet`, `monai/UNet`, or
    `package.module:callable`."""
    options: Options = {}
    """Keyword arguments of the model's constructor."""
    pretrained: bool | str | None = None
    """Start from weights in the library's cache: true, or the name of one of several; nothing is downloaded."""
    weights: str | None = None
    """A .safetensors, .pt or .pth file to start from; its names must be the model's, see weights_map and weights_strict."""
    weights_map: dict[str, str | None] = {}
    """Renames the tensors of that file: a prefix by a prefix, as {"module.": ""}, or a pattern, as {"*.gamma": "*.weight"};
    null leaves them out."""
    weights_strict: bool = True
    """With false, tensors that are missing, unknown or of another shape, such as a head of other classes, are left out and
    listed."""
    auxiliary: Annotated[float, Field(ge=0)] | None = None
    """Weight of the losses of a model's auxiliary heads; null builds the model without them."""
    deep_supervision: bool = False
    """Compare the outputs of coarser levels with labels too, in training, with weights of 1, 1/2, 1/4, ... over their sum: of
    `unet`, of MONAI's DynUNet, SegResNetDS and SegResNetDS2, and of your own, where it returns a list, the finest first."""
    freeze: Patterns = []
    """Modules or parameters that do not learn, by name or pattern, as ["stem*", "layer1"]."""
    unfreeze: Annotated[dict[Epoch, Patterns | str], BeforeValidator(_whole_numbers)] = {}
    """What of them learns after so many epochs, as {2: "layer4*", 5: "*"}."""
    frozen_batch_norm: bool | Patterns = False
    """BatchNorm layers that keep their running statistics, normalize with them in training too, and do not learn: true for
    all, or names and patterns."""
    channels_last: bool | None = None
    """Memory format of images and weights; chosen by the device where null."""
    compile: bool = False
    """Compile the model with torch.compile."""

    @model_validator(mode="after")
    def _one_kind_of_heads(self) -> ModelConfig:
        if self.deep_supervision and self.auxiliary is not None:
            raise ValueError(
                f"deep_supervision has weights of its own, and auxiliary is {self.auxiliary:g}; leave one of them out"
            )
        if "deep_supervision" in self.options:
            raise ValueError("options has deep_supervision, and its losses need model.deep_supervision=true; set that instead")
        return self
