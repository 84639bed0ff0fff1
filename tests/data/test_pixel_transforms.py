"""Do image and labels move as one, is a window of the moved image that part of the whole, and is only its source read?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.loader import SampleReader, reader_of
from widefield.data.order import Key
from widefield.data.pixel_transforms import OfImagesAlone, PixelTransforms
from widefield.data.sources import InMemory
from widefield.data.spatial.boxes import moved_boxes, moved_points
from widefield.data.spatial.class_pixels import class_pixels_of
from widefield.data.spatial.coordinate_map import composed, undone
from widefield.data.spatial.elastic import elastic_of
from widefield.data.spatial.moves import MOVES, drawn
from widefield.data.spatial.warp import Warp
from widefield.data.transform_checks import check_transforms
from widefield.data.transforms import Transforms
from widefield.geometry import even_cut, parts_of
from widefield.geometry.box import Box, full_box, size_of

SIZE, CLASSES, IGNORED = (150, 170), 5, 255
CPU = torch.device("cpu")
GRIDS = {"whole": (1, 1), "2x1 tiles": (2, 1), "2x2 tiles": (2, 2), "3x3 stream": (3, 3)}

MOVING: dict[str, list[Any]] = {
    "RandomHorizontalFlip": [{"RandomHorizontalFlip": {"p": 1.0}}],
    "RandomVerticalFlip": [{"RandomVerticalFlip": {"p": 1.0}}],
    "RandomRotate90": ["RandomRotate90"],
    "RandomRotation": [{"RandomRotation": {"degrees": [20, 50], "fill": 9}}],
    "RandomRotation, expanded": [{"RandomRotation": {"degrees": [20, 50], "expand": True}}],
    "RandomAffine": [{"RandomAffine": {"degrees": 30, "translate": [0.1, 0.2], "scale": [0.7, 1.4], "shear": [5, 9, -4, 4]}}],
    "RandomPerspective": [{"RandomPerspective": {"p": 1.0}}],
    "ElasticTransform": [{"ElasticTransform": {"alpha": 80.0, "sigma": 6.0}}],
    "RandomCrop": [{"RandomCrop": {"size": [70, 91]}}],
    "RandomCrop, padded": [{"RandomCrop": {"size": [140, 190], "padding": 12, "padding_mode": "reflect"}}],
    "CenterCrop": [{"CenterCrop": {"size": [71, 200]}}],
    "RandomResizedCrop": [{"RandomResizedCrop": {"size": [60, 80], "scale": [0.3, 0.9]}}],
    "Resize": [{"Resize": {"size": [200, 61]}}],
    "RandomResize": [{"RandomResize": {"min_size": 60, "max_size": 90, "interpolation": "bicubic"}}],
    "RandomShortestSize": [{"RandomShortestSize": {"min_size": [77, 99]}}],
    "ScaleJitter": [{"ScaleJitter": {"target_size": [120, 160], "scale_range": [0.5, 1.5]}}],
    "Pad": [{"Pad": {"padding": [3, 14], "padding_mode": "symmetric"}}],
    "RandomZoomOut": [{"RandomZoomOut": {"p": 1.0, "fill": 7}}],
    "ClassBalancedCrop": [{"ClassBalancedCrop": {"size": [64, 80], "share": 1.0}}],
}  # fmt: skip
"""Every transform that moves pixels; one test wants that none is missing."""
LISTS = MOVING | {
    "flips and turns": ["RandomHorizontalFlip", "RandomVerticalFlip", "RandomRotate90"],
    "all at once": [
        {"RandomResize": {"min_size": 140, "max_size": 180}}, "RandomHorizontalFlip", {"RandomRotation": {"degrees": 180}},
        {"ElasticTransform": {"alpha": 60.0, "sigma": 5.0}}, {"ClassBalancedCrop": {"size": 96, "share": 0.5}},
        {"RandomAffine": {"degrees": 5, "interpolation": "bicubic"}}, "RandomRotate90",
    ],
    "nearest": [{"RandomRotation": {"degrees": 45, "interpolation": "nearest"}}],
    "colour before": [{"ColorJitter": {"brightness": 0.4, "saturation": 0.3, "hue": 0.2}}, {"RandomRotation": {"degrees": 45}}],
    "colour after": [{"RandomRotation": {"degrees": 45}}, {"ColorJitter": {"brightness": 0.4, "hue": 0.2}}, "RandomInvert"],
    "colour of the whole": [
        {"GaussianBlur": {"kernel_size": 5}}, "RandomHorizontalFlip", "RandomRotate90", {"ColorJitter": {"contrast": 0.5}},
        "RandomAutocontrast", "RandomEqualize", {"RandomAdjustSharpness": {"sharpness_factor": 2}},
    ],
    "an own pointwise one": ["RandomRotate90", "case_transforms:darker"],
}  # fmt: skip


@dataclass
class Cells:
    """Images of 3 channels with smooth and rough parts; the labels are cells, class 4 is one pixel at the border."""

    size: tuple[int, int] = SIZE
    dtype: torch.dtype = torch.uint8
    layers: bool = False
    asked: list[Box] = field(default_factory=list)

    def __len__(self) -> int:
        return 4

    def name_of(self, index: int) -> str:
        return f"cells/{index}"

    def shape(self, index: int) -> tuple[int, ...]:
        return (3, *self.size)

    def whole(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        height, width = self.size
        rows, columns = torch.arange(height)[:, None], torch.arange(width)[None]
        waves = torch.stack([torch.sin(rows / (7 + 3 * k) + columns / 11) for k in range(3)]) * 90 + 128
        image = (waves + torch.randint(0, 30, (3, height, width), generator=generator)).to(self.dtype)
        labels = ((rows // 9 + columns // 13) % (CLASSES - 1)).to(torch.uint8)
        labels[0, 5] = CLASSES - 1
        return image, torch.stack([labels == k for k in range(CLASSES)]).to(torch.uint8) if self.layers else labels

    def read_window(self, index: int, window: Box) -> tuple[Tensor, Tensor]:
        self.asked.append(window)
        image, labels = self.whole(index)
        part = (..., *(slice(run.start, run.stop) for run in window))
        return image[part], labels[part]

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("what reads windows is read by windows")


@dataclass(frozen=True)
class Tile:
    grid: tuple[int, int]
    row: int
    column: int

    def __call__(self, size: tuple[int, ...]) -> Box:
        return parts_of(even_cut(size[0], self.grid[0]))[self.row], parts_of(even_cut(size[1], self.grid[1]))[self.column]


def tiles(grid: tuple[int, int]) -> list[Tile]:
    return [Tile(grid, row, column) for row in range(grid[0]) for column in range(grid[1])]


def reader(images: Any, listed: list[Any], *, window=None, ignore: int | None = IGNORED, **options) -> SampleReader:
    config = DataConfig(name="page", augment=listed, **options)
    return reader_of(
        config, images, num_classes=CLASSES, seed=3, train=True, device=CPU, window=window, ignore=ignore, pixels=True
    )


def batch_of(made: SampleReader, index: int = 1, epoch: int = 0):
    batch = made.__getitems__([Key(epoch, 0, index)])
    assert batch.problem is None, batch.problem
    return batch


# ---------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("name", LISTS)
def test_windows_together_are_the_whole_bit_for_bit(name, grid):
    whole = batch_of(reader(Cells(), LISTS[name]))
    for tile in tiles(grid):
        part = batch_of(reader(Cells(), LISTS[name], window=tile))
        rows, columns = (slice(run.start, run.stop) for run in part.window)
        assert part.whole_shape == whole.image.shape[1:] and part.window == tile(part.whole_shape[1:])
        assert torch.equal(part.image, whole.image[..., rows, columns]) and part.image.dtype == torch.uint8
        assert torch.equal(part.target, whole.target[..., rows, columns]) and part.target.dtype == torch.uint8


def test_every_transform_that_moves_pixels_is_tested():
    assert {name.partition(",")[0] for name in MOVING} == {*MOVES, "ClassBalancedCrop"}


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16, torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", [False, True])
def test_other_dtypes_and_layers_of_labels_move_alike(dtype, layers):
    for name in ("flips and turns", "all at once", "RandomCrop, padded"):
        whole = batch_of(reader(Cells(dtype=dtype, layers=layers), LISTS[name]))
        assert whole.image.dtype == dtype and whole.target.ndim == 3 + layers
        for tile in tiles((2, 2)):
            part = batch_of(reader(Cells(dtype=dtype, layers=layers), LISTS[name], window=tile))
            cut = (..., *(slice(run.start, run.stop) for run in part.window))
            assert torch.equal(part.image, whole.image[cut]) and torch.equal(part.target, whole.target[cut])


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("name", [name for name in MOVING if name != "ClassBalancedCrop"])
def test_a_rank_reads_no_more_than_its_window_the_reach_of_the_map_and_a_block(name, grid):
    """The reach is measured: the least box with the positions of all pixels of the window, found one by one."""
    for tile in tiles(grid):
        images = Cells()
        made = reader(images, MOVING[name], window=tile)
        batch_of(made)
        (asked,) = images.asked
        seeds = {"read": 0, "augment": augment_seed(made)}
        warp = made.moves._warp(0, InMemory(*images.whole(1)), seeds, None)
        shown = tile(warp.map.output)
        at = warp.map.positions(*(np.arange(run.start, run.stop, dtype=np.float64) for run in shown))
        spread = [np.ceil(by) for by in warp.map.shrinking] if warp.samples != (1, 1) else [0, 0]
        for run, positions, extent, more in zip(asked, at, SIZE, spread, strict=True):
            least, most = (np.clip(end, 0, extent - 1) for end in (positions.min() - more, positions.max() + more))
            around = 128 if warp.border in ("reflect", "symmetric") else hull_slack(warp)
            assert run.start >= least - around and run.stop <= most + around + 1 and 0 <= run.start < run.stop <= extent


def hull_slack(warp: Warp) -> int:
    """Two pixels of interpolation; displacements: the largest there could be in place of those that there are."""
    return 3 + int(2 * max((max(e.most_px) for e in warp.map.chain if hasattr(e, "most_px")), default=0))


def augment_seed(made: SampleReader, index: int = 1) -> int:
    from widefield.data.transforms import seed_of

    return seed_of(made.seed, "augment", 0, index)


def test_a_crop_of_a_large_image_reads_its_own_pixels_alone():
    images = Cells(size=(600, 700))
    batch_of(reader(images, [{"RandomCrop": {"size": [64, 48]}}, "RandomHorizontalFlip"]))
    assert [size_of(box) for box in images.asked] == [(64, 48)]


# ---------------------------------------------------------------------------------------------- what torchvision does


SMOOTH = torch.stack([torch.sin(torch.arange(53)[:, None] / 9 + torch.arange(71)[None] / 13), torch.ones(53, 71)]).double()
CELLS = ((torch.arange(53)[:, None] // 7 + torch.arange(71)[None] // 9) % 7).to(torch.uint8)
BILINEAR = InterpolationMode.BILINEAR


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0), v2.RandomRotation(40, BILINEAR),
        v2.RandomRotation(40, BILINEAR, expand=True), v2.RandomRotation(30, BILINEAR, center=[10, 20]),
        v2.RandomAffine(20, (0.1, 0.2), (0.8, 1.3), [5, 10, 3, 8], BILINEAR), v2.RandomPerspective(0.4, 1.0),
        v2.RandomAffine(20, interpolation=BILINEAR, center=[5, 40]),
        v2.RandomCrop((30, 20)), v2.RandomCrop((60, 40), padding=[5, 6, 7, 8]), v2.RandomCrop((60, 90), pad_if_needed=True),
        v2.CenterCrop((31, 80)), v2.CenterCrop((30, 20)), v2.RandomResizedCrop((40, 90), (0.3, 0.6), antialias=False),
        v2.Resize((80, 100)), v2.Resize(90), v2.RandomResize(60, 90), v2.RandomShortestSize([70, 80]),
        v2.ScaleJitter((90, 120), (0.9, 1.2)), v2.Pad(5), v2.Pad([3, 4]), v2.Pad([3, 4, 5, 6]), v2.RandomZoomOut(p=1.0),
    ],
    ids=lambda transform: type(transform).__name__,
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_moves_are_those_that_torchvision_draws_and_makes(transform, seed):
    """Up to the ring of pixels at the image's border, which torchvision blends with what is outside, as we do not."""
    size = SMOOTH.shape[1], SMOOTH.shape[2]
    torch.manual_seed(seed)
    move = drawn(transform, size, 0)
    torch.manual_seed(seed)
    wanted, wanted_labels = transform(tv_tensors.Image(SMOOTH), tv_tensors.Mask(CELLS))
    warp = Warp(composed(size, [move]))
    found, labels = warp.view(SMOOTH, CELLS, full_box(size), full_box(move.size), outside=0)
    assert found.shape == wanted.shape
    if warp.map.placement is not None:
        assert torch.equal(found, wanted) and torch.equal(labels, wanted_labels)
        return
    assert ((found - wanted).abs() > 1e-3).double().mean() < 0.08
    inside = (wanted[1] - 1).abs() < 1e-9  # the second channel is 1 throughout, so there torchvision mixed nothing in
    assert (found - wanted)[0][inside].abs().quantile(0.9) < 1e-3  # a resized crop sees what lies beside it
    if "size" not in vars(transform) and not hasattr(transform, "antialias"):  # its resized labels lie off
        assert (labels != wanted_labels).double().mean() < 2e-3  # its positions are float32


