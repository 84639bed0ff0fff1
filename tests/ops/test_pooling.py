"""Does torch's pooling of any box of an image, as it is fitted, give what it gives on the whole?"""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from widefield.geometry.box import full_box
from widefield.geometry.interval import Interval
from widefield.geometry.window import Window, window_count
from widefield.ops.pooling import _Fitted, _Framed, reindexed

aten = torch.ops.aten
ONE = Window(1, extent=1, count=1)
ALONE = Interval(0, 1)
many = settings(max_examples=300, deadline=None)


@st.composite
def boxes(draw) -> tuple[Window, bool, Interval]:
    """A window, whether it was counted with ceil_mode, and a run of its outputs."""
    size, stride, dilation = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    padding, extent, ceil_mode = draw(st.integers(0, size // 2)), draw(st.integers(1, 30)), draw(st.booleans())
    count = window_count(extent, size=size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)
    assume(count > 0)
    window = Window(size, stride, dilation, padding, extent, count)
    assume(all(_holds_a_pixel(window, o) for o in range(count)))
    start = draw(st.integers(0, count - 1))
    return window, ceil_mode, Interval(start, draw(st.integers(start + 1, count)))


def _holds_a_pixel(window: Window, output: int) -> bool:
    """Dilated windows may step over all of a small image; torch gives -inf and no index then."""
    first = output * window.stride - window.padding
    return any(0 <= first + j * window.dilation < window.extent for j in range(window.size))


def pooled(image: torch.Tensor, window: Window, ceil_mode: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.max_pool2d_with_indices.default(
        image, [1, window.size], [1, window.stride], [0, window.padding], [1, window.dilation], ceil_mode
    )


@many
@given(box=boxes(), left=st.integers(0, 9), right=st.integers(0, 9))
def test_a_box_is_pooled_as_the_whole_is_where_its_windows_lie_in_it(box, left, right):
    window, ceil_mode, write = box
    image = torch.rand(1, 1, 1, window.extent, dtype=torch.float64)
    needed = window.input_read_by(write)
    read = Interval(needed.start + left, needed.stop - right) & Interval(0, window.extent)
    assume(len(read))
    fit = _Fitted([ONE, window], (ALONE, read), (ALONE, write))
    tile = fit.before(image[..., read.start : read.stop], -torch.inf)
    values, flat = aten.max_pool2d_with_indices.default(tile, fit.size, fit.stride, fit.padding, fit.dilation, fit.ceil_mode)
    values = fit.after(values)
    flat = reindexed(fit.after(flat), fit.frame, full_box([1, window.extent]), in_place=True)
    expected, indices = pooled(image, window, ceil_mode)
    assert values.shape[-1] == len(write)
    for o in write:
        reads = window.input_read_by(Interval(o, o + 1)) & Interval(0, window.extent)
        if reads == reads & read:
            assert values[0, 0, 0, o - write.start] == expected[0, 0, 0, o]
            assert flat[0, 0, 0, o - write.start] == indices[0, 0, 0, o]


@many
@given(box=boxes(), start=st.integers(0, 29), length=st.integers(1, 30))
def test_the_gradient_of_a_box_is_that_of_the_whole(box, start, length):
    window, ceil_mode, _ = box
    write = Interval(start, start + length) & Interval(0, window.extent)
    read = window.output_reading(write)
    assume(len(write) and len(read))
    image = torch.rand(1, 1, 1, window.extent, dtype=torch.float64, requires_grad=True)
    values, flat = pooled(image, window, ceil_mode)
    weights = torch.rand_like(values)
    (expected,) = torch.autograd.grad(values, image, weights)
    frame = _Framed([ONE, window], (ALONE, read), (ALONE, write))
    part = (..., slice(read.start, read.stop))
    local = reindexed(flat[part], full_box([1, window.extent]), frame.frame, in_place=False)
    assert 0 <= local.min() and local.max() < len(frame.frame[1])
    like = frame.like(weights[part], image[..., write.start : write.stop].detach())
    found = aten.max_pool2d_with_indices_backward.default(
        weights[part].contiguous(), like, frame.size, frame.stride, frame.padding, frame.dilation, False, local
    )
    torch.testing.assert_close(frame.wanted(found), expected[..., write.start : write.stop], rtol=1e-14, atol=1e-14)
