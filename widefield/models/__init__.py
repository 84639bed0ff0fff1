"""Single-device networks by name.

`resnet`, `unet`: files in this folder, each with `build(in_channels, num_classes, **options)` and CASES.
`torchvision/NAME`, `timm/NAME`: models of these libraries.  `package.module:callable`: the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from widefield.config import ModelConfig
from widefield.naming import did_you_mean, load
from widefield.own_code import code_named, is_code, refuse_object, takes


def build(config: ModelConfig, *, in_channels: int, num_classes: int) -> nn.Module:
    """The network that a config names, for images of `in_channels` channels and `num_classes` classes.

    ValueError: no such model, or arguments that it does not take.
    """
    shape = {"in_channels": in_channels, "num_classes": num_classes}
    refuse_object(config.name, key="model.name", keyword="model")
    if is_code(config.name):
        return _users_own(config, shape)
    library, slash, name = config.name.partition("/")
    if not slash:
        return _call(load("widefield.models", config.name).build, config, shape)
    builders = {"torchvision": _torchvision, "timm": _timm}
    if library not in builders:
        hint = did_you_mean(library, builders)
        raise ValueError(f"model.name is '{config.name}'{hint} The part before / can be: {', '.join(builders)}")
    return builders[library](name, config, shape)


def check_counts(**options: Any) -> None:
    """ValueError: an option is neither a whole number above 0 nor a list of such."""
    for name, value in options.items():
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if not numbers or not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"model.options.{name} is {value!r}; whole numbers above 0 are wanted, as 2 or [16, 32]")


def _torchvision(name: str, config: ModelConfig, shape: dict[str, int]) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        raise ValueError(f"torchvision has no model '{name}'{did_you_mean(name, models.list_models())}")
    if shape["in_channels"] != 3:
        raise ValueError(
            f"{config.name} reads images of 3 channels and the data has {shape['in_channels']}; "
            "add Grayscale: {num_output_channels: 3} to data.read and data.read_evaluate, or take a timm model"
        )
    return _call(models.get_model_builder(name), config, {"num_classes": shape["num_classes"]})


def _timm(name: str, config: ModelConfig, shape: dict[str, int]) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise ValueError(f"{config.name} needs timm, which is not installed; pip install 'widefield[timm]'") from None
    if not timm.is_model(name):
        raise ValueError(f"timm has no model '{name}'{did_you_mean(name, timm.list_models())}")
    sizes = {"in_chans": shape["in_channels"], "num_classes": shape["num_classes"]}
    return _call(lambda **options: timm.create_model(name, **options), config, sizes)


def _users_own(config: ModelConfig, shape: dict[str, int]) -> nn.Module:
    """The model of `module:callable`, called with in_channels and num_classes where its signature has them."""
    build = code_named(config.name, key="model.name")
    given = {key: shape[key] for key in takes(build, *shape)}
    model = _call(build, config, given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{config.name} gave a {type(model).__name__}; a torch.nn.Module is wanted")
    return model


def _call(build: Callable[..., nn.Module], config: ModelConfig, sizes: dict[str, Any]) -> nn.Module:
    try:
        return build(**(sizes | config.options))
    except TypeError as error:
        raise ValueError(f"{config.name} does not take model.options {config.options}: {error}") from None
    except (ArithmeticError, AssertionError, LookupError, RuntimeError) as error:
        if not config.options or ":" in config.name:  # for a user's own model the traceback helps more
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{config.name} cannot be built with model.options {config.options}: {reason}") from None