def test_shrinking_averages_all_pixels_that_a_pixel_covers():
    image = torch.rand(3, 40, 60, generator=torch.Generator().manual_seed(0))
    moved = PixelTransforms(
        Transforms([{"Resize": {"size": [20, 30]}}], field="data.read"), Transforms([], field="data.augment"), num_classes=2
    )
    view = moved(InMemory(image, torch.zeros(40, 60, dtype=torch.uint8)), {"read": 0, "augment": 0}, window_of=None)
    torch.testing.assert_close(view.image, torch.nn.functional.avg_pool2d(image, 2))


def test_displacements_are_as_large_and_as_smooth_as_torchvisions():
    torch.manual_seed(0)
    theirs = v2.ElasticTransform(50.0, 5.0).make_params([torch.empty(1, 400, 400)])["displacement"][0, ..., 0] * 200
    elastic = elastic_of(7, alpha=(50.0, 50.0), sigma=(5.0, 5.0))
    ours = torch.from_numpy(elastic.displacement(np.arange(400.0), np.arange(400.0))[1])
    assert float(ours.abs().max()) <= elastic.most_px[1]
    for shift, tolerance in ((0, 0.1), (5, 0.1), (10, 0.15)):  # 400 px hold some 500 independent patches
        both = [(field[shift:] * field[: 400 - shift]).mean() / theirs.var() for field in (ours, theirs)]
        assert float(both[0] - both[1]) == pytest.approx(0, abs=tolerance)


