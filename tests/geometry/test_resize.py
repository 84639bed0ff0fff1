"""Are the pixels and weights of a resize those of torch's kernels, forward and backward, for every kind and step?"""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from widefield.geometry import resize
from widefield.geometry.interval import Interval
from widefield.geometry.resize import Resize, Resized

aten = torch.ops.aten
ALIGNS = {"linear": aten.upsample_bilinear2d, "cubic": aten.upsample_bicubic2d, "linear-aa": aten._upsample_bilinear2d_aa}
ALIGNS |= {"cubic-aa": aten._upsample_bicubic2d_aa}
if hasattr(aten, "_upsample_lanczos2d_aa"):  # newer than torch 2.11
    ALIGNS |= {"lanczos-aa": aten._upsample_lanczos2d_aa}
NEAREST = {"nearest": aten.upsample_nearest2d, "nearest-exact": aten._upsample_nearest_exact2d}
BACKWARD = {kind: getattr(aten, f"{op.default.name()[6:]}_backward") for kind, op in (ALIGNS | NEAREST).items()}
WIDTH = 3
"""Of the other dim, which stays as it is; torch 2.15's kernels with antialiasing are wrong where it is 1."""
extents, scales = st.integers(1, 40), st.one_of(st.none(), st.floats(0.1, 4))
kinds = st.sampled_from(sorted(ALIGNS | NEAREST))


def resizes(kind: str, extent: int, count: int, scale: float | None, align_corners: bool, single: bool) -> Resize:
    if scale is not None:
        count = max(1, int(extent * scale))
    found = Resize(kind, extent, count, scale, align_corners and kind in ALIGNS, single)
    assume(not found.is_odd)
    return found


def arguments(r: Resize) -> list:
    return [*([r.align_corners] if r.kind in ALIGNS else []), r.scale, None]


def dense(taps, rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) the weights as a matrix."""
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        first, weights = taps(row)
        for n, weight in enumerate(weights):
            matrix[row, first + n] += weight
    return matrix


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(resize)
    assert result.failed == 0 and result.attempted == 4


@given(st.builds(resizes, kinds, extents, extents, scales, st.booleans(), st.booleans()))
def test_weights_are_those_of_torchs_forward_kernel(r):
    dtype = torch.float32 if r.single else torch.float64
    pixels = torch.eye(r.extent, dtype=dtype)[None, :, :, None].repeat(1, 1, 1, WIDTH)
    expected = (ALIGNS | NEAREST)[r.kind](pixels, [r.count, WIDTH], *arguments(r))[0, :, :, 0].T.double()
    close = {"rtol": 0, "atol": 2e-5 if r.single else 1e-12}  # float32: a source of up to 40 px has 4e-6 of rounding
    torch.testing.assert_close(dense(r.taps, r.count, r.extent), expected, **close)


@given(st.builds(resizes, kinds, extents, extents, scales, st.booleans(), st.just(False)))
def test_weights_are_those_of_torchs_backward_kernel(r):
    r = replace(r, single=r.kind in NEAREST)
    pixels = torch.eye(r.count, dtype=torch.float64)[None, :, :, None].repeat(1, 1, 1, WIDTH)
    size = [1, r.count, r.extent, WIDTH]
    expected = BACKWARD[r.kind](pixels, [r.count, WIDTH], size, *arguments(r))[0, :, :, 0].T
    torch.testing.assert_close(dense(Resized(r).taps, r.extent, r.count), expected, rtol=0, atol=1e-12)


@given(st.builds(resizes, kinds, extents, extents, scales, st.booleans(), st.booleans()), extents, extents)
def test_what_is_read_is_where_the_taps_lie(r, start, size):
    for reach, count, extent in ((r, r.count, r.extent), (Resized(r), r.extent, r.count)):
        output = Interval(start, start + size) & Interval(0, count)
        pixels = {first + n for o in output for first, weights in [reach.taps(o)] for n in range(len(weights))}
        read = reach.input_read_by(output)
        assert pixels <= set(read) and read.stop <= extent
        if pixels:
            assert min(pixels) == read.start and max(pixels) == read.stop - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [4097, 10007, 65521])
@pytest.mark.parametrize("scale", [1.7, 0.3, 1 / 3, 2.3])
@pytest.mark.parametrize("kind", sorted(NEAREST))
def test_nearest_picks_torchs_pixel_in_a_large_image(kind, scale, length, dtype):
    pixels = torch.arange(length, dtype=dtype)[None, None, :, None]  # float32 holds every one of these numbers
    for given_scale in (scale, None):
        r = Resize(kind, length, int(length * scale), given_scale, single=dtype is torch.float32)
        picked = NEAREST[kind](pixels, [r.count, 1], given_scale, None).flatten().long().tolist()
        assert picked == [r.taps(o)[0] for o in range(r.count)]


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("kind", ["nearest", "linear", "cubic"])
def test_cuts_come_back_through_an_upsampling(kind, factor):
    r = Resize(kind, 61, 61 * factor)
    cut = (0, 7, 35, 61)
    assert r.cut_of(cut) == (0, 7 * factor, 35 * factor, 61 * factor)
    assert Resized(r).cut_of(r.cut_of(cut)) == cut
