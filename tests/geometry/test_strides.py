"""Do strides by integers alone agree with torch's?"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from widefield.geometry.strides import stride_order, strides_like

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(SHAPES, st.randoms())
def test_strides_are_those_of_torchs_memory_in_that_order(shape, rng):
    order = rng.sample(range(len(shape)), len(shape))
    laid = torch.empty_permuted(shape, order, device="meta")
    like = torch.empty_permuted([3] * len(shape), order, device="meta")
    assert stride_order(like.stride()) == tuple(order)
    assert strides_like(shape, like.stride()) == laid.stride()


def test_dims_that_repeat_one_value_may_keep_doing_so():
    expanded = torch.empty(2, 1, 5, device="meta").expand(2, 3, 5).stride()
    assert strides_like((2, 3, 4), expanded, keeps_zeros=True) == (4, 0, 1)
    assert 0 not in strides_like((2, 3, 4), expanded)