# ---------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("name", [name for name in MOVING if not re.search("bicubic|fill|padding_mode", str(MOVING[name]))])
def test_labels_stay_on_their_pixels(name):
    """Where the image is its own labels and moves by the nearest pixel too, both are the same after every move."""
    labels, nearest = Cells().whole(0)[1], {"RandomRotation": {"degrees": 0, "interpolation": "nearest"}}
    listed = Transforms([nearest, *MOVING[name]], field="data.augment")
    made = PixelTransforms(Transforms([], field="data.read"), listed, num_classes=CLASSES, ignore=0)
    view = made(InMemory(labels[None], labels), {"read": 0, "augment": 5}, window_of=None)
    assert torch.equal(view.image[0], view.labels) and not torch.equal(view.labels, labels)


def test_what_is_outside_does_not_count():
    batch = batch_of(reader(Cells(), [{"Pad": {"padding": [4, 3], "fill": 200}}]))
    assert (batch.target[0, :3] == IGNORED).all() and (batch.image[0, :, :3] == 200).all()
    assert torch.equal(batch.target[0, 3:-3, 4:-4], Cells().whole(1)[1])


def test_a_label_outside_that_8_bits_lack_makes_labels_wider():
    assert batch_of(reader(Cells(), [{"Pad": {"padding": 2}}], ignore=-1)).target[0, 0, 0] == -1


