"""Keys and values go round the ranks a tile at a time, and blocks of attention merge into the whole's."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch.nn import functional as F

from widefield.comm.halo import TRAFFIC
from widefield.geometry.interval import even_cut
from widefield.geometry.layout import Cut, layout_of
from widefield.kernels.attention import Cpu, Efficient, Flash, merged, seen
from widefield.plans import Plan
from widefield.tiled.api import _Tile

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 12, 4


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
        state = merged(state, seen(Cpu.forward(q, k[:, :, run], v[:, :, run], part, False, None), part))
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
