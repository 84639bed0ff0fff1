"""The section `optimizer` of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from widefield.config.field_types import Options, Positive, Share
from widefield.section import Section


def _rate(value: float | str | None) -> float | str | None:
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?x", value) and float(value[:-1]) > 0:
        return value
    if value is None or (not isinstance(value, str) and value > 0):
        return value
    raise ValueError("a learning rate above 0 is wanted, as 0.01, or a factor of optimizer.lr, as 0.1x")


def _peak(value: float | str | None) -> float | str | None:
    if value is None or value == "find":
        return value
    if isinstance(value, str):
        raise ValueError("a number above 0 is wanted, or find")
    if not value > 0:
        raise ValueError("input should be greater than 0")
    return value


_PEAK: dict[str, Any] = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "find"}, {"type": "null"}]}


class GroupConfig(Section):
    """An entry of `optimizer.groups`: what some parameters have of their own."""

    match: str | Annotated[list[str], Field(min_length=1)]
    lr: Annotated[float | str | None, AfterValidator(_rate)] = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimizerConfig(Section):
    name: str = "sgd"
    """sgd, adamw, lars or lamb (lars and lamb come from timm), or `package.module:callable`, as `torch.optim:RMSprop`."""
    lr: Annotated[float | str | None, AfterValidator(_peak), WithJsonSchema(_PEAK)] = None
    """Peak learning rate; null derives it from the batch size by lr_rule; `find` tests 100 learning rates before step 1."""
    lr_rule: Literal["linear", "sqrt"] | None = None
    """How the learning rate grows with the batch size (with lr null): linear for sgd and lars, sqrt for adamw and lamb."""
    base_lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate at base_batch_size; the optimizer's own default where null."""
    base_batch_size: Positive = 256
    """The batch size that `base_lr` is meant for."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """As the optimizer defines it; not for biases and normalization, see decay_norm_and_bias."""
    decay_norm_and_bias: bool = False
    """Apply weight decay to biases and normalization weights (parameters of one dim) too."""
    groups: list[GroupConfig] = []
    """Parameters with a learning rate or weight decay of their own, by name or pattern: `[{match: "head*", lr: 10x}]`; lr is a
    peak, as 0.01, or a factor, as 0.1x.  The first entry that fits a parameter counts."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """The learning rate of each layer / that of the layer after it, the last layer having the whole; 0.75 is usual for
    fine-tuning."""
    momentum: Share = 0.9
    """For sgd and lars."""
    nesterov: bool = False
    """Nesterov's form of momentum, for sgd and lars."""
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """For adamw and lamb."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the norm of the whole gradient, of all parameters, to this."""
    options: Options = {}
    """Further arguments of the optimizer's constructor."""
