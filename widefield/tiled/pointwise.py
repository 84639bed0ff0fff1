"""Which operations are pointwise: compute each output pixel from the same pixel of their inputs?"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

SAME_PIXELS = {
    aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default, aten.lift_fresh.default,
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default,
    aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.contiguous.default,
    aten.positive.default, aten.conj.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
    aten.hardswish.default, aten.hardswish_.default, aten.mish_.default, aten.gelu_.default, aten.threshold_.default,
    aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.abs_.default,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.log_sigmoid_backward.default,
    aten.mish_backward.default, aten.softplus_backward.default, aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default, aten.masked_fill.Tensor, aten.rsub.Tensor, aten.leaky_relu.default,
    aten.leaky_relu_.default, aten.hardshrink_backward.default, aten.softshrink_backward.default, aten.complex.default,
    aten.polar.default, aten._standard_gamma_grad.default,
}  # fmt: skip
"""Pointwise operations that torch does not tag as such."""


def is_pointwise(func: Any) -> bool:
    return func in SAME_PIXELS or torch.Tag.pointwise in func.tags