def test_without_a_label_that_does_not_count_nothing_outside_may_be_shown():
    problem = reader(Cells(), [{"Pad": {"padding": 2}}], ignore=None).__getitems__([Key(0, 0, 1)]).problem
    assert problem.startswith("cells/1: 1296 of 26796 pixels are outside of the image, and the task has no label for pixels")
    assert batch_of(reader(Cells(), ["RandomHorizontalFlip"], ignore=None)).target.max() < CLASSES
    layers = batch_of(reader(Cells(layers=True), [{"Pad": {"padding": 2}}], ignore=None))
    assert (layers.target[0, :, 0] == 0).all()


# ---------------------------------------------------------------------------------------------- randomness


def test_each_sample_and_epoch_has_its_own_move_and_the_same_one_every_time():
    listed = [{"RandomRotation": {"degrees": 90}}, {"ElasticTransform": {"alpha": 50.0}}]
    made = [batch_of(reader(Cells(), listed), index, epoch).target for index in (1, 2) for epoch in (0, 1)]
    assert len({one.numpy().tobytes() for one in made}) == 4
    assert torch.equal(batch_of(reader(Cells(), listed), 2, 1).target, made[3])


def test_colours_have_the_numbers_that_they_had_without_moves():
    jitter = [{"ColorJitter": {"brightness": 0.5, "contrast": 0.5}}, "RandomInvert"]
    plain = SampleReader(Whole(), Transforms([], field="data.read"), Transforms(jitter, field="data.augment"), CLASSES, 3)
    assert torch.equal(batch_of(reader(Whole(), jitter)).image, batch_of(plain).image)


