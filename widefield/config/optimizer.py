"""The section `optimizer` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from widefield.config.field_types import Options, Positive, Share
from widefield.section import Section


class OptimizerConfig(Section):
    name: str = "sgd"
    """sgd, adamw, lars or lamb (lars and lamb come from timm), or `package.module:callable`, as `torch.optim:RMSprop`."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; null derives it from the batch size by lr_rule."""
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
