"""torchvision's networks: classification, video, and segmentation with the dict that it gives.

They are built for 3 channels, so the first convolution is replaced for any other number.  Pretrained weights are those of
torchvision's cache; a head of another number of classes keeps its random start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torchvision import models

from widefield.models._first_convolution import set_channels
from widefield.models._libraries import Request
from widefield.models._output import keep_main_output, refuse_auxiliary
from widefield.models._weights import load_pretrained
from widefield.naming import did_you_mean
from widefield.tensor_files import read_tensors

OTHER_TASKS = {"detection": "boxes, in their own way", "optical_flow": "the movement between two images"}
"""Parts of torchvision.models whose networks learn what no task here does, and what that is."""
AUXILIARY = ("aux_loss", "aux_logits")
"""The option that adds auxiliary heads, where a network has one."""


def names() -> list[str]:
    return [name for name in models.list_models() if not _other_task(name)]


def build(name: str, request: Request) -> nn.Module:
    """ValueError: no such network, or one without the weights or auxiliary heads that are asked for.

    NotImplementedError: a network that finds boxes or movements.
    """
    if name not in models.list_models():
        raise ValueError(f"torchvision has no model '{name}'{did_you_mean(name, names())}")
    if ".detection." in f"{models.get_model_builder(name).__module__}.":
        raise NotImplementedError(_why_no_detector(name))
    if learns := _other_task(name):
        raise NotImplementedError(
            f"torchvision/{name} finds {learns}, and tasks here have a class, a value or labels of pixels; take a network of "
            "classification or segmentation"
        )
    request.refuse({"weights": "set model.pretrained", "weights_backbone": "set model.pretrained"})
    weights = _weights_of(name, request) if request.config.pretrained else None
    parameters = _parameters(name)
    sizes: dict[str, Any] = {"num_classes": request.num_classes} | _auxiliary(parameters, request)
    sizes |= {"weights_backbone": None} if "weights_backbone" in parameters else {}
    if "transform_input" in parameters and weights is not None:  # these weights want it, as torchvision builds the network
        sizes["transform_input"] = request.in_channels == 3
    model = request.call(models.get_model_builder(name), **sizes)
    if request.in_channels != 3:
        set_channels(model, request.in_channels)
    if weights is not None and request.pretrained:
        _load(model, weights, name, request)
    if "segmentation" in models.get_model_builder(name).__module__ or _has_auxiliary(parameters):
        keep_main_output(model, auxiliary=request.config.auxiliary is not None)
    return model


def _why_no_detector(name: str) -> str:
    """Detectors of torchvision take lists of images and targets and give losses, or boxes; what is here in their place."""
    ours = {"retinanet": "retinanet", "fcos": "fcos", "fasterrcnn": "faster_rcnn", "ssd300": "ssd"}.get(name.partition("_")[0])
    if ours is not None:
        same = "" if "mobilenet" in name or name == "fasterrcnn_resnet50_fpn_v2" else ", the same network,"
        return (
            f"torchvision/{name} resizes and normalizes images by itself, and its losses are of one device; take "
            f"model.name={ours}{same} and task.name=detection with task.options.method={ours}"
        )
    known = "RetinaNet, FCOS, SSD and Faster R-CNN"
    what = "is SSD on MobileNet with layers of its own" if name.startswith("ssd") else "finds masks or key points"
    return (
        f"torchvision/{name} {what}, and task.name=detection has {known} on backbones with a feature pyramid; take "
        "model.name=ssd with model.options.backbone, or model.name=faster_rcnn for boxes"
    )


def _other_task(name: str) -> str | None:
    module = models.get_model_builder(name).__module__
    return next((learns for part, learns in OTHER_TASKS.items() if f".{part}." in f"{module}."), None)


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    """The arguments of a builder and of the class that it builds, by name."""
    build = models.get_model_builder(name)
    made = inspect.signature(build).return_annotation
    kind = getattr(inspect.getmodule(inspect.unwrap(build)), made, None) if isinstance(made, str) else made
    of_class = inspect.signature(kind).parameters if isinstance(kind, type) else {}
    return {**of_class, **inspect.signature(build).parameters}


def _has_auxiliary(parameters: dict[str, inspect.Parameter]) -> bool:
    return any(option in parameters for option in AUXILIARY)


def _auxiliary(parameters: dict[str, inspect.Parameter], request: Request) -> dict[str, bool]:
    """The option that builds auxiliary heads, or leaves them out.  ValueError: they are asked for and there are none."""
    request.refuse(dict.fromkeys(AUXILIARY, "set model.auxiliary to the weight of their loss, as 0.4"))
    asked = request.config.auxiliary is not None
    found = {option: asked for option in AUXILIARY if option in parameters}
    if not found:
        refuse_auxiliary(request.config)
    return found


# ---------------------------------------------------------------------------------------------- pretrained weights


def _weights_of(name: str, request: Request) -> Any:
    """The member of torchvision's enumeration that model.pretrained names; of the network, or of its backbone."""
    own = dict(models.get_model_weights(name).__members__)
    known = _backbone_weights(name) | own
    if not known:
        raise ValueError(f"torchvision has no pretrained weights of {name}; set model.weights to a file, or pretrained=null")
    wanted = request.wanted or "DEFAULT"
    if wanted not in known:
        hint = did_you_mean(wanted, known)
        raise ValueError(f"model.pretrained is '{wanted}'{hint} torchvision/{name} has: {', '.join(known)}, or true")
    return known[wanted]


