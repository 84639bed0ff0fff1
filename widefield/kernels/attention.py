"""Torch's fused attention kernels on blocks of queries and keys, and how the results of two blocks of keys merge.

Every kernel gives its output and the log-sum-exp of its scores, from which blocks merge (Milakov and Gimelshein 2018,
arXiv:1805.02867); given the whole's, its backward gives exactly a block's part of the gradients.  Tensors are (batch, heads,
tokens, width), log-sum-exps (batch, heads, tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
Block = tuple[Tensor, ...]


class Cpu:
    """Blocks of the CPU's fused attention."""

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
    """Blocks of CUDA's flash attention, which knows no bias."""

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
    """Blocks of CUDA's memory efficient attention: its log-sum-exp is padded to 32 rows, its bias wants aligned rows."""

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
    """The bias of every query and key, in rows that begin at multiples of 16 numbers."""
    keys = k.shape[-2]
    bias = F.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % 16))[..., :keys]
    return bias.expand(*q.shape[:3], keys)


def merged(a: Block | None, b: Block) -> Block:
    """Attention to the keys of two blocks, from what each gives: (output, log-sum-exp, ...), in the precision of the latter."""
    if a is None:
        return b
    lse = torch.logaddexp(a[1], b[1])
    safe = lse.masked_fill(lse == -torch.inf, 0.0)  # rows that may see no key yet
    parts = [x[0].to(lse.dtype) * torch.exp(x[1] - safe).unsqueeze(-1) for x in (a, b)]
    return parts[0] + parts[1], lse, *a[2:]


def seen(block: Block, bias: Tensor | None) -> Block:
    """A kernel says 0 for the log-sum-exp of a row whose keys are all masked; it is minus infinity."""
    if bias is None:
        return block
    return block[0], block[1].masked_fill((bias == -torch.inf).all(-1), -torch.inf), *block[2:]