class Whole(Cells):
    """The same where only whole images are read."""

    shape = None
    read_window = None

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.whole(index)


def test_a_format_without_windows_is_read_whole_and_cut():
    for name in ("all at once", "colour after"):
        whole = batch_of(reader(Cells(), LISTS[name]))
        part = batch_of(reader(Whole(), LISTS[name], window=Tile((2, 2), 1, 0)))
        cut = (..., *(slice(run.start, run.stop) for run in part.window))
        assert torch.equal(part.image, whole.image[cut]) and torch.equal(part.target, whole.target[cut])


# ---------------------------------------------------------------------------------------------- crops by class


def test_a_class_balanced_crop_holds_a_pixel_of_a_drawn_class():
    """Class 4 is one pixel of 25,500 at the border, and it is in a quarter of the crops and more."""
    made = reader(Cells(), [{"ClassBalancedCrop": {"size": 20, "share": 1.0}}])
    found = [batch_of(made, epoch=epoch).target for epoch in range(200)]
    assert all(one.shape[1:] == (20, 20) for one in found)
    share = sum(bool((one == 4).any()) for one in found) / 200
    assert 0.15 < share < 0.36  # 1/4 of the draws; the standard deviation of 200 is 0.03
    assert len(made.moves._balanced._known) == 1


def test_a_share_of_the_crops_is_anywhere():
    made = reader(Cells(), [{"ClassBalancedCrop": {"size": 20, "share": 0.3, "classes": [4]}}])
    share = sum(bool((batch_of(made, epoch=epoch).target == 4).any()) for epoch in range(200)) / 200
    assert 0.2 < share < 0.42  # 0.3 of the crops hold the one pixel by intent, hardly any by chance


def test_pixels_at_the_border_are_drawn_as_often_as_others():
    labels = torch.zeros(300, 270, dtype=torch.uint8)
    labels[0, 0] = labels[150, 130] = labels[299, 269] = 1
    known = class_pixels_of(
        (300, 270), lambda box: labels[box[0].start : box[0].stop, box[1].start : box[1].stop], num_classes=2
    )
    read = InMemory(labels[None], labels).labels
    drawn_at = [known.draw(None, read, np.random.default_rng(seed)) for seed in range(300)]
    assert all(drawn_at.count(place) > 70 for place in ((0, 0), (150, 130), (299, 269)))  # 100 each, deviation 8
    assert known.draw([7], read, np.random.default_rng(0)) is None


def test_a_crop_larger_than_the_image_pads_it():
    batch = batch_of(reader(Cells(size=(30, 100)), [{"ClassBalancedCrop": {"size": [64, 64]}}]))
    assert batch.image.shape == (1, 3, 64, 64) and (batch.target == IGNORED).sum() == 34 * 64


@pytest.mark.parametrize(("arguments", "told"), [({"size": 0}, "size=0: a whole number"), ({"size": 8, "share": 3}, "share=3")])
def test_a_class_balanced_crop_that_cannot_be_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        reader(Cells(), [{"ClassBalancedCrop": arguments}])


# ---------------------------------------------------------------------------------------------- points and boxes


@pytest.mark.parametrize("name", [name for name in MOVING if name not in ("ClassBalancedCrop", "RandomPerspective")])
def test_points_go_where_their_pixels_go(name):
    made = reader(Cells(), MOVING[name])
    warp = made.moves._warp(0, InMemory(*Cells().whole(1)), {"read": 0, "augment": augment_seed(made)}, None)
    wanted = np.array([[10.0, 20.0], [7.25, 31.5]])
    source = np.array([[float(one.ravel()[0]) for one in warp.map.positions(at[:1], at[1:])] for at in wanted])
    np.testing.assert_allclose(moved_points(warp.map, source), wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["flips and turns", "RandomPerspective", "RandomAffine", "Pad"])
