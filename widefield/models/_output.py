"""Models that give more than one tensor: the main output, and those of auxiliary heads, which help in training only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from widefield.config import ModelConfig
from widefield.module_wrapping import Wrapping, wrap_class


class MainOutput(Wrapping):
    """Gives the main output alone; in training the tuple (main, *auxiliary) where auxiliary heads are trained.

    The model stays the same object with another class, so its parameters keep their names.
    """

    COPIED: ClassVar[tuple[str, ...]] = ("_widefield_auxiliary", "_widefield_stacked")
    _widefield_auxiliary: bool
    _widefield_stacked: bool

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        found = super().forward(*args, **kwargs)
        outputs = found.unbind(1) if self.training and self._widefield_stacked else outputs_of(found)
        return outputs if self.training and self._widefield_auxiliary and len(outputs) > 1 else outputs[0]


def keep_main_output(model: nn.Module, *, auxiliary: bool, stacked: bool = False) -> None:
    """Make `model` give its main output, in place.  auxiliary: and in training those of its auxiliary heads.

    stacked: in training it gives (B, outputs, C, *pixels), as MONAI's DynUNet.
    """
    wrap_class(model, MainOutput)
    model._widefield_auxiliary, model._widefield_stacked = auxiliary, stacked


def refuse_deep_supervision(config: ModelConfig) -> None:
    """ValueError: the recipe asks for the outputs of coarser levels, of a model that has none."""
    if config.deep_supervision:
        raise ValueError(
            f"{config.name} gives no outputs of coarser levels and model.deep_supervision is true; leave it out, or take unet, "
            "monai/DynUNet or monai/SegResNetDS"
        )


def refuse_auxiliary(config: ModelConfig) -> None:
    """ValueError: the recipe asks for the auxiliary heads of a model that has none."""
    if config.auxiliary is not None:
        raise ValueError(f"{config.name} has no auxiliary heads and model.auxiliary={config.auxiliary:g}; leave it out")


def outputs_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors of an output, the main one first: "out" of a mapping, the first of a sequence, or the output itself.

    ValueError: it has none, or something else among them.
    """
    found: list[Any] = [output]
    if isinstance(output, Mapping):
        main = "out" if "out" in output else next(iter(output), None)
        found = [output[key] for key in ([] if main is None else [main, *(key for key in output if key != main)])]
    elif isinstance(output, tuple | list):
        found = [value for value in output if value is not None]
    if not found or not all(isinstance(value, Tensor) for value in found):
        kinds = ", ".join(type(value).__name__ for value in found) or "nothing"
        raise ValueError(
            f"the model gives a {type(output).__name__} of {kinds}; a tensor is wanted, or a mapping or a list of the main "
            "output and those of auxiliary heads"
        )
    return tuple(found)
