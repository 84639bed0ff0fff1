"""Is a volume vessels and blobs, labelled voxel by voxel, and a window of it that part of the whole, bit for bit?"""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from widefield.config import DataConfig
from widefield.data import Dataset, WindowedImages, open_dataset, spacing_of
from widefield.geometry import Interval

SIZE = (21, 50, 37)


def volumes(**options) -> Dataset:
    return open_dataset(DataConfig(name="volume", options=options))


def refusal(**options) -> str:
    with pytest.raises(ValueError) as caught:
        volumes(**options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- windows

WHOLE = {
    spacing: volumes(size=list(SIZE), volumes=[2, 1], spacing=list(spacing), vessels=1.0, blobs=1.0)
    for spacing in ((2.0, 1.0, 1.0), (0.7, 1.3, 3.1))
}
ENDS = [st.tuples(st.integers(0, extent), st.integers(0, extent)) for extent in SIZE]


@pytest.mark.long
@settings(max_examples=60)
@given(spacing=st.sampled_from(sorted(WHOLE)), ends=st.tuples(*ENDS))
def test_a_window_is_that_part_of_the_whole_volume_bit_for_bit(spacing, ends):
    images = WHOLE[spacing].train
    image, labels = images.read(1)
    window = tuple(Interval(*sorted(pair)) for pair in ends)
    part = tuple(slice(run.start, run.stop) for run in window)
    tile, tile_labels = images.read_window(1, window)
    assert torch.equal(tile, image[(0, *part)][None]) and torch.equal(tile_labels, labels[part])


def test_slabs_that_are_rendered_one_after_another_are_one_volume(monkeypatch):
    wanted = volumes(size=list(SIZE)).train.read(0)
    monkeypatch.setattr("widefield.data.formats.volume.SLAB_VOXELS", 4000)
    assert all(map(torch.equal, volumes(size=list(SIZE)).train.read(0), wanted))


def test_volumes_tell_their_shape_and_spacing_without_being_rendered():
    images = volumes(size=[10**6] * 3, spacing=[3, 1, 0.5]).train
    assert isinstance(images, WindowedImages) and images.shape(0) == (1, 10**6, 10**6, 10**6)
    assert spacing_of(images, 0) == (3.0, 1.0, 0.5)


def test_a_window_of_a_volume_that_fits_no_memory_costs_what_its_own_voxels_do():
    """A volume of 10^18 voxels.  32 x 64 x 64 of it took 40 ms and 5 MB."""
    images = volumes(size=[10**6] * 3).train
    window = (Interval(500_000, 500_032), Interval(700_100, 700_164), Interval(999_000, 999_064))
    tracemalloc.start()
    start = time.monotonic()
    image, _ = images.read_window(0, window)
    seconds, (_, peak_bytes) = time.monotonic() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert image.shape == (1, 32, 64, 64) and peak_bytes < 20e6 and seconds < 5


# ---------------------------------------------------------------------------------------------- what a volume shows


def test_vessels_and_blobs_are_lighter_than_the_background_and_as_light_as_each_other():
    read = [volumes(volumes=[8, 1]).train.read(index) for index in range(8)]
    image, labels = torch.stack([one[0][0] for one in read]).double(), torch.stack([one[1] for one in read])
    background, vessel, blob = (image[labels == number] for number in range(3))
    assert vessel.mean() > background.mean() + 40 and blob.mean() > background.mean() + 40
    assert abs(vessel.mean() - blob.mean()) < vessel.std(), "else brightness would tell them apart"


def test_a_blob_is_an_ellipsoid_of_its_size_in_the_units_of_the_spacing():
    """No vessels; what lies inside of the volume has a volume of 4/3 pi abc with half axes from 3.5 to 7."""
    spacing = (2.0, 1.0, 1.0)
    _, labels = volumes(size=[60, 120, 120], vessels=0.0, blobs=0.1, spacing=list(spacing)).train.read(0)
    found, count = ndimage.label(labels.numpy() == 2)
    seen = 0
    for box in ndimage.find_objects(found):
        if any(run.start == 0 or run.stop == extent for run, extent in zip(box, labels.shape, strict=True)):
            continue
        halves = [(run.stop - run.start) * step / 2 for run, step in zip(box, spacing, strict=True)]
        voxels = (found[box] > 0).sum() * np.prod(spacing)
        assert all(3.5 - step <= half <= 7 + step for half, step in zip(halves, spacing, strict=True))
        assert voxels == pytest.approx(4 / 3 * np.pi * np.prod(halves), rel=0.45)  # half axes are rounded to voxels
        seen += 1
    assert seen >= 5 and set(labels.unique().tolist()) == {0, 2} and count < 60


def test_vessels_are_one_network_where_all_neighbours_are_joined():
    _, labels = volumes(size=[40, 80, 80], vessels=1.0, blobs=0.0, spacing=[1, 1, 1]).train.read(0)
    found, count = ndimage.label(labels.numpy() == 1, structure=np.ones((3, 3, 3)))
    largest = np.bincount(found.ravel())[1:].max()
    assert largest > 0.9 * (labels == 1).sum()  # what joins it beyond the border is no part of it here


def test_a_volume_follows_from_seed_split_and_index_alone():
    torch.manual_seed(1)
    first = volumes(seed=3, volumes=[2, 2]).train.read(1)
    torch.manual_seed(2)
    np.random.seed(2)
    again, others = volumes(seed=3, volumes=[5, 1]).train.read(1), [volumes(seed=4).train, volumes(seed=3).evaluate]
    assert all(map(torch.equal, first, again))
    for image, labels in [volumes(seed=3).train.read(0), *(images.read(1) for images in others)]:
        assert not torch.equal(first[0], image) and not torch.equal(first[1], labels)


def test_mean_and_deviation_are_those_of_the_volumes():
    dataset = volumes()
    voxels = torch.stack([dataset.train.read(index)[0] for index in range(32)]).double() / 255
    assert [round(voxels.mean().item(), 3), round(voxels.std().item(), 3)] == [*dataset.mean, *dataset.std]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"size": [24, 64]}, "data.options.size is [24, 64]; 3 whole numbers above 0 are wanted, as [24, 64, 64]"),
        ({"size": [24, 64, 0]}, "data.options.size is [24, 64, 0]; 3 whole numbers"),
        ({"volumes": [8, 0.5]}, "data.options.volumes is [8, 0.5]; 2 whole numbers above 0 are wanted, as [32, 8]"),
        ({"spacing": [1, 1]}, "data.options.spacing is [1, 1]; three lengths from 0.01 to 20 are wanted"),
        ({"spacing": [1, 1, 21]}, "data.options.spacing is [1, 1, 21]; three lengths"),
        ({"vessels": 1.5}, "data.options.vessels is 1.5; a probability from 0 to 1 is wanted"),
        ({"blobs": -1}, "data.options.blobs is -1; a probability"),
        ({"sise": [9, 9, 9]}, "data.options {'sise': [9, 9, 9]} do not fit 'volume': "),
    ],
)
def test_options_that_no_volume_can_have_are_refused(options, told):
    assert told in refusal(**options)


@pytest.mark.parametrize("option", [{"path": "x"}, {"hold_out": 0.1}])
def test_volumes_take_no_folder_and_no_split(option):
    with pytest.raises(ValueError, match="data.name=volume is built in; leave data.path and data.hold_out out"):
        open_dataset(DataConfig(name="volume", **option))