def _backbone_weights(name: str) -> dict[str, Any]:
    parameter = inspect.signature(models.get_model_builder(name)).parameters.get("weights_backbone")
    kinds = get_args(parameter.annotation) if parameter is not None else ()
    return {key: value for kind in kinds if kind is not type(None) for key, value in kind.__members__.items()}


def _load(model: nn.Module, weights: Any, name: str, request: Request) -> None:
    path = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
    if not path.is_file():
        raise ValueError(
            f"{request.asked} is {path.name}, which is not in {path.parent}; get it once, where there is a network: curl "
            f"--create-dirs -o {path} {weights.url}"
        )
    tensors = _with_new_names(read_tensors(path, sha256=path.stem.rpartition("-")[2]), model)
    is_backbone = weights.name not in models.get_model_weights(name).__members__
    if is_backbone:
        tensors = _of_backbone(tensors, model)
    source = f"{weights} ({path.name})"
    request.reasons.append(load_pretrained(tensors, model, source=source, only="backbone." if is_backbone else ""))


def _of_backbone(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a segmentation network's backbone has, by their names there."""
    own = model.state_dict()
    for prefix in ("features.", ""):  # MobileNet's backbone is what lies under `features` in the whole network
        named = {f"backbone.{name.removeprefix(prefix)}": value for name, value in tensors.items() if name.startswith(prefix)}
        found = {name: value for name, value in named.items() if name in own}
        if found:
            return found
    raise AssertionError("the backbone has none of its own weights")


def _with_new_names(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """DenseNet's published weights have names with dots that the network has no more: `norm.1.weight` for `norm1.weight`."""
    if not isinstance(model, models.DenseNet):
        return tensors
    parts = ("norm", "conv", "relu")
    rename: Callable[[str], str] = lambda name: _joined(name, parts)  # noqa: E731
    return {rename(name): value for name, value in tensors.items()}


def _joined(name: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        for number in ("1", "2"):
            name = name.replace(f".{part}.{number}.", f".{part}{number}.")
    return name


CASES: list[tuple[str, dict[str, Any], torch.Size, torch.Size]] = [
    ("resnet18", {}, torch.Size((2, 5, 33, 35)), torch.Size((2, 10))),
    ("mobilenet_v3_small", {}, torch.Size((2, 1, 33, 35)), torch.Size((2, 10))),
    ("lraspp_mobilenet_v3_large", {}, torch.Size((2, 4, 33, 35)), torch.Size((2, 10, 33, 35))),
    ("fcn_resnet50", {}, torch.Size((1, 3, 33, 35)), torch.Size((1, 10, 33, 35))),
]
