"""Is a window of a scene that part of the whole, bit for bit, and does nothing count outside of the scanned strip?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from widefield.config import DataConfig
from widefield.data import Dataset, WindowedImages, open_dataset
from widefield.geometry import Interval


def scenes(**options) -> Dataset:
    return open_dataset(DataConfig(name="scene", options=options))


WHOLE = scenes(size=[300, 170], scenes=[2, 1])  # 300 rows are more than one band
side = st.tuples


@settings(max_examples=60)
@given(rows=side(st.integers(0, 300), st.integers(0, 300)), columns=side(st.integers(0, 170), st.integers(0, 170)))
def test_a_window_is_that_part_of_the_whole_scene_bit_for_bit(rows, columns):
    image, labels = WHOLE.train.read(1)
    window = Interval(*sorted(rows)), Interval(*sorted(columns))
    part = tuple(slice(run.start, run.stop) for run in window)
    tile, tile_labels = WHOLE.train.read_window(1, window)
    assert torch.equal(tile, image[(slice(None), *part)]) and torch.equal(tile_labels, labels[part])


def test_a_window_of_a_scene_that_fits_no_memory_is_made_alone():
    images = scenes(size=[10**6, 10**6]).train
    assert isinstance(images, WindowedImages) and images.shape(0) == (4, 10**6, 10**6)
    image, labels = images.read_window(0, (Interval(500_000, 500_064), Interval(500_100, 500_164)))
    assert image.shape == (4, 64, 64) and len(labels.unique()) > 1


def test_outside_of_the_strip_all_bands_are_nodata_and_nothing_counts():
    image, labels = scenes().train.read(0)
    outside = (image == 0).all(0)
    assert torch.equal(outside, labels == 255) and 0.05 < outside.double().mean() < 0.15
    assert (image[:, ~outside].int() > 0).all() and not outside[:, 256].any()
    assert not (scenes(slant=0).train.read(0)[1] == 255).any()


def test_mean_and_deviation_are_those_of_the_training_scenes():
    dataset = scenes()
    pixels = torch.stack([dataset.train.read(index)[0] for index in range(16)]).double() / 65535
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(dataset.mean, abs=6e-5)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(dataset.std, abs=6e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": [512]}, "size is \\[512\\]; two whole numbers"),
        ({"scenes": [0, 1]}, "scenes is \\[0, 1\\]; two whole"),
        ({"feature_px": 2}, "feature_px is 2; a whole number of 8 or more"),
        ({"slant": 0.7}, "slant is 0.7; a number from 0 to 0.4"),
    ],
)
def test_options_that_are_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        scenes(**options)
    with pytest.raises(ValueError, match="is built in"):
        open_dataset(DataConfig(name="scene", path="there"))
