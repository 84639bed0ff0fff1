"""Features of images in a frozen network whose weights are given, by which losses and metrics compare images.

The network is in evaluation mode and takes no gradient; gradients pass through it to the images.  It is called outside of the
model, with images from 0 to 1 that are normalized as it wants them.  Its convolutions run on tiles as any do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from widefield.own_code import call, code_named, is_code
from widefield.tensor_files import read_tensors

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_LIBRARY = "torchvision/"


@dataclass(frozen=True)
class FeatureNetwork:
    """module: from (B, K, H, W) to a tensor, or a list or dict of them.  mean, std: of its K channels.  name: for errors."""

    module: nn.Module
    mean: Sequence[float]
    std: Sequence[float]
    name: str

    def __call__(self, image: Tensor) -> list[Tensor]:
        """The features of images (B, C, H, W) from 0 to 1, whole or tiled; one channel is repeated where the network has more.

        ValueError: they are volumes, or of another number of channels.
        """
        channels = len(self.mean)
        if image.ndim != 4 or image.shape[1] not in (1, channels):
            shape = tuple(image.shape[1:])
            raise ValueError(
                f"{self.name} takes images (C, H, W) of {channels} channels, or of one, which is repeated, and these are "
                f"{shape}; give mean and std a number per channel, with a network that takes them, or compare without a network"
            )
        image = image if image.shape[1] == channels else torch.cat([image] * channels, 1)
        mean, std = (image.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        found = self.module.to(image.device, image.dtype)((image - mean) / std)
        return list(found.values()) if isinstance(found, Mapping) else [found] if isinstance(found, Tensor) else list(found)


def feature_network(
    network: str,
    layers: Sequence[str],
    *,
    weights: str | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    key: str,
) -> FeatureNetwork:
    """The network that a recipe names.  key: where it is named, for errors.

    network: `torchvision/NAME`, whose weights are a file, or `package.module:callable`, which gives a module or a function,
        with weights of a file or of its own.
    layers: the names of the modules whose outputs are the features; without any, those that the network gives itself.
    ValueError: no such network or layer, or no weights for it.
    """
    if len(mean) != len(std) or not len(mean) or not min(std) > 0:
        raise ValueError(f"{key} has mean {list(mean)} and std {list(std)}; one number per channel is wanted, of std above 0")
    module = _of_a_user(network, key) if is_code(network) else _of_torchvision(network, weights, key)
    if weights is not None:
        _load(module, weights, name=network, key=key)
    for part in module.modules():
        if hasattr(part, "inplace"):
            part.inplace = False  # else a layer's features would be overwritten by the next one
    module = module.eval().requires_grad_(False)
    return FeatureNetwork(_cut_off(module, layers, network, key), mean, std, network)


class _OfFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, image: Tensor) -> Any:
        return self.function(image)


def _of_a_user(network: str, key: str) -> nn.Module:
    made = call(code_named(network, key=f"{key} network"), options={}, key=key, name=network)
    if not callable(made):
        raise ValueError(f"{key}: {network} gives a {type(made).__name__}; a module or a function of images is wanted")
    return made if isinstance(made, nn.Module) else _OfFunction(made)


def _of_torchvision(network: str, weights: str | None, key: str) -> nn.Module:
    """Without weights and memory for them."""
    from torchvision.models import get_model, list_models  # a second to import

    name = network.removeprefix(_LIBRARY)
    if not network.startswith(_LIBRARY) or name not in list_models():
        raise ValueError(f"{key} names the network {network!r}; torchvision/NAME is wanted, or package.module:callable")
    if weights is None:
        raise ValueError(
            f"{key} compares features of {network}, whose weights are not shipped here, and nothing is downloaded; set weights "
            "to a file of them, .pth or .safetensors, or network to package.module:callable, which gives one with weights"
        )
    with torch.device("meta"):
        return get_model(name, weights=None)


def _load(module: nn.Module, weights: str, *, name: str, key: str) -> None:
    tensors = read_tensors(weights)
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise ValueError(f"{key}: {weights} is of another network than {name}: {first}; name the network it is of") from None


def _cut_off(module: nn.Module, layers: Sequence[str], name: str, key: str) -> nn.Module:
    """The network up to the last of these layers, giving a dict of their outputs."""
    if not layers:
        return module
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    known = get_graph_node_names(module, suppress_diff_warning=True)[1]
    unknown = [layer for layer in layers if not any(node == layer or node.startswith(f"{layer}.") for node in known)]
    if unknown:
        raise ValueError(f"{key} names the layer '{unknown[0]}' and {name} has none; its last ones are {', '.join(known[-6:])}")
    found = create_feature_extractor(module, list(layers), suppress_diff_warning=True)
    return found.eval()
