"""Are images on a common spacing what torch's interpolation makes of them, by window as of the whole, or refused in words?"""

from __future__ import annotations

import random
from pathlib import Path

import nnunet_folder
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from widefield.config import DataConfig
from widefield.data import open_dataset, spacing_of
from widefield.data.spatial.resampling import GridMap, Resampling
from widefield.geometry import Interval
from widefield.geometry.box import Box, full_box, size_of, slices

PAIRS = [((7, 9, 11), (11, 6, 14)), ((5, 8, 8), (5, 16, 3)), ((1, 6, 2), (4, 1, 7)), ((9, 13), (7, 20))]


def image_of(size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.randn((2, *size), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (values if dtype.is_floating_point else values * 300).to(dtype)


def by_torch(image: torch.Tensor, output: tuple[int, ...], order: str) -> torch.Tensor:
    """Edge to edge; of volumes cubic along two axes, then along the first."""
    if order == "linear":
        mode = "bilinear" if len(output) == 2 else "trilinear"
        return F.interpolate(image[None], size=output, mode=mode, align_corners=False)[0]
    planes = image if len(output) == 2 else image.flatten(0, 1)[:, None]
    found = F.interpolate(planes.view(-1, 1, *planes.shape[-2:]), size=output[-2:], mode="bicubic", align_corners=False)
    if len(output) == 2:
        return found[:, 0]
    columns = found.view(2, 1, image.shape[1], -1)
    return F.interpolate(columns, size=(output[0], columns.shape[-1]), mode="bicubic", align_corners=False).view(2, *output)


def random_window(size: tuple[int, ...], draws: random.Random) -> Box:
    starts = [draws.randrange(extent) for extent in size]
    return tuple(Interval(start, draws.randint(start, extent)) for start, extent in zip(starts, size, strict=True))


@pytest.mark.parametrize("order", ["linear", "cubic"])
@pytest.mark.parametrize(("source", "output"), PAIRS)
def test_pixels_are_those_of_torchs_interpolation(source, output, order):
    map, image = GridMap(source, output, order), image_of(source)
    found = map.pixels(image, full_box(source), full_box(output))
    torch.testing.assert_close(found, by_torch(image, output, order), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("source", "output"), PAIRS)
def test_labels_are_those_of_the_nearest_pixel(source, output):
    marks = torch.randint(0, 9, source)
    found = GridMap(source, output).labels(marks, full_box(source), full_box(output))
    for axis, (old, new) in enumerate(zip(source, output, strict=True)):
        centers = (np.arange(new) + 0.5) * old / new
        distance = np.abs(centers[:, None] - (np.arange(old) + 0.5)[None])
        nearest = old - 1 - distance[:, ::-1].round(9).argmin(1)  # of two as near, the later
        marks = marks.index_select(axis, torch.from_numpy(nearest))
    assert torch.equal(found, marks)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("order", ["linear", "cubic"])
def test_every_window_has_the_bits_of_the_whole_from_its_own_box(dtype, order):
    draws = random.Random(0)
    for source, output in PAIRS:
        map, image = GridMap(source, output, order), image_of(source, dtype)
        whole = map.pixels(image, full_box(source), full_box(output))
        assert whole.dtype == dtype
        for _ in range(25):
            window = random_window(output, draws)
            box = map.source_box(window)
            part = image[:, *slices(box)]
            assert torch.equal(map.pixels(part, box, window), whole[:, *slices(window)])
            most = [len(run) * old / new + 5 for run, old, new in zip(window, source, output, strict=True)]
            assert all(side <= limit for side, limit in zip(size_of(box), most, strict=True))


def test_an_axis_of_the_right_spacing_is_copied_and_lengths_are_kept():
    image = image_of((4, 6, 5), torch.float32)
    image[0, 1, 2, 3] = torch.inf
    found = Resampling((2.0, 1.0, 1.0)).map_of((4, 6, 5), (2.0, 1.0, 1.0))
    assert found.is_identity and torch.equal(found.pixels(image, full_box(found.source), full_box(found.output)), image)
    grid = Resampling((2.0, 0.7, 1.0))
    assert grid.map_of((4, 6, 5), (2.5, 1.0, 1.0)).output == (5, 9, 5)
    assert grid.spacing_of((4, 6, 5), (2.5, 1.0, 1.0)) == pytest.approx((4 * 2.5 / 5, 6 / 9, 1.0))
    assert Resampling.from_tree(grid.to_tree()) == grid


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("nibabel")
    return nnunet_folder.write(tmp_path_factory.mktemp("nnunet") / "Dataset001_Parts", tests=0)


def opened(folder: Path, **options):
    return open_dataset(DataConfig(name="masks", path=str(folder), hold_out=0.34, options=options))


def test_a_folder_is_brought_to_the_median_of_its_spacings(folder):
    plain, found = opened(folder), opened(folder, spacing="median")
    assert found.resampling == Resampling((2.0, 1.0, 1.0)) and "resampled to a spacing of 2 x 1 x 1" in found.about
    assert (found.channels, found.channel_files, found.dtype) == (2, 2, torch.float32)
    for images, before in ((found.train, plain.train), (found.evaluate, plain.evaluate)):
        for index in range(len(images)):
            image, labels = images.read(index)
            map = found.resampling.map_of(before.shape(index)[1:], spacing_of(before, index))
            raw, marks = before.read(index)
            whole = full_box(map.source), full_box(map.output)
            assert torch.equal(image, map.pixels(raw, *whole)) and torch.equal(labels, map.labels(marks, *whole))
            assert torch.equal(images.target_of(index), labels) and images.shape(index) == tuple(image.shape)
            assert spacing_of(images, index) == pytest.approx((2.0, 1.0, 1.0), rel=0.1)
            window = tuple(Interval(1, extent - 2) for extent in image.shape[1:])
            part, marks = images.read_window(index, window)
            assert torch.equal(part, image[:, *slices(window)]) and torch.equal(marks, labels[slices(window)])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"spacing": [1, 1]}, r"data.options.spacing is \[1.0, 1.0\] and images have 3 dims; give one length per dim"),
        ({"spacing": [1, 1, 0]}, r"data.options.spacing is \[1, 1, 0\]; the lengths of a pixel along each dim are wanted"),
        ({"spacing": "mean"}, "data.options.spacing is 'mean'; the lengths of a pixel"),
        ({"spacing": [1, 1, 1], "interpolation": "sinc"}, "data.options.interpolation is 'sinc'; it is linear or cubic"),
        ({"interpolation": "cubic"}, "data.options.interpolation is 'cubic' and spacing is not set"),
    ],
)
def test_a_spacing_that_is_none_is_refused(options, told, folder):
    with pytest.raises(ValueError, match=told):
        opened(folder, **options)


def test_an_image_without_spacing_is_named(tmp_path):
    for place in ("images", "masks"):
        (tmp_path / place).mkdir()
        for number in range(3):
            Image.fromarray(np.full((5, 4), number % 2, dtype=np.uint8)).save(tmp_path / place / f"{number}.png")
    with pytest.raises(
        ValueError, match=r"images/\d.png tells no spacing, and data.options.spacing resamples images to a common"
    ):
        opened(tmp_path, spacing=[1, 1])


def test_labels_elsewhere_than_their_volume_are_refused(folder, tmp_path):
    other = nnunet_folder.write(tmp_path / "other", count=3, tests=0)
    _, labels = nnunet_folder.volume(1)
    nnunet_folder.save(labels, other / "labelsTr/case_1.nii.gz", nnunet_folder.SPACINGS[1], number=0)
    with pytest.raises(ValueError, match=r"case_1.nii.gz lies up to [\d.]+ away from .*case_1_0000.nii.gz"):
        opened(other)
