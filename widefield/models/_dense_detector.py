"""Detectors of one stage: a backbone, a feature pyramid and heads, that give maps; without anchors, losses and resizing.

Their parameters have the names that torchvision's RetinaNet and FCOS have, so weights of either load into the other.  Images
are taken as they are: torchvision's own forward resizes them to 800 to 1,333 px and normalizes them once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import get_model, list_models
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from widefield.models import check_counts
from widefield.models._first_convolution import set_channels
from widefield.naming import did_you_mean

SMALL = "small"
_NORMS: dict[str, Callable[..., nn.Module]] = {
    "batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d, "group": partial(nn.GroupNorm, 8),
}  # fmt: skip


class DenseDetector(nn.Module):
    """Gives the maps of each level, the finest first: what the task `detection` wants of any model."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, image: Tensor) -> list[tuple[Tensor, ...]]:
        return [self.maps(features) for features in self.backbone(image).values()]

    def maps(self, features: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError


class SmallPyramid(nn.Module):
    """A few residual convolutions at each of `strides`, powers of two, and a feature pyramid over those that are asked for."""

    def __init__(self, in_channels: int, *, width: int, out_channels: int, strides: Sequence[int], norm: str) -> None:
        super().__init__()
        make, depth = _NORMS[norm], max(strides).bit_length() - 1
        widths = [min(width * 2**level, 4 * width) for level in range(depth)]
        self.body = nn.ModuleList(
            ConvPair(before, after, make) for before, after in zip([in_channels, *widths], widths, strict=False)
        )
        self.strides = tuple(strides)
        chosen = [after for level, after in enumerate(widths) if 2 ** (level + 1) in self.strides]
        self.fpn = FeaturePyramidNetwork(chosen, out_channels)
        self.out_channels = out_channels

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        found: OrderedDict[str, Tensor] = OrderedDict()
        for level, pair in enumerate(self.body):
            image = pair(image)
            if 2 ** (level + 1) in self.strides:
                found[str(level)] = image
        return self.fpn(found)


class ConvPair(nn.Module):
    """Half the pixels, then a residual convolution."""

    def __init__(self, before: int, after: int, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.down = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = norm(after)
        self.conv = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = norm(after)

    def forward(self, image: Tensor) -> Tensor:
        image = F.relu(self.norm1(self.down(image)))
        return F.relu(image + self.norm2(self.conv(image)))


class TimmPyramid(nn.Module):
    """A feature pyramid over a network of timm's that gives its features."""

    def __init__(self, name: str, in_channels: int, *, out_channels: int, strides: Sequence[int], coarser: nn.Module | None):
        super().__init__()
        try:
            import timm
        except ImportError:
            raise ValueError(
                f"model.options.backbone is timm/{name} and timm is not installed: pip install 'widefield[timm]'"
            ) from None
        try:
            known = timm.create_model(name, features_only=True, in_chans=in_channels).feature_info.reduction()
            chosen = [known.index(stride) for stride in strides]
            self.body = timm.create_model(name, features_only=True, in_chans=in_channels, out_indices=chosen)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"model.options.backbone: timm/{name} gives no features of the strides {list(strides)}: {error}"
            ) from None
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels, extra_blocks=coarser)
        self.out_channels = out_channels

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(number), one) for number, one in enumerate(self.body(image))))


def backbone_of(
    in_channels: int, *, backbone: str, strides: Sequence[int], width: int, features: int, norm: str, p6_from_c5: bool = False
) -> nn.Module:
    """A backbone with a pyramid of `features` channels and levels of these strides.

    backbone: `small`, resnet18 to resnet152, wide_resnet or resnext as torchvision names them, or timm/NAME.
    norm: batch, frozen, or group of `small`.  p6_from_c5: as torchvision's second RetinaNet has it.
    ValueError: no such backbone, norm or levels.
    """
    check_counts(width=width, features=features, strides=list(strides))
    _check(backbone, strides, norm)
    if backbone == SMALL:
        return SmallPyramid(in_channels, width=width, out_channels=features, strides=strides, norm=norm)
    inner = [stride for stride in strides if stride <= 32]
    coarser = LastLevelP6P7(2048 if p6_from_c5 else features, features) if len(strides) > len(inner) else None
    library, _, name = backbone.rpartition("/")
    if library == "timm":
        return TimmPyramid(name, in_channels, out_channels=features, strides=inner, coarser=coarser)
    body = _resnet(name, _NORMS[norm])
    if in_channels != 3:
        set_channels(body, in_channels)
    numbers = [stride.bit_length() - 2 for stride in inner]
    channels = [body.fc.in_features // 8 * 2 ** (number - 1) for number in numbers]
    named = {f"layer{number}": str(place) for place, number in enumerate(numbers)}
    made = BackboneWithFPN(body, named, channels, features, extra_blocks=coarser)
    made.fpn.extra_blocks = coarser  # without one, torchvision adds a level by pooling
    return made


def _resnet(name: str, norm: Callable[..., nn.Module]) -> nn.Module:
    """ValueError: torchvision has no ResNet of the name."""
    known = [one for one in list_models() if one.startswith(("resnet", "resnext", "wide_resnet"))]
    if name not in known:
        raise ValueError(
            f"model.options.backbone is '{name}'{did_you_mean(name, [*known, SMALL])} There are {SMALL}, "
            f"{', '.join(known)} and timm/NAME"
        )
    return get_model(name, weights=None, norm_layer=norm)


def _check(backbone: str, strides: Sequence[int], norm: str) -> None:
    """ValueError: no such norm, or no levels that the backbone can have."""
    if norm not in _NORMS or (norm == "group" and backbone != SMALL):
        raise ValueError(f"model.options.norm is {norm!r}; batch or frozen is wanted, or group with backbone={SMALL}")
    powers = [2**power for power in range(1, 8)]
    run = [one for one in powers if strides and strides[0] <= one <= strides[-1]]
    few = [one for one in strides if one > 32] not in ([], [64, 128])
    if list(strides) != run or (backbone != SMALL and (run[0] < 4 or run[0] > 32 or few)):
        more = "" if backbone == SMALL else ", from 4 to 32, with 64 and 128 after 32 or without both"
        raise ValueError(
            f"model.options.strides is {list(strides)}; of {backbone} wanted are neighbouring powers of two{more}, as "
            "[8, 16, 32, 64, 128]"
        )
