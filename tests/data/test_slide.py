"""Is a window of a slide that part of the whole, bit for bit, and is a tumour where the label says so and nowhere else?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from widefield.config import DataConfig
from widefield.data import Dataset, WindowedImages, open_dataset
from widefield.geometry import Interval


def slides(**options) -> Dataset:
    return open_dataset(DataConfig(name="slide", options=options))


WHOLE = slides(size=[300, 170], slides=[2, 2])  # 300 rows are more than one band
side = st.tuples


@settings(max_examples=60)
@given(rows=side(st.integers(0, 300), st.integers(0, 300)), columns=side(st.integers(0, 170), st.integers(0, 170)))
def test_a_window_is_that_part_of_the_whole_slide_bit_for_bit(rows, columns):
    image, label = WHOLE.train.read(1)
    window = Interval(*sorted(rows)), Interval(*sorted(columns))
    tile, same = WHOLE.train.read_window(1, window)
    assert torch.equal(tile, image[:, *(slice(run.start, run.stop) for run in window)]) and same == label == 1


def test_a_window_of_a_slide_that_fits_no_memory_is_made_alone():
    images = slides(size=[150_000, 150_000]).train
    assert isinstance(images, WindowedImages) and images.shape(0) == (3, 150_000, 150_000)
    image, label = images.read_window(1, (Interval(70_000, 70_064), Interval(100, 164)))
    assert image.shape == (3, 64, 64) and label == 1


def test_dark_nuclei_are_in_slides_with_a_tumour_alone():
    dataset = slides()
    for images in (dataset.train, dataset.evaluate):
        for index in range(8):
            image, label = images.read(index)
            dark = int((image[0] < 105).sum())
            assert (dark > 300) == bool(label), f"slide {index} with label {label} has {dark} dark pixels"


def test_mean_and_deviation_are_those_of_the_training_slides():
    dataset = slides()
    pixels = torch.stack([dataset.train.read(index)[0] for index in range(64)]).double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(dataset.mean, abs=6e-4)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(dataset.std, abs=6e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": [512]}, "size is \\[512\\]; two whole numbers"),
        ({"slides": [0, 1]}, "slides is \\[0, 1\\]; two whole"),
        ({"tumour_px": 300}, "tumour_px is 300; a whole number from 8 to half of the slide's 384"),
    ],
)
def test_options_that_are_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        slides(**options)
    with pytest.raises(ValueError, match="is built in"):
        open_dataset(DataConfig(name="slide", path="there"))
