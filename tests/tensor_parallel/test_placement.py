"""Which indices does a rank hold, after views, slices and joins?  Compared with what numpy makes of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from widefield.tensor_parallel.placement import Shard, in_groups, joined, sliced, split_along, viewed

extents = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def held_of(whole: np.ndarray, part: Shard, rank: int) -> np.ndarray:
    return np.take(whole, part.indices[rank], axis=part.dim)


@st.composite
def parts(draw, shape):
    dim = draw(st.sampled_from([dim for dim, extent in enumerate(shape) if extent > 1]))
    owners = draw(st.lists(st.integers(0, 1), min_size=shape[dim], max_size=shape[dim]).filter(lambda o: 0 < sum(o) < len(o)))
    return Shard(dim, [np.flatnonzero(np.array(owners) == rank) for rank in range(2)])


@given(st.data(), extents, extents)
def test_a_view_of_a_part_is_the_part_of_the_view(data, before, factors):
    """Shapes that numpy can view as one another: the factors of one, in other groups."""
    flat = [*before, *factors]
    assume(max(flat) > 1)
    cut = data.draw(st.integers(1, len(flat)))
    one = (*flat[:cut], math.prod(flat[cut:]))
    other = (math.prod(flat[:cut]), *flat[cut:])
    assume(any(extent > 1 for extent in one))
    part, whole = data.draw(parts(one)), np.arange(math.prod(flat))
    found = viewed(part, one, other)
    for rank in range(2):
        mine = held_of(whole.reshape(one), part, rank)
        if found is not None:
            assert np.array_equal(mine.reshape(found.shape(other, rank)), held_of(whole.reshape(other), found, rank))


def test_heads_are_found_in_queries_keys_and_values():
    """A linear layer gives 3 x 4 heads x 2; a rank holds two heads of each."""
    part = Shard(2, split_along((3, 4, 2), 1, 2))
    assert part.indices[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    heads = viewed(part, (5, 7, 24), (5, 7, 3, 4, 2))
    assert heads == Shard(3, [[0, 1], [2, 3]])
    assert viewed(heads, (5, 7, 3, 4, 2), (5, 7, 24)) == part


def test_a_view_that_tears_a_part_is_none():
    contiguous = Shard(2, split_along((24,), 0, 2))
    assert viewed(contiguous, (5, 7, 24), (5, 7, 3, 4, 2)) is None  # rank 0 has all queries and half of the keys


@given(st.integers(2, 12), st.data())
def test_a_slice_of_a_part_is_the_part_of_the_slice(extent, data):
    part = data.draw(parts((extent,)))
    start, step = data.draw(st.integers(0, extent - 1)), data.draw(st.integers(1, 3))
    stop = data.draw(st.integers(start + 1, extent))
    found, whole = sliced(part, start, stop, step), np.arange(extent)
    wanted = [np.intersect1d(part.indices[rank], whole[start:stop:step]) for rank in range(2)]
    if found is None:
        assert any(len(indices) == 0 for indices in wanted)
    else:
        assert all(np.array_equal(whole[start:stop:step][found.indices[rank]], wanted[rank]) for rank in range(2))


def test_joined_parts_hold_their_own_of_each():
    found = joined([Shard(1, [[0, 1], [2]]), Shard(1, [[1], [0]])])
    assert [indices.tolist() for indices in found.indices] == [[0, 1, 4], [2, 3]]
    assert found.extent == 5 and found.order.tolist() == [0, 1, 3, 4, 2] and not found.is_in_order


@pytest.mark.parametrize(("held", "groups", "of_groups"), [
    ([[0, 1], [2, 3]], 2, [[0], [1]]),
    ([[0, 1], [2, 3]], 4, [[0, 1], [2, 3]]),
    ([[0, 1], [2, 3]], 1, None),
    ([[0, 2], [1, 3]], 2, None),
])  # fmt: skip
def test_groups_belong_to_one_rank_or_there_is_no_such_part(held, groups, of_groups):
    found = in_groups(Shard(1, held), groups)
    assert (found and [indices.tolist() for indices in found.indices]) == of_groups