def test_a_map_undone_leads_back(name):
    made = reader(Cells(), LISTS[name])
    map = made.moves._warp(0, InMemory(*Cells().whole(1)), {"read": 0, "augment": augment_seed(made)}, None).map
    back, at = undone(map), (np.array([40.0]), np.array([30.0]))
    assert (back.source, back.output) == (map.output, map.source)
    there = [one.ravel() for one in map.positions(*at)]
    np.testing.assert_allclose([one.ravel() for one in back.positions(*there)], at, atol=1e-9)


def test_displacements_cannot_be_undone():
    with pytest.raises(NotImplementedError, match="leave ElasticTransform out"):
        undone(composed(SIZE, [drawn(v2.ElasticTransform(), SIZE, 0)]))


def test_boxes_are_flipped_in_edges_and_cut_to_the_image():
    flip = drawn(v2.RandomHorizontalFlip(1.0), (40, 60), 0)
    boxes, left = moved_boxes(composed((40, 60), [flip]), np.array([[1, 2, 11, 8]]))
    assert boxes.tolist() == [[49, 2, 59, 8]] and left.tolist() == [0]
    crop = composed((40, 60), [flip, drawn(v2.CenterCrop((40, 20)), (40, 60), 0)])
    boxes, left = moved_boxes(crop, np.array([[1, 2, 11, 8], [15, 0, 25, 10]]), keep=0.4)
    assert boxes.tolist() == [[15, 0, 20, 10]] and left.tolist() == [1]


# ---------------------------------------------------------------------------------------------- own transforms


def test_an_own_transform_gets_image_and_labels_and_may_change_both():
    batch = batch_of(reader(Cells(), ["case_transforms:upper_half", "RandomVerticalFlip"]))
    assert batch.image.shape[2:] == (75, 170) == batch.target.shape[1:]
    image, labels = Cells().whole(1)
    assert torch.equal(batch.target[0].flip(0), labels[:75]) or torch.equal(batch.target[0], labels[:75])
    assert torch.equal(batch.image[0].flip(1), image[:, :75]) or torch.equal(batch.image[0], image[:, :75])


def test_a_prediction_sees_what_the_evaluation_sees():
    for name in ("flips and turns", "Resize", "an own pointwise one"):
        made = PixelTransforms(
            Transforms(LISTS[name], field="data.read_evaluate"), Transforms([], field="data.augment"), num_classes=2, ignore=0
        )
        image, labels = Cells().whole(0)
        wanted = made(InMemory(image, labels), {"read": 0, "augment": 0}, window_of=None).image
        assert torch.equal(OfImagesAlone(made)(image, 0).image, wanted)
    nothing = PixelTransforms(*2 * [Transforms([], field="data.read")], num_classes=2)
    assert torch.equal(OfImagesAlone(nothing)(image, 0).image, image)


def test_arguments_reach_own_functions_and_classes():
    one = batch_of(reader(Cells(), [{"case_transforms:darker": {"by": 3}}]))
    other = batch_of(reader(Cells(), [{"case_transforms:Darker": {"by": 3}}]))
    assert torch.equal(one.image[0], Cells().whole(1)[0] // 3) and torch.equal(one.image, other.image)
    images = Transforms([{"case_transforms:shade": {"by": 3}}], field="data.read")(Cells().whole(1)[0], 0)
    assert torch.equal(images, one.image[0])


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("case_transforms:none", "gives a NoneType; a pair of tensors is wanted"),
        ("case_transforms:floats", "of torch.float32, and of labels"),
        ("case_transforms:image_alone", "give labels the image's size"),
    ],
)
def test_what_an_own_transform_may_not_give_is_said(entry, told):
    problem = reader(Cells(), [entry]).__getitems__([Key(0, 0, 1)]).problem
    assert problem.startswith("cells/1: data.augment: case_transforms:") and told in problem


# ---------------------------------------------------------------------------------------------- images with one label


