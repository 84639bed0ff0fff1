"""Are patches the pixels of their place, all of an image once where they cover it, and read by window alone?"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from widefield.data import WindowedImages
from widefield.data.added_transforms import ClassBalancedCrop
from widefield.data.loader import SampleReader
from widefield.data.order import Key, Steps, TrainSampler
from widefield.data.patch_places import CoverPlaces, RandomPlaces
from widefield.data.patches import PatchImages
from widefield.data.sources import OfImages
from widefield.data.spatial.class_pixels import class_pixels_of
from widefield.data.tissue import Tissue
from widefield.data.transforms import Transforms
from widefield.geometry import Interval
from widefield.geometry.box import slices

SIZES = [(37, 52), (64, 20), (9, 11)]
SIDE = (16, 12)
IGNORED = 255
NONE = Transforms([], field="data.read")


@dataclass(frozen=True)
class Places:
    """Image i of SIZES[i]; a pixel's two channels are its row and column.  Labels: 1 in a small square, else 0.

    asked: the windows that were read.
    """

    asked: list = field(default_factory=list)

    def __len__(self) -> int:
        return len(SIZES)

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (2, *SIZES[index])

    def weight_of(self, index: int) -> float:
        return 1.0 + index

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("no image is read as a whole")

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, Tensor]:
        self.asked.append((index, window))
        image = torch.stack(torch.meshgrid(*(torch.arange(n) for n in SIZES[index]), indexing="ij")).to(torch.uint16)
        assert all(0 <= run.start <= run.stop <= extent for run, extent in zip(window, SIZES[index], strict=True))
        return image[..., *slices(window)], square(index)[slices(window)]


def square(index: int) -> Tensor:
    labels = torch.zeros(SIZES[index], dtype=torch.uint8)
    labels[2:5, 6:9] = index < 2
    return labels


def cover(seed: int | None = 3) -> PatchImages:
    return PatchImages(Places(), CoverPlaces(SIZES, SIDE, seed), pixels=True, ignore=IGNORED)


def drawn(share: float = 0.5, tissue=None, per_image: int = 6, classes=None) -> PatchImages:
    images = Places()
    sources = [OfImages(images, index, seed=0, check=lambda *sample: None) for index in range(3)]
    known = {
        index: class_pixels_of(one.size, lambda box, index=index: square(index)[slices(box)], num_classes=2)
        for index, one in enumerate(sources)
    }
    crop = ClassBalancedCrop(list(SIDE), share, classes)
    places = RandomPlaces(images, SIZES, crop, per_image, 3, 2, known, tissue)
    return PatchImages(images, places, pixels=True, ignore=IGNORED)


def seen_of(patches: PatchImages) -> list[np.ndarray]:
    """How often each pixel of each image is in a patch, by what the patches' pixels say of themselves."""
    counts = [np.zeros(size, dtype=int) for size in SIZES]
    for index in range(len(patches)):
        image, labels = patches.read(index)
        assert image.shape == (2, *SIDE) and labels.shape == SIDE and image.dtype == torch.uint16
        rows, columns = (channel.long()[labels != IGNORED].numpy() for channel in image.int())
        np.add.at(counts[patches.place_of(index)[0]], (rows, columns), 1)
    return counts


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_a_cover_has_every_pixel_once(seed, epoch):
    patches = cover(seed).of_epoch(epoch)
    assert isinstance(patches, WindowedImages)
    for count in seen_of(patches):
        assert (count == 1).all()


def test_a_cover_lies_elsewhere_in_every_epoch_and_has_equally_many_patches():
    every = cover()
    shifts = {tuple((run.start % side) for run, side in zip(every.of_epoch(n).box_of(0), SIDE, strict=True)) for n in range(9)}
    assert len(shifts) > 4 and len({len(every.of_epoch(n)) for n in range(9)}) == 1
    fixed = cover(None)
    assert [fixed.of_epoch(5).box_of(i) for i in range(len(fixed))] == [fixed.box_of(i) for i in range(len(fixed))]


def test_labels_of_a_patch_are_those_of_its_place_and_what_is_beyond_does_not_count():
    patches = cover().of_epoch(2)
    for index in range(len(patches)):
        image, labels = patches.read(index)
        box, whole = patches.box_of(index), square(patches.place_of(index)[0])
        for row, column in ((r, c) for r in range(SIDE[0]) for c in range(SIDE[1])):
            y, x = box[0].start + row, box[1].start + column
            inside = 0 <= y < whole.shape[0] and 0 <= x < whole.shape[1]
            assert labels[row, column] == (whole[y, x] if inside else IGNORED)
            assert image[:, row, column].tolist() == ([y, x] if inside else [0, 0])


@pytest.mark.parametrize("kind", [cover, drawn])
def test_a_window_of_a_patch_is_that_part_of_it_and_no_other_pixel_is_read(kind):
    patches = kind().of_epoch(1)
    windows = [(Interval(0, 9), Interval(0, 12)), (Interval(9, 16), Interval(3, 5)), (Interval(4, 4), Interval(0, 12))]
    for index in range(len(patches)):
        image, labels = patches.read(index)
        for window in windows:
            patches.images.asked.clear()
            part, marks = patches.read_window(index, window)
            assert torch.equal(part, image[..., *slices(window)]) and torch.equal(marks, labels[slices(window)])
            pixels = sum(len(rows) * len(columns) for _, (rows, columns) in patches.images.asked)
            block = 1 if kind is cover else 1 + min(256 * 256, np.prod(SIZES[patches.place_of(index)[0]]))
            assert pixels <= len(window[0]) * len(window[1]) + block  # drawing a place reads the labels of one block


