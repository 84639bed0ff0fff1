"""Do labels of pixels travel with their image, and is a window what the whole shows there?"""

import re
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from widefield.config import DataConfig
from widefield.data.device import Preparation
from widefield.data.loader import Batch, SampleReader, reader_of
from widefield.data.order import Key
from widefield.data.transforms import KEEP_PIXELS_IN_PLACE, Transforms
from widefield.geometry import Interval, even_cut, parts_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NONE = Transforms([], field="data.read")
JITTER = {"ColorJitter": {"brightness": 0.5, "contrast": 0.5}}  # contrast looks at the mean of the whole image
CLASSES = 5


@dataclass(frozen=True)
class Labelled:
    """Noise of 3 channels; class numbers per pixel or, with `single`, per image."""

    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    single: bool = False
    labels: dict[int, int] = field(default_factory=dict)
    torn: bool = False

    def __len__(self) -> int:
        return 20

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        generator, size = torch.Generator().manual_seed(index), self.sizes.get(index, (11, 14))
        image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, CLASSES, size, dtype=torch.uint8, generator=generator)
        labels[2, 3] = self.labels.get(index, 0)
        return image, index % CLASSES if self.single else labels[:, : 9 if self.torn else None]

    def name_of(self, index: int) -> str:
        return f"noise/{index}"


class Cut(Labelled):
    """The same where a window can be read; the whole must not be."""

    def shape(self, index: int) -> tuple[int, ...]:
        return (3, *self.sizes.get(index, (11, 14)))

    def read_window(self, index: int, window: tuple[Interval, ...]) -> tuple[Tensor, int | Tensor]:
        rows, columns = (slice(run.start, run.stop) for run in window)
        image, labels = Labelled.read(self, index)
        return image[:, rows, columns], labels if isinstance(labels, int) else labels[rows, columns]

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        raise AssertionError(f"the whole of noise/{index} was read")


class Either(Cut):
    """The same where the whole may be read too."""

    def read(self, index: int) -> tuple[Tensor, int | Tensor]:
        return Labelled.read(self, index)


@dataclass(frozen=True)
class Tile:
    """The window of tile (row, column) of 2 x 3."""

    row: int
    column: int

    def __call__(self, size: tuple[int, ...]) -> tuple[Interval, ...]:
        cuts = even_cut(size[0], 2), even_cut(size[1], 3)
        return parts_of(cuts[0])[self.row], parts_of(cuts[1])[self.column]


TILES = [Tile(row, column) for row in range(2) for column in range(3)]


def reading(images, *, augment=(), **options) -> SampleReader:
    return SampleReader(images, NONE, Transforms(augment, field="data.augment"), CLASSES, 0, **options)


def batch_of(reader: SampleReader, *indices: int, real: bool = True) -> Batch:
    batch = reader.__getitems__([Key(0, position, index, real) for position, index in enumerate(indices)])
    assert batch.problem is None, batch.problem
    return batch


def problem(reader: SampleReader, *indices: int) -> str:
    return reader.__getitems__([Key(0, position, index) for position, index in enumerate(indices)]).problem


def shown(whole: Tensor, tile: Tile) -> Tensor:
    rows, columns = tile(tuple(whole.shape[-2:]))
    return whole[..., rows.start : rows.stop, columns.start : columns.stop]


# ---------------------------------------------------------------------------------------------- labels


def test_labels_of_pixels_travel_with_their_image():
    batch = batch_of(reading(Labelled()), 3, 7)
    assert batch.target.dtype == torch.uint8 and batch.whole_shape is None and batch.window is None
    for number, index in enumerate((3, 7)):
        image, labels = Labelled().read(index)
        assert torch.equal(batch.image[number], image) and torch.equal(batch.target[number], labels)


def test_labels_reach_the_loss_as_whole_numbers():
    prepare = Preparation(CPU, torch.float32, [0.5], [0.25], CLASSES, False, NONE)
    _, target = prepare(batch_of(reading(Labelled()), 3, 7))
    assert target.dtype == torch.int64 and torch.equal(target[0], Labelled().read(3)[1].long())


def test_colour_changes_no_label():
    batch = batch_of(reading(Labelled(), augment=[JITTER]), 3)
    assert not torch.equal(batch.image[0], Labelled().read(3)[0]) and torch.equal(batch.target[0], Labelled().read(3)[1])


