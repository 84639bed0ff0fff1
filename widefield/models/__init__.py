"""Single-device networks by name.

`resnet`, `unet`: files in this folder, each with `build(in_channels, num_classes, **options)` and CASES.  Those that take
`dims` get it, 2 for images and 3 for volumes.
`torchvision/NAME`, `timm/NAME`, `smp/NAME`, `monai/NAME`: models of these libraries.
`package.module:callable`: the user's own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from widefield.config import ModelConfig
from widefield.models._libraries import Request, called
from widefield.models._of_dims import refuse_other_dims
from widefield.models._output import keep_main_output as keep_main_output
from widefield.models._output import refuse_auxiliary, refuse_deep_supervision
from widefield.models._weights import load_weights_file as load_weights_file
from widefield.naming import did_you_mean, load, names_in
from widefield.own_code import code_named, is_code, refuse_object, takes

_LIBRARIES = "widefield.models._libraries"


def build(
    config: ModelConfig,
    *,
    in_channels: int,
    num_classes: int,
    dims: int | None = None,
    from_noise: bool = False,
    pretrained: bool = False,
    reasons: list[str] | None = None,
) -> nn.Module:
    """The network that a config names, for images of `in_channels` channels and `num_classes` classes.

    dims: of the images' pixels, 3 of volumes; None: as the network's options say.
    from_noise: the input is noise of `in_channels` channels, and not an image; a model that takes this gets it.
    pretrained: load the weights that `model.pretrained` names; without it the network is only built as they want it.
    reasons: gets what of the weights was loaded, in words.
    ValueError: no such model, arguments that it does not take, pretrained weights that are not there, or a named network for
        other dims.
    NotImplementedError: a model that learns what no task does.
    """
    refuse_object(config.name, key="model.name", keyword="model")
    library, slash, _ = config.name.partition("/")
    if slash and not is_code(config.name):
        if library != "monai":
            refuse_deep_supervision(config)
        request = Request(config, in_channels, num_classes, dims, pretrained, [] if reasons is None else reasons)
        model = _of_library(config, library, request)
    else:
        known = ({"dims": dims} if dims is not None else {}) | ({"from_noise": True} if from_noise else {})
        model = _without_library(config, {"in_channels": in_channels, "num_classes": num_classes}, known)
    if dims is not None and not is_code(config.name):
        refuse_other_dims(config.name, model, dims)
    return model


def _of_library(config: ModelConfig, library: str, request: Request) -> nn.Module:
    if library not in libraries():
        hint = did_you_mean(library, libraries())
        raise ValueError(f"model.name is '{config.name}'{hint} The part before / can be: {', '.join(libraries())}")
    return load(_LIBRARIES, library).build(config.name.partition("/")[2], request)


def libraries() -> list[str]:
    """The libraries whose models can be named."""
    return names_in(_LIBRARIES)


def names_of(library: str) -> list[str]:
    """The models of a library.  ValueError: it is not installed."""
    return load(_LIBRARIES, library).names()


def check_counts(**options: Any) -> None:
    """ValueError: an option is neither a whole number above 0 nor a list of such."""
    for name, value in options.items():
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if not numbers or not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"model.options.{name} is {value!r}; whole numbers above 0 are wanted, as 2 or [16, 32]")


def _without_library(config: ModelConfig, shape: dict[str, int], known: dict[str, int]) -> nn.Module:
    """A model of ours, or the user's own.  known: what else it is called with where it takes that."""
    if config.pretrained:
        raise ValueError(
            f"model.pretrained is {str(config.pretrained).lower()} and {config.name} is of no library with weights of its own; "
            "set model.weights to a file, and leave model.pretrained out"
        )
    if is_code(config.name):
        return _users_own(config, shape | known)
    build_ours = load("widefield.models", config.name).build
    refuse_auxiliary(config)
    levels = takes(build_ours, "deep_supervision") if config.deep_supervision else []
    if not levels:
        refuse_deep_supervision(config)
    given = shape | {key: known[key] for key in takes(build_ours, *known)} | dict.fromkeys(levels, True)
    model = called(build_ours, config, given)
    if levels:
        keep_main_output(model, auxiliary=True)
    return model


def _users_own(config: ModelConfig, shape: dict[str, int]) -> nn.Module:
    """The model of `module:callable`, called with in_channels, num_classes and dims where its signature has them."""
    build = code_named(config.name, key="model.name")
    given = {key: shape[key] for key in takes(build, *shape)}
    model = called(build, config, given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{config.name} gave a {type(model).__name__}; a torch.nn.Module is wanted")
    if config.auxiliary is not None or config.deep_supervision:
        keep_main_output(model, auxiliary=True)
    return model
