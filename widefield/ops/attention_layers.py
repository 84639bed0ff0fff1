"""Attention layers that torch runs as one operation in evaluation without gradients: composed here of their parts.

With gradients `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` arrive as linear layers and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from widefield.rules import case, composed

aten = torch.ops.aten


@composed(aten._native_multi_head_attention.default)
def native_multi_head_attention(
    query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None, need_weights=True,
    average_attn_weights=True, mask_type=None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The fast path of `nn.MultiheadAttention` in evaluation."""
    if mask is not None:
        raise NotImplementedError(
            "the fast path of nn.MultiheadAttention with a mask has no rule on tiles; call "
            "torch.backends.mha.set_fastpath_enabled(False) before the model runs"
        )
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    )
    if not need_weights:
        out, weights = F.scaled_dot_product_attention(q, k, v), None
    else:
        weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1)
        out = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    return F.linear(out.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


@composed(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1,
    norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None, mask_type=None,
) -> Tensor:  # fmt: skip
    """The fast path of `nn.TransformerEncoderLayer` in evaluation."""

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed(x: Tensor) -> Tensor:
        x = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(x) if use_gelu else F.relu(x), ffn_weight_2, ffn_bias_2)

    first = lambda x: F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)  # noqa: E731
    second = lambda x: F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)  # noqa: E731
    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


# ---------------------------------------------------------------------------------------------- cases


def _module(make: Callable[[], nn.Module], call: Callable[..., Tensor], *, grad: bool) -> Callable[..., Tensor]:
    """A layer with the same weights on every rank, in training with gradients or in evaluation without."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        modules = {dtype: make().to(dtype).train(grad) for dtype in (torch.float32, torch.float64)}

    def run(x: Tensor) -> Tensor:
        with nullcontext() if grad else torch.no_grad():
            return call(modules[x.dtype].to(x.device), x)

    return run


def _heads() -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True)


def _encoder(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, **options)


def _call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


CASES = [
    case("heads' layer", _module(_heads, lambda m, x: m(x, x, x, need_weights=False)[0], grad=True), (2, 9, 8)),
    case("heads' layer and weights", _module(_heads, lambda m, x: m(x, x, x)[1], grad=True), (2, 9, 8)),
    case(
        "heads' layer with a mask in evaluation",
        _module(_heads, lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(2, 9, dtype=torch.bool))[0], grad=False),
        (2, 9, 8),
        refuses="set_fastpath_enabled",
    ),
    case("heads' layer in evaluation", _module(_heads, lambda m, x: m(x, x, x)[0], grad=False), (2, 9, 8)),
    case("encoder layer", _module(_encoder(), _call, grad=True), (2, 9, 8)),
    case("encoder layer in evaluation", _module(_encoder(), _call, grad=False), (2, 9, 8)),
    case("encoder, norm first", _module(_encoder(norm_first=True, activation="gelu"), _call, grad=False), (2, 9, 8)),
]
