"""Models at sizes that fill a GPU, in bfloat16, whose steps benchmarks/gpu_ops.py has measured."""

from __future__ import annotations

from dataclasses import dataclass

from planner.truth_cases import SEGMENTATION, Net, data_of, recipe_of

from widefield.config import RunConfig, parse_config
from widefield.training.given import Given

LAST = "model.channels_last=true"
_NETS: dict[str, tuple[Net, list[str]]] = {
    "resnet50": (Net("torchvision/resnet50", (3, 224, 224), batch=128), [LAST]),
    "resnet18": (Net("torchvision/resnet18", (3, 512, 512), batch=64), [LAST]),
    "densenet": (Net("timm/densenet121", (3, 224, 224), batch=256), [LAST]),
    "efficientnet": (Net("timm/efficientnet_b0", (3, 224, 224), batch=512), [LAST]),
    "convnext": (Net("timm/convnext_tiny", (3, 224, 224), batch=256), [LAST]),
    "vit": (Net("timm/vit_small_patch16_224", (3, 224, 224), batch=512), []),
    "vgg": (Net("torchvision/vgg11_bn", (3, 224, 224), batch=64), [LAST]),
    "unet": (Net("unet", (3, 1024, 1024), SEGMENTATION, {"widths": [32, 64, 128, 256]}, batch=2), [LAST]),
    "unet 3-D": (Net("unet", (1, 128, 128, 128), SEGMENTATION, {"widths": [16, 32, 64]}, batch=2), []),
    "deeplab": (Net("torchvision/deeplabv3_resnet50", (3, 512, 512), SEGMENTATION, batch=16), [LAST]),
}
"""With what a recipe sets besides: on a GPU, channels last is the choice of recipes of images."""
_HELD_OUT = ("resnet18", "convnext", "vgg", "deeplab")


def names() -> list[str]:
    return list(_NETS)


def is_held_out(name: str) -> bool:
    """Whether no rate of a kernel was taken from the model."""
    return name in _HELD_OUT


@dataclass(frozen=True)
class GpuCase:
    """A model on one GPU."""

    name: str
    ranks: int = 1
    on_cpu: bool = False

    @property
    def config(self) -> RunConfig:
        net, settings = _NETS[self.name]
        return parse_config(recipe_of(net), ["optimizer.name=sgd", "optimizer.lr=1e-3", "precision=bfloat16", *settings])

    @property
    def given(self) -> Given:
        return data_of(_NETS[self.name][0])