def test_random_patches_lie_inside_and_a_share_of_them_on_foreground():
    patches = drawn(share=0.5, per_image=150)
    assert len(patches) == 450
    on, boxes = 0, set()
    for index in range(300):  # of the two images with foreground, both larger than a patch
        box = patches.box_of(index)
        size = SIZES[patches.place_of(index)[0]]
        assert all(0 <= run.start and run.stop <= extent for run, extent in zip(box, size, strict=True))
        boxes.add(box)
        on += bool(square(patches.place_of(index)[0])[slices(box)].any())
    assert len(boxes) > 100 and 120 < on < 200  # 158 expected, of a deviation of 9
    every = drawn(share=1.0, per_image=20)
    assert all(square(every.place_of(i)[0])[slices(every.box_of(i))].any() for i in range(40))


def test_random_patches_are_drawn_anew_in_every_epoch_and_by_the_seed_alone():
    one, other = drawn(), drawn()
    boxes = [[patches.of_epoch(epoch).box_of(i) for i in range(len(patches))] for patches in (one, other) for epoch in (0, 1)]
    assert boxes[0] == boxes[2] and boxes[1] == boxes[3] and boxes[0] != boxes[1]
    assert [pickle.loads(pickle.dumps(one)).box_of(i) for i in range(len(one))] == boxes[0]  # as a worker has them


def half(index: int) -> Tissue:
    """The lower right quarter of an image, at a third of its resolution."""
    height, width = (-(-extent // 3) for extent in SIZES[index])
    mask = np.zeros((height, width), dtype=bool)
    mask[height // 2 :, width // 2 :] = index < 2
    return Tissue(mask, SIZES[index])


def test_patches_are_on_tissue_and_a_slide_without_has_none():
    tissue = [half(index) for index in range(3)]
    patches = drawn(share=0.0, tissue=tissue, per_image=30)
    assert len(patches) == 60
    for index in range(60):
        assert tissue[patches.place_of(index)[0]].part(patches.box_of(index)).any()
    covering = PatchImages(Places(), CoverPlaces(SIZES, SIDE, 3, tissue), pixels=True, ignore=IGNORED)
    seen = seen_of(covering)
    for index, count in enumerate(seen):
        counts = tissue[index].part(tuple(Interval(0, extent) for extent in SIZES[index]))
        assert (count[counts] == 1).all() and count.max() <= 1
    assert 0 < sum(count.sum() for count in seen) < sum(height * width for height, width in SIZES)


def keys(*, rank: int, ranks: int, first: int = 0) -> list[list[Key]]:
    steps = Steps(len(cover()), 5)
    return list(TrainSampler(steps, seed=1, first=first, last=9, rank=rank, ranks=ranks, passes=1, multiple=1))


def boxes_of(of_steps: list[list[Key]]) -> list[list]:
    patches = cover()
    return [
        [(patches.place_of(key.index)[0], patches.of_epoch(key.epoch).box_of(key.index)) for key in step] for step in of_steps
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_order_of_patches_is_that_of_one_rank_and_goes_on_in_the_middle_of_an_epoch(ranks):
    alone = boxes_of(keys(rank=0, ranks=1))
    shared = [boxes_of([[key for key in step if key.real] for step in keys(rank=rank, ranks=ranks)]) for rank in range(ranks)]
    assert [[one for part in parts for one in part] for parts in zip(*shared, strict=True)] == alone
    assert boxes_of(keys(rank=0, ranks=1, first=4)) == alone[4:]


def reader(window=None) -> SampleReader:
    return SampleReader(cover(), NONE, NONE, num_classes=2, seed=0, window=window, ignore=IGNORED)


def test_the_reader_has_the_patches_of_the_keys_epoch():
    for epoch in (0, 3):
        batch = reader().__getitems__([Key(epoch, 0, 2), Key(epoch, 1, 7)])
        assert batch.problem is None
        for image, target, index in zip(batch.image, batch.target, (2, 7), strict=True):
            wanted = cover().of_epoch(epoch).read(index)
            assert torch.equal(image, wanted[0]) and torch.equal(target, wanted[1])


def test_ranks_read_their_tiles_of_a_patch():
    halves = [
        reader(lambda size, start=start: (Interval(start, start + 8), Interval(0, size[1]))).__getitems__([Key(1, 0, 4)])
        for start in (0, 8)
    ]
    assert [half.whole_shape for half in halves] == [(2, *SIDE)] * 2
    wanted = cover().of_epoch(1).read(4)[0]
    assert torch.equal(torch.cat([half.image[0] for half in halves], 1), wanted)


def test_what_is_known_of_a_patch_is_what_is_known_of_its_image():
    patches = cover()
    assert {patches.weight_of(index) for index in range(len(patches))} == {1.0, 2.0, 3.0}
    assert not hasattr(patches, "target_of") and not hasattr(patches, "group_of")
    assert patches.name_of(len(patches) - 1).startswith("image 2, patch ")
