"""Keys and values go round the ranks a tile at a time, and blocks of attention merge into the whole's."""

from __future__ import annotations

import pytest
import torch
from devices import on_gpu_too
from ranks import on_ranks
from torch.nn import functional as F

from widefield.comm.halo import TRAFFIC
from widefield.geometry.interval import even_cut
from widefield.geometry.layout import Cut, layout_of
from widefield.kernels.attention import Cpu, Efficient, Flash, mask_lse, merged
from widefield.plans import Plan
from widefield.tiled.api import _Tile, whole

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 12, 4


@pytest.mark.long
def test_no_rank_ever_gets_more_keys_than_a_tile():
    """Forward: a tile of keys and one of values in each of 2 turns; backward: the same again, and as much sent home."""
    tile_bytes = BATCH * HEADS * TOKENS // 3 * WIDTH * 8
    forward, backward = (2, 2 * 2 * tile_bytes), (4, 4 * 2 * tile_bytes)
    assert on_ranks(3, _sent, plan=Plan(space=[3])) == [(forward, backward, 1 / 3)] * 3


def _sent(mesh) -> tuple:
    cuts = (None, None, Cut((0,), even_cut(TOKENS, 3)), None)
    given = [torch.randn(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.float64).requires_grad_() for _ in range(3)]
    q, k, v = (_Tile.apply(x, layout_of(tuple(x.shape), cuts, mesh.grid)) for x in given)
    TRAFFIC.clear()
    loss = F.scaled_dot_product_attention(q, k, v).sum()
    forward = (TRAFFIC.pixel_messages, TRAFFIC.pixel_bytes)
    grads = torch.autograd.grad(loss, [q, k, v])
    assert len(grads) == 3
    share = TRAFFIC.largest_share
    return forward, (TRAFFIC.pixel_messages - forward[0], TRAFFIC.pixel_bytes - forward[1]), round(share * 3) / 3


def test_blocks_of_keys_merge_into_attention_to_all_of_them():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, WIDTH, dtype=torch.float64).unbind()
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(torch.rand(TOKENS, TOKENS) < 0.4, -torch.inf)
    mask[3, :5] = -torch.inf  # this query sees nothing in the first block
    state = None
    for run in (slice(0, 5), slice(5, 6), slice(6, TOKENS)):
        part = mask[:, run]
        state = merged(state, mask_lse(Cpu.forward(q, k[:, :, run], v[:, :, run], part, False, None), part))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(state[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [Flash, Efficient])
@pytest.mark.parametrize("with_bias", [False, True])
def test_cudas_kernels_take_what_blocks_give_them(kernel, with_bias):
    """Without a GPU: their arguments and the shapes that come back, on torch's meta device."""
    q = torch.empty(BATCH, HEADS, 7, 8, device="meta", dtype=torch.float16)
    k = torch.empty(BATCH, HEADS, 5, 8, device="meta", dtype=torch.float16)
    bias = torch.empty(1, HEADS, 7, 5, device="meta", dtype=torch.float16) if with_bias and kernel is Efficient else None
    out, lse, *seeds = kernel.forward(q, k, k, bias, False, None)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = kernel.backward(out, q, k, k, out, lse, bias, False, None, seeds, bias is not None)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, k.shape]
    if bias is not None:
        assert grads[3].shape == (BATCH, HEADS, 7, 5)


KINDS = {"plain": {}, "causal": {"is_causal": True}, "masked": {"attn_mask": True}}
ROUNDS = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Of the largest number, for 96 tokens: 1e2 units in the last place of float32, which a GPU adds up in another order, and 5 of
bfloat16, in which it keeps scores and blocks."""


@on_gpu_too
@pytest.mark.parametrize("dtype", ROUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_kernels_on_tiles_give_attention_to_all_tokens(kind, dtype):
    """On a GPU in float32 the memory efficient kernel, in bfloat16 cuDNN's or flash, which float64 does not reach."""
    for errors in on_ranks(2, _errors_of_attention, kind, dtype, plan=Plan(space=[2])):
        assert max(errors) <= ROUNDS[dtype], errors


def _errors_of_attention(mesh, kind: str, dtype: torch.dtype) -> list[float]:
    """Of output and gradients over the largest number of each, against float64 in one piece."""
    torch.manual_seed(0)
    options = dict(KINDS[kind])
    wholes = [torch.randn(2, 4, 96, 32, dtype=torch.float64).to(dtype).double().requires_grad_() for _ in range(3)]
    bias = torch.randn(96, 96, dtype=torch.float64).to(dtype) if options.pop("attn_mask", False) else None
    expected = F.scaled_dot_product_attention(*wholes, attn_mask=None if bias is None else bias.double(), **options)
    pull = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    right = [expected, *torch.autograd.grad(expected, wholes, pull.double())]
    layout = layout_of((2, 4, 96, 32), (None, None, Cut((0,), even_cut(96, 2)), None), mesh.grid)
    tiles = [_Tile.apply(each.detach().to(dtype), layout).detach().requires_grad_() for each in wholes]
    got = F.scaled_dot_product_attention(*tiles, attn_mask=bias, **options)
    found = [got, *torch.autograd.grad(got, tiles, _Tile.apply(pull, layout))]
    return [((whole(a).double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right, strict=True)]
