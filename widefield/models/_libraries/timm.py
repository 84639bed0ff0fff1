"""timm's networks, for any number of channels and classes; pretrained weights are those of the cache of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from widefield.models._libraries import Request
from widefield.models._libraries._cached import cached_file
from widefield.models._output import refuse_auxiliary
from widefield.naming import did_you_mean
from widefield.tensor_files import read_tensors


def names() -> list[str]:
    return _timm("timm").list_models()


def build(name: str, request: Request) -> nn.Module:
    """ValueError: timm is not installed, has no such network, or none of the weights that are asked for."""
    timm = _timm(request.config.name)
    if not timm.is_model(name):
        raise ValueError(f"timm has no model '{name}'{did_you_mean(name, timm.list_models())}")
    refuse_auxiliary(request.config)
    sizes: dict[str, Any] = {"in_chans": request.in_channels, "num_classes": request.num_classes}
    tensors = _pretrained(timm, name, request) if request.config.pretrained else None
    if tensors is None or not request.pretrained:
        return request.call(lambda **options: timm.create_model(name, **options), **sizes)
    sizes |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": tensors}}  # timm itself adapts channels and head
    model = request.call(lambda **options: timm.create_model(name, **options), **sizes)
    model.pretrained_cfg["state_dict"] = None  # the tensors would be kept, and copied with the model
    return model


def _timm(asked: str) -> Any:
    try:
        import timm
    except ImportError:
        raise ValueError(f"{asked} needs timm, which is not installed; pip install 'widefield[timm]'") from None
    return timm


def _pretrained(timm: Any, name: str, request: Request) -> dict[str, Tensor] | None:
    """The tensors of the network's weights in the cache; None where none are to be loaded.  ValueError: they are not there."""
    base, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
    tag = request.wanted or tag
    if not tags or (tag and tag not in tags):
        hint = did_you_mean(tag, tags) if tags else "."
        known = f" It can be {', '.join(tags)}, or true" if tags else " It has none; set model.weights to a file"
        raise ValueError(f"timm has no weights '{tag or 'pretrained'}' of {base}{hint}{known}")
    if not request.pretrained:
        return None
    about = timm.get_pretrained_cfg(f"{base}.{tag}" if tag else base)
    asked = request.asked
    if about.hf_hub_id:
        path = cached_file(about.hf_hub_id, about.hf_hub_filename or "model.safetensors", asked=asked)
    else:
        path = Path(torch.hub.get_dir(), "checkpoints", Path(about.url or "").name)
        if not path.is_file():
            raise ValueError(
                f"{asked} is {path.name}, which is not in {path.parent}; get it once, where there is a network: curl "
                f"--create-dirs -o {path} {about.url}"
            )
    request.reasons.append(f"model.pretrained: {about.hf_hub_id or path.name}, as timm fits it to channels and classes")
    return read_tensors(path)


CASES: list[tuple[str, dict[str, Any], torch.Size, torch.Size]] = [
    ("resnet18", {"drop_rate": 0.1}, torch.Size((2, 5, 33, 35)), torch.Size((2, 10))),
]
