"""Is tissue what a mask, or the threshold of saturation, says, at every place of the slide?"""

from __future__ import annotations

import doctest
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from widefield.config import DataConfig
from widefield.data import open_dataset, tissue
from widefield.data.tissue import MOST_PX, Tissue, TissueImages, otsu, tissue_of
from widefield.geometry import Interval
from widefield.geometry.box import full_box, slices

SIZE = (50, 71)


@dataclass(frozen=True)
class Stained:
    """A slide of glass with a stained rectangle; deep: of another dtype.  channels: of the slide."""

    size: tuple[int, int] = SIZE
    channels: int = 3
    dtype: torch.dtype = torch.uint8
    stained: bool = True

    def __len__(self) -> int:
        return 1

    def name_of(self, index: int) -> str:
        return "slides/a.tif"

    def shape(self, index: int) -> tuple[int, ...]:
        return (self.channels, *self.size)

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.read_window(index, full_box(self.size))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int]:
        image = torch.full((3, *self.size), 240, dtype=torch.uint8)
        if self.stained:
            image[1, self.size[0] // 5 : self.size[0] // 2, self.size[1] // 7 : self.size[1] // 2] = 120
        return image[: self.channels].to(self.dtype)[..., *slices(window)], 0


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(tissue)
    assert result.failed == 0 and result.attempted == 1


def test_otsus_threshold_is_the_one_that_separates_best():
    values = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint8) // 3
    values[200:] += 90

    def between(threshold: int) -> float:
        low, high = values[values <= threshold], values[values > threshold]
        return len(low) * len(high) * (low.mean() - high.mean()) ** 2 if len(low) and len(high) else 0.0

    assert between(otsu(values)) == pytest.approx(max(between(t) for t in range(256)))


@pytest.mark.parametrize("size", [SIZE, (3 * MOST_PX + 5, 700)])
def test_what_is_stained_is_tissue(size):
    images = Stained(size)
    found = tissue_of(images, 0, "otsu")
    wanted = (images.read(0)[0][1] == 120).numpy()
    assert found.threshold is not None and max(found.mask.shape) <= MOST_PX
    wrong = found.part(full_box(size)) != wanted
    scale = max(found.scale)
    assert wrong.sum() <= (0 if scale == 1 else 4 * scale * sum(size))  # along the edge of what is stained
    assert not tissue_of(Stained(size, stained=False), 0, "otsu").mask.any()


def test_a_built_in_slide_has_tissue_and_glass():
    images = open_dataset(DataConfig(name="slide")).train
    share = tissue_of(images, 0, "otsu").share
    assert 0.2 < share < 0.9


@pytest.fixture
def masks(tmp_path) -> Path:
    mask = np.zeros((25, 36), dtype=np.uint8)
    mask[3:9, 5:30] = 255
    Image.fromarray(mask).save(tmp_path / "a.png")
    return tmp_path


def test_a_pixel_counts_as_that_of_the_mask_in_which_it_lies(masks):
    found = tissue_of(Stained(), 0, str(masks))
    whole = found.part(full_box(SIZE))
    for row, column in [(0, 0), (6, 10), (17, 58), (17, 59), (18, 20), (5, 20), (49, 70)]:
        assert whole[row, column] == found.mask[row * 25 // 50, column * 36 // 71]
    window = (Interval(11, 33), Interval(7, 64))
    assert np.array_equal(found.part(window), whole[slices(window)])
    assert found.scale == (2.0, 71 / 36) and found.threshold is None


def test_whether_a_box_has_tissue_is_what_its_pixels_say(masks):
    found = tissue_of(Stained(), 0, str(masks))
    whole = found.part(full_box(SIZE))
    random = np.random.default_rng(0)
    for _ in range(300):
        starts, sides = random.integers(-12, 70, 2), random.integers(1, 15, 2)
        box = tuple(Interval(int(start), int(start + side)) for start, side in zip(starts, sides, strict=True))
        inside = whole[tuple(slice(max(0, run.start), max(0, run.stop)) for run in box)]
        assert found.is_in(box) == bool(inside.any())


def test_pixels_are_drawn_from_all_of_the_tissue_and_from_it_alone(masks):
    found = tissue_of(Stained(), 0, str(masks))
    whole = found.part(full_box(SIZE))
    generator = np.random.default_rng(0)
    drawn = {found.draw(generator) for _ in range(6000)}
    assert all(whole[place] for place in drawn) and len(drawn) > 0.9 * whole.sum()


def test_a_slide_has_its_tissue_as_a_last_channel(masks):
    images = Stained()
    found = tissue_of(images, 0, str(masks))
    slides = TissueImages(images, [found])
    window = (Interval(3, 40), Interval(10, 66))
    part, target = slides.read_window(0, window)
    assert slides.shape(0) == (4, *SIZE) and target == 0 and part.dtype == torch.uint8
    assert torch.equal(part[:3], images.read_window(0, window)[0])
    assert np.array_equal(part[3].numpy(), 255 * found.part(window))
    assert torch.equal(slides.read(0)[0][..., *slices(window)], part)


@pytest.mark.parametrize(
    ("images", "how", "told"),
    [
        (Stained(), "otsu/", "has no mask for the slide slides/a.tif; one named a.png"),
        (Stained((90, 71)), "{masks}", "is 25 x 36 pixels and the slide slides/a.tif is 90 x 71: it is of another shape"),
        (Stained((20, 29)), "{masks}", "or larger"),
        (Stained(channels=1), "otsu", "has 1 channel; name a folder of masks"),
        (Stained(dtype=torch.int16), "otsu", "has pixels of int16; name a folder"),
    ],
)
def test_what_has_no_tissue_is_refused(images, how, told, masks):
    with pytest.raises(ValueError, match="tissue") as caught:
        tissue_of(images, 0, how.format(masks=masks))
    assert told in str(caught.value)


def test_two_masks_of_one_slide_are_refused(masks):
    Image.fromarray(np.zeros((25, 36), dtype=np.uint8)).save(masks / "a.tif")
    with pytest.raises(ValueError, match="has 2 masks, a.png and a.tif, for the slide"):
        tissue_of(Stained(), 0, str(masks))


def test_a_mask_is_of_one_plane():
    assert Tissue(np.ones((2, 2), dtype=bool), (4, 4)).share == 1.0
