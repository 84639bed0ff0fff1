"""Is every pixel of an image in exactly one window of a cover, whatever its size and the shift?"""

from __future__ import annotations

import doctest
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from widefield.geometry import cover
from widefield.geometry.cover import num_windows, shifts, window_at

extents, sides = st.integers(1, 90), st.integers(1, 24)


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(cover)
    assert result.failed == 0 and result.attempted == 3


@given(extent=extents, side=sides)
def test_every_pixel_is_in_one_window_with_every_shift_and_no_window_is_empty(extent, side):
    assert len(shifts(extent, side)) >= 1
    for shift in shifts(extent, side):
        windows = [window_at(number, side, shift) for number in range(num_windows(extent, side))]
        seen = Counter(pixel for window in windows for pixel in window if 0 <= pixel < extent)
        assert seen == Counter(range(extent)) and all(len(window) == side for window in windows)
        assert all(window.start < extent and window.stop > 0 for window in windows)


@given(extent=extents, side=sides)
def test_without_a_shift_windows_are_the_fewest(extent, side):
    count = num_windows(extent, side, shifted=False)
    assert (count - 1) * side < extent <= count * side


@given(extent=extents, side=sides)
def test_a_window_costs_at_most_one_more_for_its_shifts_and_has_half_of_all(extent, side):
    """Half of the shifts by 0 to side - 1, unless the image fits into one window."""
    least = -(-extent // side)
    assert num_windows(extent, side) in (least, least + 1)
    assert least == 1 or 2 * len(shifts(extent, side)) >= side - 1
