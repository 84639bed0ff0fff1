"""The convolution that reads the image, for another number of channels than it was made for."""

from __future__ import annotations

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def first_convolution(model: nn.Module) -> tuple[str, nn.Module]:
    """The first convolution in the order of the model's modules, with its name.  ValueError: there is none."""
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS):
            return name, module
    raise ValueError(f"{type(model).__name__} has no convolution whose number of channels could be set")


def set_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one that reads `channels` channels, in place.

    Its weights are drawn so that a sum over all inputs of a pixel varies as before.
    """
    name, old = first_convolution(model)
    groups = channels if old.groups == old.in_channels > 1 else old.groups
    if channels % groups or old.out_channels % groups:
        raise ValueError(f"'{name}' has {old.groups} groups, which {channels} channels do not divide into; take other data")
    new = type(old)(
        channels, old.out_channels, old.kernel_size, old.stride, old.padding, old.dilation, groups, old.bias is not None,
        old.padding_mode,
    )  # fmt: skip
    nn.init.normal_(new.weight, std=float(old.weight.detach().std()) * (old.in_channels / channels) ** 0.5)
    if new.bias is not None and old.bias is not None:
        nn.init.zeros_(new.bias)
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, new)


def adapted(weight_OCK: Tensor, channels: int) -> Tensor:
    """The weight of a first convolution for `channels` channels, as timm does.

    One channel gets the sum over all; more repeat the weights, scaled so that a grey image gives what it gave before.
    """
    had = weight_OCK.shape[1]
    if channels == 1:
        return weight_OCK.sum(1, keepdim=True)
    repeated = weight_OCK.repeat(1, -(-channels // had), *[1] * (weight_OCK.ndim - 2))
    return repeated[:, :channels] * (had / channels)
