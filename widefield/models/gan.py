"""A generator and a discriminator as one model, for the task `gan`; calling it makes images.

Generators: `unet` (widefield's), `pix2pixhd`, `restorer`, `dcgan` of noise, or any other name that model.name can have.
Discriminators: `patch`, `multiscale`, `dcgan`, or `package.module:callable`.
A discriminator is called with the input and the image that it judges, and joins them; one whose forward takes one image alone,
of the channels of both, gets them joined.  Where images are made of noise it is called with the image alone.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from widefield.config import ModelConfig
from widefield.models import build as build_named
from widefield.models import check_counts
from widefield.models._dcgan import DISCRIMINATOR_DEFAULTS, dcgan_discriminator, dcgan_generator
from widefield.models._of_dims import AVERAGE_POOL, CONV, CONV_TRANSPOSE, INSTANCE_NORM, REFLECTION_PAD, check_dims
from widefield.naming import did_you_mean
from widefield.own_code import code_named, is_code, takes


class Adversaries(nn.Module):
    """generator: from inputs to images.  discriminator: from inputs and images, two tensors, to scores or features."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, image: Tensor) -> Any:
        """What the generator makes of an image, or of noise."""
        return self.generator(image)


class OfJoined(nn.Module):
    """Calls a module that takes one image with several, joined by their channels."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *images: Tensor) -> Any:
        return self.module(torch.cat(images, 1))


class PatchDiscriminator(nn.Module):
    """Scores of overlapping patches, of 70 x 70 pixels with three strides (Isola et al. 2017, arXiv:1611.07004).

    Gives the features of all layers in a list, the scores (B, 1, *pixels) last; without `features` the scores alone, so that no
    map of the image's size leaves a stream.
    """

    def __init__(
        self, in_channels: int, *, width: int, strides: int, spectral: bool, normalized: bool, features: bool, dims: int
    ) -> None:
        super().__init__()
        self.has_features = features
        widths = [in_channels, *(width * 2 ** min(level, 3) for level in range(strides + 1)), 1]
        steps: list[nn.Module] = []
        for level, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
            stride = 2 if level < strides else 1
            has_norm = normalized and 0 < level < len(widths) - 2
            layer = CONV[dims](before, after, 4, stride, 2, bias=not has_norm)
            parts: list[nn.Module] = [spectral_norm(layer) if spectral else layer]
            parts += [INSTANCE_NORM[dims](after)] if has_norm else []
            parts += [nn.LeakyReLU(0.2)] if level < len(widths) - 2 else []
            steps.append(nn.Sequential(*parts))
        self.steps = nn.ModuleList(steps)

    def forward(self, *images: Tensor) -> list[Tensor]:
        image, features = torch.cat(images, 1), []
        for step in self.steps:
            image = step(image)
            features.append(image)
        return features if self.has_features else features[-1:]


class MultiscaleDiscriminator(nn.Module):
    """Patch discriminators on the image and on it halved, again and again (Wang et al. 2018, arXiv:1711.11585)."""

    def __init__(self, in_channels: int, *, scales: int, dims: int, **options: Any) -> None:
        super().__init__()
        self.nets = nn.ModuleList(PatchDiscriminator(in_channels, dims=dims, **options) for _ in range(scales))
        self.down = AVERAGE_POOL[dims](3, stride=2, padding=1, count_include_pad=False)

    def forward(self, *images: Tensor) -> list[list[Tensor]]:
        image, answers = torch.cat(images, 1), []
        for number, net in enumerate(self.nets):
            image = self.down(image) if number else image
            answers.append(net(image))
        return answers


class ReflectedResidual(nn.Module):
    def __init__(self, width: int, dims: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for last in (False, True):
            parts += [REFLECTION_PAD[dims](1), CONV[dims](width, width, 3), INSTANCE_NORM[dims](width)]
            parts += [] if last else [nn.ReLU()]
        self.body = nn.Sequential(*parts)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.body(image)


def pix2pixhd(
    in_channels: int, num_classes: int, *, width: int = 64, blocks: int = 9, strides: int = 4, dims: int = 2
) -> nn.Module:
    """The global generator: 7 x 7, strides down, residual blocks, as many up, 7 x 7, with reflection and instance norms.

    Its outputs are not bounded, since targets are 0..1 here and not -1..1.  Sides are multiples of 2^strides.
    """
    first, last = (CONV[dims](*channels, 7) for channels in ((in_channels, width), (width, num_classes)))
    layers: list[nn.Module] = [REFLECTION_PAD[dims](3), first, INSTANCE_NORM[dims](width), nn.ReLU()]
    for level in range(strides):
        half = width * 2**level
        layers += [CONV[dims](half, 2 * half, 3, 2, 1), INSTANCE_NORM[dims](2 * half), nn.ReLU()]
    layers += [ReflectedResidual(width * 2**strides, dims) for _ in range(blocks)]
    for level in reversed(range(strides)):
        half = width * 2**level
        layers += [CONV_TRANSPOSE[dims](2 * half, half, 3, 2, 1, output_padding=1), INSTANCE_NORM[dims](half), nn.ReLU()]
    return nn.Sequential(*layers, REFLECTION_PAD[dims](3), last)


GENERATORS = {"pix2pixhd": pix2pixhd, "dcgan": dcgan_generator}
_CHECKED = ("width", "blocks", "strides", "scales", "start")


def build(
    in_channels: int,
    num_classes: int,
    *,
    dims: int = 2,
    from_noise: bool = False,
    generator: str = "pix2pixhd",
    generator_options: dict[str, Any] | None = None,
    discriminator: str = "patch",
    discriminator_options: dict[str, Any] | None = None,
) -> nn.Module:
    """num_classes: channels of the images that are made.  from_noise: of noise, which the discriminator is not called with.

    generator_options: of pix2pixhd width, blocks, strides; of dcgan width, strides, start, normalized.
    discriminator_options: width, strides, spectral (spectral norms), normalized (instance norms), features (whether it gives
        those of all layers, which task.options.feature_matching compares) and, of multiscale, scales; of dcgan width, strides,
        start, spectral, normalized (batch norms).
    ValueError: no such module, or options that it does not take.
    """
    check_dims(dims)
    made = _generator(generator, generator_options or {}, in_channels, num_classes, dims)
    judged = num_classes if from_noise else in_channels + num_classes
    judge = _discriminator(discriminator, discriminator_options or {}, judged, dims)
    return Adversaries(made, judge)


def _generator(name: str, options: dict[str, Any], in_channels: int, num_classes: int, dims: int) -> nn.Module:
    if name not in GENERATORS:
        return build_named(ModelConfig(name=name, options=options), in_channels=in_channels, num_classes=num_classes, dims=dims)
    return _called(GENERATORS[name], "generator", options, in_channels, num_classes, dims=dims)


def _discriminator(name: str, options: dict[str, Any], in_channels: int, dims: int) -> nn.Module:
    if is_code(name):
        build_own = code_named(name, key="model.options.discriminator")
        made = _called(build_own, "discriminator", options, **dict.fromkeys(takes(build_own, "in_channels"), in_channels))
        if not isinstance(made, nn.Module):
            raise ValueError(f"model.options.discriminator={name} gives a {type(made).__name__}; a torch.nn.Module is wanted")
        return made if _takes_several(made) else OfJoined(made)
    defaults = {"width": 64, "strides": 3, "spectral": False, "normalized": True, "features": True}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "patch": (PatchDiscriminator, defaults),
        "multiscale": (MultiscaleDiscriminator, defaults | {"scales": 2}),
        "dcgan": (dcgan_discriminator, DISCRIMINATOR_DEFAULTS),
    }
    if name not in kinds:
        raise ValueError(
            f"model.options.discriminator is {name!r}{did_you_mean(str(name), kinds)} It can be: {', '.join(kinds)}, or "
            "package.module:callable"
        )
    kind, known = kinds[name]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"model.options.discriminator_options has {unknown[0]}; {name} takes {', '.join(known)}")
    return _called(kind, "discriminator", known | options, in_channels, dims=dims)


def _takes_several(module: nn.Module) -> bool:
    parameters = signature(module.forward).parameters.values()
    return len(parameters) > 1 or any(one.kind == one.VAR_POSITIONAL for one in parameters)


def _called(build_it: Any, which: str, options: dict[str, Any], *given: Any, **known: Any) -> Any:
    check_counts(**{key: value for key, value in options.items() if key in _CHECKED and (key, value) != ("start", None)})
    try:
        return build_it(*given, **known, **options)
    except TypeError as error:
        raise ValueError(f"model.options.{which}_options {options} do not fit: {error}") from None


_SMALL = {"generator_options": {"width": 4, "blocks": 1, "strides": 2}, "discriminator_options": {"width": 4, "strides": 2}}

CASES = [
    (_SMALL, torch.Size((2, 3, 16, 12)), torch.Size((2, 10, 16, 12))),
    ({"generator": "unet", "generator_options": {"widths": [4, 8]}, "discriminator": "multiscale"},
     torch.Size((1, 2, 16, 12)), torch.Size((1, 10, 16, 12))),
]  # fmt: skip
"""As in resnet."""
