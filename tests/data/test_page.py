"""Is a page the real digits, labelled pixel by pixel, and a window of it that part of the whole, bit for bit?"""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from widefield.config import DataConfig
from widefield.data import Dataset, WindowedImages, open_dataset
from widefield.data.formats.page import INK
from widefield.geometry import Interval

FULL = {"digit_px": [24, 24], "digits_per_megapixel": 1736}  # a digit in (almost) every cell of 24 px, filling it


def pages(**options) -> Dataset:
    return open_dataset(DataConfig(name="page", options=options))


def refusal(**options) -> str:
    with pytest.raises(ValueError) as caught:
        pages(**options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- windows

WHOLE = pages(size=[300, 170], pages=[2, 1])  # 300 rows are more than one band


@settings(max_examples=60)
@given(rows=st.tuples(st.integers(0, 300), st.integers(0, 300)), columns=st.tuples(st.integers(0, 170), st.integers(0, 170)))
def test_a_window_is_that_part_of_the_whole_page_bit_for_bit(rows, columns):
    image, labels = WHOLE.train.read(1)
    window = Interval(*sorted(rows)), Interval(*sorted(columns))
    part = tuple(slice(run.start, run.stop) for run in window)
    tile, tile_labels = WHOLE.train.read_window(1, window)
    assert torch.equal(tile, image[(0, *part)][None]) and torch.equal(tile_labels, labels[part])


def test_pages_tell_their_shape_without_being_rendered():
    assert isinstance(WHOLE.train, WindowedImages) and WHOLE.train.shape(0) == tuple(WHOLE.train.read(0)[0].shape) == (
        1,
        300,
        170,
    )


def test_a_window_of_a_page_that_fits_no_memory_costs_what_its_own_pixels_do():
    """A page of 10^12 pixels.  256 x 256 of it took 2 ms and 2 MB; a cell each for the page alone would be 10^9."""
    images = pages(size=[10**6, 10**6]).train
    window = (Interval(500_000, 500_256), Interval(700_100, 700_356))
    tracemalloc.start()
    start = time.monotonic()
    image, _ = images.read_window(0, window)
    seconds, (_, peak_bytes) = time.monotonic() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert image.shape == (1, 256, 256) and peak_bytes < 10e6 and seconds < 5


# ---------------------------------------------------------------------------------------------- what a page shows


def test_every_digit_is_a_scan_of_its_class_and_split_enlarged_by_torch():
    """Cells of 24 px are filled by a digit each, so each must be, in its labels, one of the split's scans."""
    dataset, digits = pages(size=[72, 72], pages=[1, 1], **FULL), open_dataset(DataConfig(name="digits"))
    for images, scans in ((dataset.train, digits.train), (dataset.evaluate, digits.evaluate)):
        large = F.interpolate(scans.images.float(), size=(24, 24), mode="bilinear", align_corners=False)[:, 0]
        classes = torch.tensor(scans.labels)
        _, labels = images.read(0)
        for cell in labels.unfold(0, 24, 24).unfold(1, 24, 24).reshape(-1, 24, 24):
            number = int(cell.max()) - 1
            assert set(cell.unique().tolist()) == {0, number + 1}
            inked = (large[classes == number] > INK) == (cell > 0)
            # a pixel whose ink is INK to float32's last digit may fall on either side
            assert inked.flatten(1).sum(1).max() >= 24 * 24 - 1, "no scan of that class in that split has these pixels"


def test_ink_is_lighter_than_the_paper_it_is_on():
    image, labels = pages(size=[240, 240]).train.read(0)
    assert image[0][labels > 0].double().mean() > image[0][labels == 0].double().mean() + 40
    assert image[0][labels == 0].double().std() > 5, "the paper has a grain"


def test_there_are_as_many_digits_as_asked_for():
    """60 px apart in size so that each is counted alone: a chance of 0.4 in 400 cells, within 4 standard deviations."""
    _, labels = pages(size=[1200, 1200], digit_px=[20, 60], digits_per_megapixel=0.4 * 1e6 / 3600).train.read(0)
    filled = [(cell > 0).any() for cell in labels.unfold(0, 60, 60).unfold(1, 60, 60).reshape(-1, 60, 60)]
    assert abs(sum(filled) - 160) < 4 * (400 * 0.4 * 0.6) ** 0.5


def test_digits_are_of_all_sizes_asked_for():
    _, labels = pages(size=[2400, 2400], digit_px=[16, 60], digits_per_megapixel=270).train.read(0)
    cells = labels.unfold(0, 60, 60).unfold(1, 60, 60).reshape(-1, 60, 60)
    heights = [int(cell.any(1).sum()) for cell in cells if cell.any()]
    assert min(heights) >= 10 and max(heights) <= 60 and len(set(heights)) > 40  # strokes may end before their box does


def test_a_page_follows_from_seed_split_and_index_alone():
    torch.manual_seed(1)
    np.random.seed(1)
    first = pages(seed=3, pages=[2, 2]).train.read(1)
    torch.manual_seed(2)
    np.random.seed(2)
    again, others = pages(seed=3, pages=[5, 1]).train.read(1), [pages(seed=4).train, pages(seed=3).evaluate]
    assert all(map(torch.equal, first, again))
    for image, labels in [pages(seed=3).train.read(0), *(images.read(1) for images in others)]:
        assert not torch.equal(first[0], image) and not torch.equal(first[1], labels)


def test_mean_and_deviation_are_those_of_the_pages():
    dataset = pages()
    pixels = torch.stack([dataset.train.read(index)[0] for index in range(64)]).double() / 255
    assert [round(pixels.mean().item(), 3), round(pixels.std().item(), 3)] == [*dataset.mean, *dataset.std]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("options", "told"), [
    ({"size": [256]}, "data.options.size is [256]; two whole numbers above 0 are wanted, as [256, 256]"),
    ({"size": 256}, "data.options.size is 256; two whole numbers"),
    ({"size": [256, 0]}, "data.options.size is [256, 0]; two whole numbers"),
    ({"pages": [8, 0.5]}, "data.options.pages is [8, 0.5]; two whole numbers"),
    ({"digit_px": [40, 16]}, "data.options.digit_px is [40, 16]; the smallest side comes first"),
    ({"digits_per_megapixel": 700}, "digits_per_megapixel is 700; digits of up to 40 px want a number above 0 and up to 625"),
    ({"digits_per_megapixel": 0}, "digits_per_megapixel is 0; digits of up to 40 px"),
    ({"sise": [256, 256]}, "data.options {'sise': [256, 256]} do not fit 'page': "),
])  # fmt: skip
def test_options_that_no_page_can_have_are_refused(options, told):
    assert refusal(**options).startswith(told) or told in refusal(**options)


@pytest.mark.parametrize("option", [{"path": "x"}, {"hold_out": 0.1}])
def test_pages_take_no_folder_and_no_split(option):
    with pytest.raises(ValueError, match="data.name=page is built in; leave data.path and data.hold_out out"):
        open_dataset(DataConfig(name="page", **option))


def test_a_format_without_options_refuses_them():
    with pytest.raises(ValueError, match=r"data.options \{'size': 8\} do not fit 'digits': "):
        open_dataset(DataConfig(name="digits", options={"size": 8}))
