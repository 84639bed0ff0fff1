"""Networks of segmentation-models-pytorch, as `smp/Unet`; the option `encoder_name` names the encoder (resnet34).

Pretrained weights are those of the encoder.  Most of these networks want images whose sides 32 divides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from widefield.models._libraries import Request
from widefield.models._libraries._cached import cached_file
from widefield.models._output import refuse_auxiliary
from widefield.models._weights import load_pretrained
from widefield.naming import did_you_mean
from widefield.tensor_files import read_tensors

ENCODER = "resnet34"
"""The encoder where the recipe names none, as in segmentation-models-pytorch."""


def names() -> list[str]:
    return sorted(kind.__name__ for kind in _smp("smp").MODEL_ARCHITECTURES_MAPPING.values())


def build(name: str, request: Request) -> nn.Module:
    """ValueError: the library is not installed, has no such network, or no such weights of its encoder."""
    smp = _smp(request.config.name)
    kinds = {kind.__name__: kind for kind in smp.MODEL_ARCHITECTURES_MAPPING.values()}
    if name not in kinds:
        raise ValueError(f"smp has no model '{name}'{did_you_mean(name, kinds)} It has: {', '.join(kinds)}")
    request.refuse(
        {
            "encoder_weights": "set model.pretrained",
            "aux_params": "its second output is a class of the image, and tasks here have labels of one kind; leave it out",
        }
    )
    refuse_auxiliary(request.config)
    sizes = {"encoder_weights": None, "in_channels": request.in_channels, "classes": request.num_classes}
    model = request.call(kinds[name], **sizes)
    if request.config.pretrained:
        _load(smp, model, request)
    return model


def _smp(asked: str) -> Any:
    try:
        import segmentation_models_pytorch as smp
    except ImportError:
        raise ValueError(
            f"{asked} needs segmentation-models-pytorch, which is not installed; pip install 'widefield[smp]'"
        ) from None
    return smp


def _load(smp: Any, model: nn.Module, request: Request) -> None:
    encoder = request.options.get("encoder_name", ENCODER)
    known = smp.encoders.encoders.get(encoder, {}).get("pretrained_settings", {})
    wanted = request.wanted or "imagenet"
    if wanted not in known:
        have = f" It has: {', '.join(known)}" if known else " It has none; set model.weights to a file"
        raise ValueError(f"smp has no weights '{wanted}' of the encoder {encoder}{did_you_mean(wanted, known)}{have}")
    if not request.pretrained:
        return
    asked = request.asked
    settings = known[wanted]
    path = cached_file(settings["repo_id"], "model.safetensors", revision=settings["revision"], asked=asked)
    tensors = {f"encoder.{name}": value for name, value in read_tensors(path).items()}
    source = f"{settings['repo_id']}, the encoder"
    request.reasons.append(load_pretrained(tensors, model, source=source, only="encoder."))


CASES: list[tuple[str, dict[str, Any], torch.Size, torch.Size]] = [
    ("Unet", {"encoder_name": "mobilenet_v2"}, torch.Size((2, 5, 64, 32)), torch.Size((2, 10, 64, 32))),
    ("FPN", {"encoder_name": "resnet18"}, torch.Size((2, 1, 64, 32)), torch.Size((2, 10, 64, 32))),
]
