"""MONAI's networks, as `monai/UNet`: for images, or for volumes where the data has them or with `spatial_dims: 3`.

It has no weights in a cache of its own; set model.weights.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from widefield.models._libraries import Request
from widefield.models._output import keep_main_output, refuse_auxiliary, refuse_deep_supervision
from widefield.naming import did_you_mean

CLASSES = ("out_channels", "num_classes")
"""The arguments that are the number of classes, in this order."""
DEFAULTS = {"channels": (16, 32, 64, 128), "strides": (2, 2, 2)}
"""For networks such as UNet, which have no widths of their own; each stride halves the image."""
LEVELS = ("SegResNetDS", "SegResNetDS2")
"""Those of them whose outputs are of coarser and coarser levels; `dsdepth` of them."""
DEPTH = 4
"""How many levels they have where the recipe does not say it."""
SEVERAL_OUTPUTS = ("BasicUNetPlusPlus", "SegResNetDS", "SegResNetDS2", "SegResNetVAE")
"""Networks that give a list; its first is the main output."""


def names() -> list[str]:
    return sorted({kind.__name__ for kind in _kinds("monai").values()})


def build(name: str, request: Request) -> nn.Module:
    """ValueError: MONAI is not installed, or has no such network for images and classes."""
    kinds = _kinds(request.config.name)
    if name not in kinds:
        raise ValueError(f"monai has no model '{name}' for images{did_you_mean(name, kinds)} It has: {', '.join(names())}")
    if request.config.pretrained:
        raise ValueError(f"monai/{name} has no weights in a cache; set model.weights to a file, and leave model.pretrained out")
    kind = kinds[name]
    accepted = _arguments(kind)
    shape = {"spatial_dims": request.dims or 2, "in_channels": request.in_channels} | DEFAULTS
    sizes = {key: value for key, value in shape.items() if key in accepted}
    sizes[next(key for key in CLASSES if key in accepted)] = request.num_classes
    deep, stacked = request.config.deep_supervision, "deep_supervision" in accepted
    if deep and stacked:
        sizes["deep_supervision"] = True
    elif deep and name in LEVELS:
        sizes["dsdepth"] = DEPTH
    else:
        refuse_deep_supervision(request.config)
    model = request.call(kind, **sizes)
    if name in SEVERAL_OUTPUTS or deep:
        if stacked:
            refuse_auxiliary(request.config)
        keep_main_output(model, auxiliary=request.config.auxiliary is not None or deep, stacked=deep and stacked)
    else:
        refuse_auxiliary(request.config)
    return model


def _kinds(asked: str) -> dict[str, type[nn.Module]]:
    """The networks that can be made for a number of channels and classes."""
    try:
        from monai.networks import nets
    except ImportError:
        raise ValueError(f"{asked} needs MONAI, which is not installed; pip install 'widefield[monai]'") from None
    found = {}
    for kind in vars(nets).values():
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            accepted = _arguments(kind)
            if "in_channels" in accepted and any(key in accepted for key in CLASSES):
                found[kind.__name__] = kind
    return found


def _arguments(kind: type[nn.Module]) -> set[str]:
    """The names of a constructor's arguments, with those that it passes on to its base classes by `**kwargs`."""
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            found |= {parameter.name for parameter in parameters}
            if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
                return found
    return found


CASES: list[tuple[str, dict[str, Any], torch.Size, torch.Size]] = [
    ("UNet", {}, torch.Size((2, 5, 32, 24)), torch.Size((2, 10, 32, 24))),
    ("UNet", {"spatial_dims": 3}, torch.Size((1, 1, 16, 16, 8)), torch.Size((1, 10, 16, 16, 8))),
    ("BasicUNetPlusPlus", {"features": [4, 4, 8, 8, 8, 4]}, torch.Size((1, 2, 32, 32)), torch.Size((1, 10, 32, 32))),
    ("DenseNet121", {"init_features": 8, "growth_rate": 4}, torch.Size((2, 2, 33, 35)), torch.Size((2, 10))),
]
