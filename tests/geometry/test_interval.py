"""Do cuts cover, and do intervals behave like the sets of integers they stand for?"""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widefield import geometry
from widefield.geometry import Interval, even_cut, interval, parts_of

intervals = st.builds(Interval, st.integers(-20, 40), st.integers(-20, 40))
cuts = {"length": st.integers(0, 300), "parts": st.integers(1, 40), "multiple": st.integers(1, 9)}


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(interval)
    assert result.failed == 0 and result.attempted == 6
    assert geometry.__all__ == ["Interval", "even_cut", "natural_cut", "parts_of"]


@given(one=intervals, other=intervals, index=st.integers(-25, 45))
def test_an_interval_is_the_set_of_its_integers(one, other, index):
    own = set(range(one.start, one.stop))
    assert set(one) == own and len(one) == len(own) and (index in one) == (index in own)
    assert set(one & other) == own & set(other)


@given(**cuts)
def test_the_parts_of_a_cut_cover_everything_once_and_in_order(length, parts, multiple):
    found = parts_of(even_cut(length, parts, multiple=multiple))
    assert len(found) == parts
    assert [index for part in found for index in part] == list(range(length))


@given(**cuts)
def test_a_cut_is_even_and_falls_on_multiples(length, parts, multiple):
    cut = even_cut(length, parts, multiple=multiple)
    sizes = [len(part) for part in parts_of(cut)]
    blocks = [-(-size // multiple) for size in sizes]
    assert sizes == sorted(sizes, reverse=True) and max(blocks) - min(blocks) <= 1
    assert all(boundary % multiple == 0 or boundary == length for boundary in cut)


@given(length=st.integers(0, 300), parts=st.integers(1, 40))
def test_an_even_cut_is_pythons_divmod(length, parts):
    share, longer = divmod(length, parts)
    assert [len(part) for part in parts_of(even_cut(length, parts))] == [share + 1] * longer + [share] * (parts - longer)


@pytest.mark.parametrize(("length", "parts", "multiple"), [(-1, 2, 1), (4, 0, 1), (4, 2, 0)])
def test_a_cut_that_cannot_be_says_its_numbers(length, parts, multiple):
    with pytest.raises(ValueError, match=f"cannot cut {length} things into {parts} parts at multiples of {multiple}; all must"):
        even_cut(length, parts, multiple=multiple)