@pytest.mark.parametrize("name", KEEP_PIXELS_IN_PLACE)
def test_transforms_of_colour_leave_a_mask_alone(name):
    """Torchvision's own word for it: what it knows to be a mask stays as it is."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    needed = {"RandomPosterize": {"bits": 2}, "RandomSolarize": {"threshold": 0.5}, "GaussianBlur": {"kernel_size": 3},
              "RandomAdjustSharpness": {"sharpness_factor": 2}}.get(name, {})  # fmt: skip
    mask = tv_tensors.Mask(Labelled().read(0)[1])
    image = tv_tensors.Image(torch.rand(3, 11, 14))
    for _ in range(5):
        assert torch.equal(getattr(v2, name)(**needed)(image, mask)[1], mask)


@pytest.mark.parametrize("label", [CLASSES, 255])
def test_a_label_of_a_pixel_that_is_no_class_names_its_image(label):
    told = problem(reading(Labelled(labels={6: label})), 5, 6)
    assert told == f"the label of noise/6 is {label}, outside 0..4; mend the label or the number of classes"


def test_pixels_that_do_not_count_may_have_their_label():
    assert batch_of(reading(Labelled(labels={6: 255}), ignore=255), 6).target[0, 2, 3] == 255
    assert "the label of noise/6 is 254" in problem(reading(Labelled(labels={6: 254}), ignore=255), 6)


def test_labels_of_another_size_than_the_image_name_it():
    assert problem(reading(Labelled(torn=True)), 6) == (
        "the labels of noise/6 are 11 x 9 pixels and its image is 11 x 14; mend one of them"
    )


# ---------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_window_is_read_alone_where_the_format_can(tile, single):
    whole, part = batch_of(reading(Labelled(single=single)), 3, 7), batch_of(reading(Cut(single=single), window=tile), 3, 7)
    assert part.whole_shape == (3, 11, 14) and part.window == tile((11, 14)) and part.samples == 2
    assert torch.equal(part.image, shown(whole.image, tile))
    assert torch.equal(part.target, whole.target if single else shown(whole.target, tile))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("images", [Labelled(), Labelled(single=True), Either()])
def test_what_looks_at_the_whole_image_sees_it_before_the_window_is_cut(images, tile):
    augment = [JITTER, "RandomHorizontalFlip"] if images.single else [JITTER]
    whole = batch_of(reading(images, augment=augment), 3, 7)
    part = batch_of(reading(images, augment=augment, window=tile), 3, 7)
    assert torch.equal(part.image, shown(whole.image, tile)) and part.whole_shape == (3, 11, 14)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("mixing", [{"mixup": 0.4}, {"cutmix": 1.0}])
def test_a_mixed_window_is_that_part_of_the_mixed_image(mixing, tile):
    prepare = Preparation(CPU, torch.float64, [0.5], [0.25], CLASSES, False, NONE)
    image, shares = prepare(batch_of(reading(Labelled(single=True), **mixing), *range(8)))
    part, part_shares = prepare(batch_of(reading(Labelled(single=True), window=tile, **mixing), *range(8)))
    assert torch.equal(part, shown(image, tile)) and torch.equal(part_shares, shares)


def test_a_stand_in_is_a_window_too():
    batch = batch_of(reading(Cut(), window=TILES[4]), 4, real=False)
    assert batch.samples == 0 and batch.image.shape == (1, 3, 5, 5) and batch.whole_shape == (3, 11, 14)


def test_whole_images_that_differ_are_refused_even_where_their_windows_are_alike():
    """9 and 10 rows in two tiles: the first tile has 5 rows of either."""
    told = problem(reading(Cut(sizes={3: (9, 14), 4: (10, 14)}), window=TILES[0]), 3, 4)
    assert told == (
        "images of one batch differ in size (C, H, W): noise/3 is (3, 9, 14) and noise/4 is (3, 10, 14); "
        "add RandomCrop: {size: [H, W], pad_if_needed: true} or Resize: {size: [H, W]} to data.read, and one of them to "
        "data.read_evaluate, or set data.batch_size and data.evaluate_batch_size to 1"
    )


@pytest.mark.parametrize(("device", "window", "here"), [(CPU, None, 1), (GPU, None, 0), (GPU, TILES[0], 1), (CPU, TILES[0], 1)])
def test_augmentation_runs_in_the_reader_wherever_a_window_is_cut(device, window, here):
    config = DataConfig(name="digits", augment=[JITTER])
    reader = reader_of(config, Labelled(), num_classes=CLASSES, seed=0, train=True, device=device, window=window)
    assert len(reader.augment.steps) == here and reader.window is window


def test_a_batch_keeps_its_window_on_its_way():
    batch = batch_of(reading(Cut(), window=TILES[1]), 3)
    assert replace(batch, samples=0).window == batch.window and re.match(r"\(Interval", str(batch.window))
