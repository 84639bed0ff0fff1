"""Do windows, borders and bins read the pixels that torch's kernels read, and is each way back the other way round?"""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from widefield.geometry import window
from widefield.geometry.interval import Interval
from widefield.geometry.window import Adjoint, Bins, Border, Every, Spread, StridedRun, Window, border, hull, window_count

extents, counts = st.integers(1, 24), st.integers(1, 24)
sides = st.integers(-6, 9)
cuts = st.lists(st.integers(0, 24), min_size=1, max_size=4)
MODES = {"reflect": "reflect", "replicate": "replicate", "circular": "circular"}


@st.composite
def windows(draw) -> Window:
    """Windows as pooling has them: padding up to half a window, ceil_mode or not."""
    size, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    padding, extent, ceil_mode = draw(st.integers(0, size // 2)), draw(extents), draw(st.booleans())
    count = window_count(extent, size=size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)
    assume(count > 0)
    return Window(size, stride, dilation, padding, extent, count)


@st.composite
def borders(draw) -> tuple[str, int, int, int]:
    """A kind and an extent with sides that torch takes."""
    kind, extent, before, after = draw(st.sampled_from(sorted(MODES))), draw(extents), draw(sides), draw(sides)
    assume(extent + min(0, before) + min(0, after) > 0)
    left = extent + min(0, before) + min(0, after)
    assume(max(before, after) <= {"reflect": extent - 1, "replicate": 99, "circular": left}[kind])
    assume(kind != "reflect" or min(before, after) >= 0 or left > max(before, after))
    return kind, extent, before, after


def padded_numbers(kind: str, extent: int, before: int, after: int) -> list[int]:
    """Which input pixel each output pixel shows, as torch pads."""
    pixels = torch.arange(extent, dtype=torch.float64).view(1, 1, 1, extent)
    return F.pad(pixels, (before, after, 0, 0), mode=kind).flatten().int().tolist()


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(window)
    assert result.failed == 0 and result.attempted > 15


@given(of_dim=borders())
def test_a_border_shows_the_pixels_that_torch_pads_with(of_dim):
    kind, extent, before, after = of_dim
    found = border(kind, extent=extent, before=before, after=after)
    shown = [found.input_read_by(Interval(o, o + 1)).start for o in range(found.count)]
    assert shown == padded_numbers(kind, extent, before, after)
    assert sum(len(run.output) for run in found.runs) == found.count == extent + before + after


@given(of_dim=borders(), start=st.integers(0, 30), length=st.integers(0, 30))
def test_a_border_reads_the_smallest_interval_and_back_finds_every_reader(of_dim, start, length):
    kind, extent, before, after = of_dim
    found = border(kind, extent=extent, before=before, after=after)
    shown = padded_numbers(kind, extent, before, after)
    outputs = Interval(start, start + length) & Interval(0, found.count)
    read = [shown[o] for o in outputs]
    assert list(found.input_read_by(outputs)) == (list(range(min(read), max(read) + 1)) if read else [])
    pixels = Interval(start, start + length) & Interval(0, extent)
    readers = [o for o, i in enumerate(shown) if i in pixels]
    back = Adjoint(found, extent).input_read_by(pixels)
    assert list(back) == (list(range(readers[0], readers[-1] + 1)) if readers else [])
    for run in found.runs:
        inside = [o for o in readers if o in run.output]
        assert list(run.output_reading(pixels)) == inside


@given(w=windows(), start=st.integers(0, 24), length=st.integers(0, 24))
def test_a_window_and_its_spread_are_each_others_way_back(w, start, length):
    pixels = Interval(start, start + length) & Interval(0, w.extent)
    readers = [o for o in range(w.count) if len(pixels) and len(w.input_read_by(Interval(o, o + 1)) & pixels)]
    found = Spread(w).input_read_by(pixels)
    assert set(readers) <= set(found) and (not readers or (found.start, found.stop) == (readers[0], readers[-1] + 1))


@given(w=windows(), ceil_mode=st.booleans())
def test_windows_are_counted_as_torch_counts_them(w, ceil_mode):
    arguments = {"stride": w.stride, "padding": w.padding, "dilation": w.dilation, "ceil_mode": ceil_mode}
    count = window_count(w.extent, size=w.size, **arguments)
    assume(count > 0)
    assert F.max_pool1d(torch.zeros(1, 1, w.extent), w.size, **arguments).shape[-1] == count


@given(extent=extents, count=counts, start=st.integers(0, 24), length=st.integers(0, 24))
def test_bins_are_those_of_torch_and_back_finds_every_reader(extent, count, start, length):
    bins = Bins(extent, count)
    shares = torch.autograd.functional.jacobian(
        lambda x: F.adaptive_avg_pool1d(x[None, None], count)[0, 0], torch.zeros(extent, dtype=torch.float64)
    )
    reads = [[i for i in range(extent) if shares[o, i] > 0] for o in range(count)]
    assert [list(bins.input_read_by(Interval(o, o + 1))) for o in range(count)] == reads
    pixels = Interval(start, start + length) & Interval(0, extent)
    readers = [o for o in range(count) if set(reads[o]) & set(pixels)]
    assert list(Adjoint(bins, extent).input_read_by(pixels)) == readers


@pytest.mark.parametrize(
    "reach", [Every(9, 4), Adjoint(Bins(9, 4), 9), border("reflect", extent=9, before=3, after=2)], ids=str
)
@given(inner=cuts)
def test_a_cut_is_followed_by_a_rising_cut_of_the_whole_output(reach, inner):
    total = {Every: 4, Adjoint: 9, Border: 14}[type(reach)]
    last = 4 if isinstance(reach, Adjoint) else 9
    found = reach.cut_of((0, *sorted(min(b, last) for b in inner), last))
    assert len(found) == len(inner) + 2 and found[0] == 0 and found[-1] == total
    assert all(a <= b for a, b in zip(found, found[1:], strict=False))


def test_a_run_of_one_pixel_is_read_by_all_of_its_outputs_or_none():
    edge = StridedRun(Interval(4, 9), first=2, step=0)
    assert edge.input_read_by(Interval(0, 20)) == Interval(2, 3)
    assert edge.output_reading(Interval(0, 3)) == Interval(4, 9) and len(edge.output_reading(Interval(3, 9))) == 0
    assert len(hull([])) == 0
