"""Torch's fused attention kernels on blocks of keys, and how the results of two blocks merge.

`forward` returns a Block: the output (batch, heads, tokens, width), the log-sum-exp of the scores (batch, heads, tokens), and
the seed and offset of the random numbers where the kernel has them.  Blocks merge by their log-sum-exps (Milakov and
Gimelshein 2018, arXiv:1805.02867).  `backward` takes the output and log-sum-exp for all keys, and returns the gradients of the
block's queries, keys and values, in that order; those of the queries are to be added up over blocks.

bias: added to the scores, broadcastable to (batch, heads, queries, keys); seeds: what `forward` returned after the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
Block = tuple[Tensor, ...]


class Cpu:
    """The CPU's fused attention."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Block:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
        scale: float | None, seeds: Sequence[Tensor | None], want_bias: bool,
    ) -> tuple:  # fmt: skip
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )


class Flash:
    """CUDA's flash attention, which takes no bias."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Block:
        got = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return got[0], got[1], got[6], got[7]

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
        scale: float | None, seeds: Sequence[Tensor | None], want_bias: bool,
    ) -> tuple:  # fmt: skip
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[-2], k.shape[-2], 0.0, causal, *seeds, scale=scale
        )


class Efficient:
    """CUDA's memory-efficient attention; with `want_bias` its backward also gives the bias's gradient.

    The kernel pads its log-sum-exp to a multiple of 32 rows, and needs a bias with aligned rows.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Block:
        bias = None if bias is None else _aligned(bias, q, k)
        out, lse, *seeds = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[-2]], *seeds

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool,
        scale: float | None, seeds: Sequence[Tensor | None], want_bias: bool,
    ) -> tuple:  # fmt: skip
        lse = F.pad(lse, (0, -lse.shape[-1] % 32))
        bias = None if bias is None else _aligned(bias, q, k)
        mask = [True, True, True, want_bias]
        return aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, lse, *seeds, 0.0, mask, causal, scale=scale
        )


def _aligned(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias expanded to all queries and keys, in memory whose rows begin at multiples of 16 elements."""
    keys = k.shape[-2]
    bias = F.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % 16))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


def merged(a: Block | None, b: Block) -> Block:
    """The Block of all keys of blocks `a` and `b`; the output gets the dtype of the log-sum-exp.  a: None for no keys yet."""
    if a is None:
        return b
    lse = torch.logaddexp(a[1], b[1])
    safe = lse.masked_fill(lse == -torch.inf, 0.0)  # in rows that see no key yet -inf - -inf would be NaN
    parts = [x[0].to(lse.dtype) * torch.exp(x[1] - safe).unsqueeze(-1) for x in (a, b)]
    return parts[0] + parts[1], lse, *a[2:]


def mask_lse(block: Block, bias: Tensor | None) -> Block:
    """The block with a log-sum-exp of -inf in rows whose keys are all masked, for which the kernels return 0."""
    if bias is None:
        return block
    return block[0], block[1].masked_fill((bias == -torch.inf).all(-1), -torch.inf), *block[2:]
