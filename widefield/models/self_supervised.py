"""A backbone with a projector, for the task `self_supervised`; calling it with views of images makes their embeddings.

The backbone is any network that model.name can have whose answer comes from one last fully connected layer.  That layer is left
out: the projector, which is for training alone, gets the features before it.  An export has the backbone, by the names that it
has without widefield, so that a recipe which names the same network starts from it: model.weights, with weights_strict=false,
since its last layer is to be learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from widefield.config import ModelConfig
from widefield.models import build as build_named
from widefield.models import check_counts
from widefield.models._of_dims import check_dims


class Projector(nn.Sequential):
    """Fully connected layers, batch normalization and ReLU in between; the last one has no bias, as in VICReg's code."""

    def __init__(self, features: int, widths: Sequence[int]) -> None:
        layers: list[nn.Module] = []
        for before, after in zip([features, *widths], widths[:-1], strict=False):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(inplace=True)]
        super().__init__(*layers, nn.Linear([features, *widths][-2], widths[-1], bias=False))


class Embedder(nn.Module):
    """backbone: from images to features.  projector: from these to embeddings.  in_channels: of one view."""

    def __init__(self, backbone: nn.Module, projector: nn.Module, in_channels: int, features: int) -> None:
        super().__init__()
        self.backbone, self.projector = backbone, projector
        self.in_channels, self.features = in_channels, features

    @property
    def exported(self) -> nn.Module:
        """What an export of a run has."""
        return self.backbone

    def forward(self, image: Tensor) -> Tensor:
        """From (B, V C, *pixels), V views joined by their channels, to embeddings (B, V, D).

        All views pass the network as one batch, over which batch normalization has its statistics.
        """
        views = image.shape[1] // self.in_channels
        found = self.backbone(image if views == 1 else image.unflatten(1, (views, self.in_channels)).flatten(0, 1))
        if not isinstance(found, Tensor) or found.shape != (views * len(image), self.features):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"the backbone without its last fully connected layer gives {got} and ({views * len(image)}, {self.features}) "
                "is wanted, the features of each view; name the layer that is to be left out in model.options.head"
            )
        return self.projector(found).unflatten(0, (len(image), views))


def build(
    in_channels: int,
    num_classes: int,
    *,
    dims: int = 2,
    backbone: str = "resnet",
    backbone_options: dict[str, Any] | None = None,
    head: str | None = None,
    projector: Sequence[int] = (2048, 2048, 2048),
) -> nn.Module:
    """backbone: a name that model.name can have, and its options.  num_classes: of the layer that is left out.

    head: the name of the fully connected layer that is left out; None: the network's last one.
    projector: the widths of its layers, the embeddings' last; (8192, 8192, 8192) in the paper.
    ValueError: no such network, options that it does not take, or no such layer.
    """
    check_dims(dims)
    check_counts(projector=projector)
    if not isinstance(projector, list | tuple):
        raise ValueError(f"model.options.projector is {projector!r}; a list of widths is wanted, as [2048, 2048, 2048]")
    config = ModelConfig(name=backbone, options=backbone_options or {})
    network = build_named(config, in_channels=in_channels, num_classes=num_classes, dims=dims)
    features = _leave_out_head(network, head, name=backbone)
    return Embedder(network, Projector(features, list(projector)), in_channels, features)


def _leave_out_head(network: nn.Module, head: str | None, *, name: str) -> int:
    """Replace the last fully connected layer by nothing; returns the number of its inputs."""
    layers = {path: module for path, module in network.named_modules() if isinstance(module, nn.Linear) and path}
    if not layers or (head is not None and head not in layers):
        known = f"they are {', '.join(list(layers)[-5:])}" if layers else "it has none"
        raise ValueError(
            f"model.options.backbone={name} has no fully connected layer{'' if head is None else f' {head}'} that could be "
            f"left out ({known}); take a network that ends in one, as resnet or torchvision/resnet50"
        )
    path = head or list(layers)[-1]
    owner, _, last = path.rpartition(".")
    setattr(network.get_submodule(owner), last, nn.Identity())
    return layers[path].in_features


_SMALL = {"backbone_options": {"widths": [4, 8]}, "projector": [6, 5]}

CASES = [
    (_SMALL, torch.Size((3, 1, 8, 8)), torch.Size((3, 1, 5))),
    (_SMALL | {"head": "head", "projector": [5]}, torch.Size((2, 3, 13, 9)), torch.Size((2, 1, 5))),
    (_SMALL | {"dims": 3}, torch.Size((2, 1, 5, 9, 7)), torch.Size((2, 1, 5))),
]
"""As in resnet, of one view."""