class Named(Cells):
    """A class number for each image."""

    shape = None
    read_window = None

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.whole(index)[0], index


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float32], ids=str)
def test_images_of_other_dtypes_with_one_label_are_moved_too(dtype):
    """Torchvision's own transforms, which images of uint8 have, do not know uint16."""
    listed = ["RandomRotate90", {"RandomRotation": {"degrees": 30}}, "case_transforms:left_half"]
    config = DataConfig(name="named", augment=listed)
    options = {"num_classes": CLASSES, "seed": 3, "train": True, "device": CPU, "moves_as_one": True}
    one = batch_of(reader_of(config, Named(dtype=dtype), **options))
    assert one.image.dtype == dtype and one.target.tolist() == [1] and one.image.shape[3] in (75, 85)
    config = config.model_copy(update={"augment": listed[:2]})
    part = batch_of(reader_of(config, Named(dtype=dtype), window=Tile((2, 2), 1, 1), **options))
    other = batch_of(reader(Cells(dtype=dtype), listed[:2], window=Tile((2, 2), 1, 1)))
    assert torch.equal(part.image, other.image) and part.target.tolist() == [1]
    moves = DataConfig(name="named", augment=["RandomHorizontalFlip"])
    assert check_transforms(moves, dataset(dtype, "class"), ignore=None, cut=False) == []


# ---------------------------------------------------------------------------------------------- refusals


def dataset(dtype: torch.dtype = torch.uint8, labels: str = "pixels") -> Dataset:
    names = [str(number) for number in range(CLASSES)]
    return Dataset(Cells(), Cells(), names, 3, [0.5] * 3, [0.2] * 3, True, labels=labels, dtype=dtype)


def told(listed: list[Any], error: type[Exception] = ValueError, *, cut: bool = False, **options) -> str:
    with pytest.raises(error) as caught:
        check_transforms(DataConfig(name="cells", augment=listed), dataset(**options), ignore=IGNORED, cut=cut)
    return str(caught.value)


def test_what_does_not_fit_the_data_is_refused_before_anything_is_read():
    assert "with mesh.space each rank reads a window" in told(["case_transforms:upper_half"], NotImplementedError, cut=True)
    assert "has RandomEqualize, which changes uint8 images, and those of data.name=cells are uint16" in told(
        ["RandomEqualize"], dtype=torch.uint16
    )
    assert "use RandomCrop" in told([{"ClassBalancedCrop": {"size": 4}}], labels="class")
    assert "labels of pixels cannot follow" in told(["RandomErasing"], NotImplementedError)
    assert "more than one fill: (3.0,), (4.0,)" in told(
        [{"Pad": {"padding": 1, "fill": 3}}, {"Pad": {"padding": 1, "fill": 4}}]
    )
    assert "the interpolation 'lanczos'" in told([{"Resize": {"size": 4, "interpolation": "lanczos"}}])


def test_what_is_read_whole_on_ranks_that_share_images_is_named():
    config = DataConfig(name="cells", augment=[{"GaussianBlur": {"kernel_size": 3}}, "RandomInvert"])
    (reason,) = check_transforms(config, dataset(), ignore=IGNORED, cut=True)
    assert reason.startswith("GaussianBlur: every rank reads images whole")
    assert check_transforms(config, dataset(), ignore=IGNORED, cut=False) == []
    assert (
        check_transforms(DataConfig(name="cells", augment=LISTS["all at once"]), dataset(torch.int16), ignore=0, cut=True) == []
    )


def test_a_class_balanced_crop_without_labels_is_refused():
    with pytest.raises(NotImplementedError, match="needs the labels of the image's pixels"):
        Transforms([{"ClassBalancedCrop": {"size": 4}}], field="data.read_evaluate")(Cells().whole(0)[0], 0)


def test_a_crop_that_does_not_fit_names_the_image_and_the_transform():
    problem = reader(Cells(), [{"RandomCrop": {"size": 999}}]).__getitems__([Key(0, 0, 1)]).problem
    assert problem.startswith("cells/1: data.augment: RandomCrop on 150 x 170 px: Required crop size (999, 999) is larger")


def test_images_that_a_batch_cannot_stack_say_what_to_add():
    made = reader(Cells(), [{"ScaleJitter": {"target_size": [90, 90]}}])
    problem = made.__getitems__([Key(0, position, position) for position in range(4)]).problem
    assert "differ in size" in problem and "RandomCrop: {size: [H, W], pad_if_needed: true}" in problem
