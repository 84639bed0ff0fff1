"""ResNet-50 of 224 pixels a side, recorded on tensors without data."""

from functools import cache

import torch
import torchvision
from planner.recorded import recorded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from widefield.planner.step_record import StepRecord

PUBLISHED = [
    ("V100", "float32", 367, 0.1),
    ("V100", "float16", 1200, 0.1),
    ("A100-80G", "tf32", 938, 0.35),
    ("A100-80G", "float16", 2470, 0.35),
]
"""Device, precision, images per second, and by how much the prediction may be off."""


@cache
def resnet50(precision: str) -> StepRecord:
    """Of 128 images, or of 256 with channels last in half precision, as in the published measurements."""
    half = precision == "float16"
    with FakeTensorMode():
        model, image = torchvision.models.resnet50(), torch.empty(256 if half else 128, 3, 224, 224)
        if half:
            image = image.contiguous(memory_format=torch.channels_last)
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight = nn.Parameter(module.weight.detach().contiguous(memory_format=torch.channels_last))
        return recorded(model, image, low=torch.float16 if half else None)[0]
