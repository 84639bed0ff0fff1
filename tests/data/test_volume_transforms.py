"""Do a volume and its labels move as one, whatever windows are read, and is all that is not made for volumes refused?"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from widefield.config import DataConfig
from widefield.data import Dataset
from widefield.data.device import Preparation
from widefield.data.loader import SampleReader, reader_of
from widefield.data.order import Key
from widefield.data.pixel_transforms import OfImagesAlone, PixelTransforms
from widefield.data.sources import InMemory
from widefield.data.spatial.axis_warp import AxisMap, AxisWarp
from widefield.data.spatial.class_pixels import class_pixels_of
from widefield.data.spatial.volume_moves import VOLUME_MOVES, VolumeCrop
from widefield.data.transform_checks import check_transforms
from widefield.data.transforms import COLOURS_OF_VOLUMES, Transforms, names
from widefield.geometry import even_cut, parts_of
from widefield.geometry.box import Box, full_box, size_of, slices

SIZE, CLASSES, IGNORED = (13, 22, 19), 4, 255
CPU = torch.device("cpu")
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 2, 2)]
FLIPS = ["RandomDepthFlip", "RandomVerticalFlip", "RandomHorizontalFlip"]
CERTAIN = [{name: {"p": 1.0}} for name in FLIPS]

MOVING: dict[str, list[Any]] = {
    **{name: [flip] for name, flip in zip(FLIPS, CERTAIN, strict=True)},
    "RandomCrop": [{"RandomCrop": {"size": [5, 9, 12]}}],
    "RandomCrop, a cube": [{"RandomCrop": {"size": 11}}],
    "RandomCrop, padded": [{"RandomCrop": {"size": [20, 9, 30], "pad_if_needed": True, "padding_mode": "reflect"}}],
    "CenterCrop": [{"CenterCrop": {"size": [6, 30, 7]}}],
    "ClassBalancedCrop": [{"ClassBalancedCrop": {"size": [5, 8, 9], "share": 1.0}}],
}
LISTS = MOVING | {
    "all": [*FLIPS, {"RandomCrop": {"size": [9, 15, 17], "fill": 7}}, *FLIPS, {"CenterCrop": {"size": [8, 20, 11]}}],
    "colour": ["RandomInvert", *FLIPS, {"ColorJitter": {"brightness": 0.5}}, {"RandomPosterize": {"bits": 3}}],
    "noise": ["GaussianNoise", *FLIPS],
    "an own pointwise one": [*FLIPS, "case_transforms:darker"],
}


@dataclass
class Cells:
    """Volumes of 3 channels; class 3 is one voxel at the border."""

    size: tuple[int, ...] = SIZE
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
        image = torch.randint(0, 100, (3, *self.size), generator=generator).to(self.dtype)
        labels = torch.randint(0, CLASSES - 1, self.size, generator=generator, dtype=torch.uint8)
        labels[0, 5, 6] = CLASSES - 1
        return image, torch.stack([labels == k for k in range(CLASSES)]).to(torch.uint8) if self.layers else labels

    def read_window(self, index: int, window: Box) -> tuple[Tensor, Tensor]:
        self.asked.append(window)
        image, labels = self.whole(index)
        return image[(..., *slices(window))], labels[(..., *slices(window))]

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("what reads windows is read by windows")


@dataclass
class Readable(Cells):
    """The same where the whole may be read too."""

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        return self.whole(index)


@dataclass(frozen=True)
class Tile:
    grid: tuple[int, ...]
    place: tuple[int, ...]

    def __call__(self, size: tuple[int, ...]) -> Box:
        cuts = [parts_of(even_cut(extent, parts)) for extent, parts in zip(size, self.grid, strict=True)]
        return tuple(cut[at] for cut, at in zip(cuts, self.place, strict=True))


def tiles(grid: tuple[int, ...]) -> list[Tile]:
    return [Tile(grid, tuple(map(int, place))) for place in np.ndindex(*grid)]


def reader(images: Any, listed: list[Any], *, window=None, ignore: int | None = IGNORED, pixels: bool = True) -> SampleReader:
    config = DataConfig(name="volume", augment=listed)
    about = {"num_classes": CLASSES, "seed": 3, "train": True, "device": CPU, "window": window, "ignore": ignore}
    return reader_of(config, images, pixels=pixels, moves_as_one=True, dims=3, **about)


def batch_of(made: SampleReader, index: int = 1, epoch: int = 0):
    batch = made.__getitems__([Key(epoch, 0, index)])
    assert batch.problem is None, batch.problem
    return batch


# ---------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_windows_together_are_the_whole_bit_for_bit(name, grid):
    whole = batch_of(reader(Cells(), LISTS[name]))
    for tile in tiles(grid):
        part = batch_of(reader(Cells(), LISTS[name], window=tile))
        assert part.whole_shape == whole.image.shape[1:] and part.window == tile(part.whole_shape[1:])
        assert torch.equal(part.image, whole.image[(..., *slices(part.window))]) and part.image.dtype == torch.uint8
        assert torch.equal(part.target, whole.target[(..., *slices(part.window))]) and part.target.dtype == torch.uint8


def test_every_transform_that_moves_voxels_is_tested():
    assert {name.partition(",")[0] for name in MOVING} == {*VOLUME_MOVES, "ClassBalancedCrop"}


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layers", [False, True])
def test_other_dtypes_and_layers_of_labels_move_alike(dtype, layers):
    for name in ("all", "RandomCrop, padded", "ClassBalancedCrop"):
        whole = batch_of(reader(Cells(dtype=dtype, layers=layers), LISTS[name]))
        assert whole.image.dtype == dtype and whole.target.ndim == 4 + layers
        for tile in tiles((2, 2, 1)):
            part = batch_of(reader(Cells(dtype=dtype, layers=layers), LISTS[name], window=tile))
            cut = (..., *slices(part.window))
            assert torch.equal(part.image, whole.image[cut]) and torch.equal(part.target, whole.target[cut])


@pytest.mark.parametrize("name", [name for name in MOVING if name != "ClassBalancedCrop" and "padded" not in name])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_rank_reads_the_voxels_of_its_window_alone(name, grid):
    for tile in tiles(grid):
        images = Cells()
        part = batch_of(reader(images, MOVING[name], window=tile))
        (asked,) = images.asked
        inside = [min(len(run), extent) for run, extent in zip(part.window, SIZE, strict=True)]
        assert all(len(run) <= most for run, most in zip(asked, inside, strict=True))


# ---------------------------------------------------------------------------------------------- what moves do


@pytest.mark.parametrize("dim", range(3))
def test_a_flip_turns_its_own_axis_with_its_probability(dim):
    image, labels = Cells().whole(1)
    batch = batch_of(reader(Cells(), [CERTAIN[dim]]))
    assert torch.equal(batch.image[0], image.flip(dim + 1)) and torch.equal(batch.target[0], labels.flip(dim))
    made = reader(Cells(), [FLIPS[dim]])
    turned = sum(not torch.equal(batch_of(made, epoch=epoch).image[0], image) for epoch in range(200))
    assert 70 < turned < 130  # half; the standard deviation of 200 draws is 7
    assert torch.equal(batch_of(reader(Cells(), [{FLIPS[dim]: {"p": 0.0}}])).image[0], image)


def test_a_random_crop_is_anywhere_and_of_its_size():
    image, labels = Cells().whole(1)
    made, seen = reader(Cells(), MOVING["RandomCrop"]), set()
    for epoch in range(60):
        batch = batch_of(made, epoch=epoch)
        places = [
            at for at in np.ndindex(9, 14, 8)
            if torch.equal(image[:, at[0] : at[0] + 5, at[1] : at[1] + 9, at[2] : at[2] + 12], batch.image[0])
        ]  # fmt: skip
        (at,) = places
        assert torch.equal(batch.target[0], labels[at[0] : at[0] + 5, at[1] : at[1] + 9, at[2] : at[2] + 12])
        seen.add(at)
    assert len(seen) > 50 and all({0, most} <= {at[dim] for at in seen} for dim, most in ((0, 8), (2, 7)))


def test_a_center_crop_is_torchvisions_plane_by_plane():
    """Its rows and columns; planes as if they were rows."""
    image, labels = Cells().whole(1)
    wanted = v2.CenterCrop((30, 7))(image)
    wanted = v2.CenterCrop((6, 7))(wanted.transpose(1, 2)).transpose(1, 2)
    batch = batch_of(reader(Cells(), MOVING["CenterCrop"]))
    assert torch.equal(batch.image[0], wanted)
    assert torch.equal(batch.target[0] == IGNORED, v2.CenterCrop((30, 7))(torch.ones(6, *SIZE[1:], dtype=torch.uint8)) == 0)


def test_what_a_crop_pads_shows_the_fill_and_does_not_count():
    listed = [{"RandomCrop": {"size": [20, 22, 19], "pad_if_needed": True, "fill": 9}}]
    made, starts = reader(Cells(), listed), set()
    image, labels = Cells().whole(1)
    for epoch in range(40):
        batch = batch_of(made, epoch=epoch)
        outside = (batch.target[0] == IGNORED).all(2).all(1)
        start = int((~outside).int().argmax())
        assert torch.equal(batch.image[0][:, start : start + 13], image) and (batch.image[0][:, outside] == 9).all()
        assert torch.equal(batch.target[0][start : start + 13], labels) and int(outside.sum()) == 7
        starts.add(start)
    assert {0, 7} <= starts, "a smaller volume lies anywhere"


def test_labels_without_one_that_does_not_count_are_not_padded():
    problem = reader(Cells(), MOVING["CenterCrop"], ignore=None).__getitems__([Key(0, 0, 1)]).problem
    assert re.match(r"cells/1: 336 of 1260 pixels are outside of the image, and the task has no label for pixels", problem)


def test_a_class_balanced_crop_holds_a_voxel_of_a_drawn_class():
    """Class 3 is one voxel of 5,434 at the border, and it is in a third of the crops and more."""
    made = reader(Cells(), MOVING["ClassBalancedCrop"])
    found = [batch_of(made, epoch=epoch).target for epoch in range(200)]
    assert all(one.shape[1:] == (5, 8, 9) for one in found)
    share = sum(bool((one == 3).any()) for one in found) / 200
    assert 0.25 < share < 0.45  # 1/3 of the draws, and some by chance; the standard deviation of 200 is 0.03


@pytest.mark.parametrize("layers", [False, True])
def test_voxels_of_a_class_are_each_as_likely(layers):
    """130 x 70 x 66 voxels are 12 blocks; the draws of a class of three voxels, far apart."""
    marks, places = torch.zeros(130, 70, 66, dtype=torch.uint8), [(0, 0, 0), (129, 69, 65), (64, 20, 64)]
    for place in places:
        marks[place] = 1
    marks = torch.stack([marks == 0, marks == 1]).to(torch.uint8) if layers else marks
    labels = InMemory(torch.zeros(1, 130, 70, 66), marks).labels
    pixels = class_pixels_of((130, 70, 66), labels, num_classes=2)
    generator = np.random.default_rng(0)
    drawn = [pixels.draw([1], labels, generator) for _ in range(300)]
    assert set(drawn) == set(places) and min(map(drawn.count, places)) > 70
    assert pixels.draw([2], labels, generator) is None


signs, starts = st.sampled_from([-1, 1]), st.integers(-9, 9)
maps = st.builds(
    lambda sign, start: AxisMap((7, 5, 6), (6, 4, 9), sign, start),
    st.tuples(signs, signs, signs),
    st.tuples(starts, starts, starts),
)


@settings(max_examples=60)
@given(map=maps, voxel=st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 8)))
def test_a_map_undone_leads_back_and_maps_compose(map, voxel):
    assert map.undone().at(map.at(voxel)) == voxel and map.then(AxisMap.identity(map.output)) == map
    twice = map.then(AxisMap(map.output, (3, 3, 3), (-1, 1, -1), (2, -1, 4)))
    assert twice.at(voxel) == map.at((2 - voxel[0], voxel[1] - 1, 4 - voxel[2])) and twice.output == (3, 3, 3)


@settings(max_examples=60)
@given(map=maps, border=st.sampled_from(["constant", "edge", "reflect", "symmetric"]))
def test_what_lies_outside_is_what_numpy_pads(map, border):
    """Voxel by voxel, from a volume that NumPy padded on all sides."""
    image = torch.arange(7 * 5 * 6).view(1, 7, 5, 6)
    warp = AxisWarp(map, border=border, fill=(5.0,))
    window = full_box(map.output)
    box = warp.source_box(window)
    found, _ = warp.view(image[(..., *slices(box))], None, box, window, outside=None)
    options = {"constant_values": 5} if border == "constant" else {}
    padded = np.pad(image[0].numpy(), 30, mode=border, **options)
    for voxel in np.ndindex(*map.output):
        assert found[(0, *voxel)] == padded[tuple(at + 30 for at in map.at(voxel))]


# ---------------------------------------------------------------------------------------------- colours


@pytest.mark.parametrize("name", [*COLOURS_OF_VOLUMES, "ColorJitter"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32], ids=str)
def test_colours_of_a_volume_are_those_of_its_planes(name, dtype):
    """Each plane by itself gets what the whole gets, with the same draws; noise, which is drawn for all, only its size."""
    options = {
        "ColorJitter": {"brightness": [1.5, 1.5], "saturation": [0.5, 0.5]}, "RandomPosterize": {"bits": 3, "p": 1.0},
        "RandomSolarize": {"threshold": 0.3, "p": 1.0}, "RandomInvert": {"p": 1.0}, "RandomGrayscale": {"p": 1.0},
    }  # fmt: skip
    step = Transforms([{name: options.get(name, {})}], field="data.augment")
    volume = torch.rand(3, 4, 6, 5, generator=torch.Generator().manual_seed(0))
    volume = volume if dtype == torch.float32 else (volume * 200).to(dtype)
    found = step(volume, 7)
    assert found.dtype == dtype and found.shape[1:] == volume.shape[1:]
    if name == "GaussianNoise":
        assert 0 < (found.double() - volume).abs().mean() and not torch.equal(found[:, 0], found[:, 1])
        return
    for plane in range(4):
        assert torch.equal(found[:, plane], step(volume[:, plane], 7))


def test_colours_run_on_the_device_image_by_image_too():
    listed = ["RandomInvert", {"ColorJitter": {"brightness": 0.5}}]
    batch = batch_of(reader(Readable(), []))
    prepare = Preparation(CPU, torch.float64, [0.5], [0.25], CLASSES, False, Transforms(listed, field="data.augment"), dims=3)
    image, _ = prepare(batch)
    wanted = Transforms(listed, field="data.augment")(batch.image[0], batch.seeds[0])
    torch.testing.assert_close(image[0], (wanted.double() / 255 - 0.5) / 0.25, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixing", [{"mixup": 0.4}, {"cutmix": 1.0}])
@pytest.mark.parametrize("tile", tiles((2, 1, 2)), ids=str)
def test_a_mixed_window_is_that_part_of_the_mixed_volume(mixing, tile):
    def prepared(window):
        config = DataConfig(name="volume", **mixing)
        about = {"num_classes": CLASSES, "seed": 3, "train": True, "device": CPU, "window": window, "moves_as_one": True}
        batch = reader_of(config, Named(), dims=3, **about).__getitems__([Key(0, at, at % 4) for at in range(8)])
        assert batch.problem is None, batch.problem
        none = Transforms([], field="data.augment")
        return Preparation(CPU, torch.float64, [0.0], [1.0], CLASSES, False, none, dims=3)(batch)

    (image, shares), (part, part_shares) = prepared(None), prepared(tile)
    assert torch.equal(part, image[(..., *slices(tile(SIZE)))]) and torch.equal(part_shares, shares)
    plain = torch.stack([Cells().whole(at % 4)[0] for at in range(8)]).double() / 255
    changed = (image != plain).flatten(1).double().mean(1)
    assert changed.max() > 0.1 and ((shares.sum(1) - 1).abs() < 1e-12).all()
    if "cutmix" in mixing:  # the share of the pasted box, of all voxels, is what the label of the other image gets
        other = plain[[1, 0, 3, 2, 5, 4, 7, 6]]
        pasted = (image == other).all(1) & (image != plain).any(1)
        assert (pasted.flatten(1).double().mean(1) <= 1 - shares[range(8), [at % 4 for at in range(8)]] + 1e-12).all()


class Named(Cells):
    """A class number for each volume."""

    shape = None
    read_window = None

    def read(self, index: int) -> tuple[Tensor, int]:
        return self.whole(index)[0], index


def test_volumes_with_one_label_are_moved_too():
    batch = batch_of(reader(Named(), LISTS["all"], pixels=False))
    wanted = batch_of(reader(Cells(), LISTS["all"]))
    assert torch.equal(batch.image, wanted.image) and batch.target.tolist() == [1]
    part = batch_of(reader(Named(), LISTS["all"], pixels=False, window=Tile((2, 1, 2), (1, 0, 1))))
    assert torch.equal(part.image, wanted.image[(..., *slices(part.window))]) and part.target.tolist() == [1]


# ---------------------------------------------------------------------------------------------- own transforms


def test_an_own_transform_gets_a_volume_and_its_labels_and_may_change_both():
    batch = batch_of(reader(Cells(), ["case_transforms:first_planes", CERTAIN[0]]))
    image, labels = Cells().whole(1)
    assert torch.equal(batch.image[0], image[:, :6].flip(1)) and torch.equal(batch.target[0], labels[:6].flip(0))


def test_a_prediction_sees_what_the_evaluation_sees():
    listed = Transforms(LISTS["all"], field="data.read_evaluate")
    made = PixelTransforms(listed, Transforms([], field="data.augment"), num_classes=2, ignore=0, dims=3)
    image, labels = Cells().whole(0)
    wanted = made(InMemory(image, labels), {"read": 0, "augment": 0}, window_of=None).image
    assert torch.equal(OfImagesAlone(made)(image, 0).image, wanted)


# ---------------------------------------------------------------------------------------------- refusals


def dataset(dims: int = 3, dtype: torch.dtype = torch.uint8) -> Dataset:
    classes = [str(number) for number in range(CLASSES)]
    return Dataset(Cells(), Cells(), classes, 3, [0.5] * 3, [0.2] * 3, True, labels="pixels", dtype=dtype, dims=dims)


def told(entry: Any, error: type[Exception], **options) -> str:
    with pytest.raises(error) as caught:
        check_transforms(DataConfig(name="cells", augment=[entry]), dataset(**options), ignore=IGNORED, cut=False)
    return str(caught.value)


NEEDED: dict[str, dict[str, Any]] = {
    "ElasticTransform": {}, "FiveCrop": {"size": 4}, "GaussianBlur": {"kernel_size": 3}, "LinearTransformation": {},
    "Normalize": {"mean": [0.5], "std": [0.5]}, "Pad": {"padding": 1}, "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 5}, "RandomResize": {"min_size": 4, "max_size": 8}, "RandomResizedCrop": {"size": 4},
    "RandomRotation": {"degrees": 5}, "RandomShortestSize": {"min_size": 4}, "Resize": {"size": 4},
    "ScaleJitter": {"target_size": [4, 4]}, "TenCrop": {"size": 4}, "ToDtype": {}, "ColorJitter": {"contrast": 0.5},
    "UniformTemporalSubsample": {"num_samples": 2}, "RandomIoUCrop": {},
    "CutMix": {"num_classes": 2}, "MixUp": {"num_classes": 2},
}  # fmt: skip
SUPPORTED = {*VOLUME_MOVES, *COLOURS_OF_VOLUMES, "ClassBalancedCrop"}


def constructible() -> list[str]:
    found = []
    for name in names():
        if name not in (*SUPPORTED, "ToTensor"):  # which warns that it is deprecated
            with contextlib.suppress(ValueError):  # it needs objects that a recipe cannot give
                Transforms([{name: NEEDED.get(name, {})}], field="data.augment")
                found.append(name)
    return found


def test_most_transforms_are_among_those_refused():
    assert len(constructible()) > 35 and {"RandomRotation", "ElasticTransform", "RandomRotate90"} <= set(constructible())


@pytest.mark.parametrize("name", constructible())
def test_every_other_transform_is_refused_for_volumes_in_words(name):
    said = told({name: NEEDED.get(name, {})}, NotImplementedError)
    assert said.startswith(f"data.augment has {name}, which ") and "and here are volumes (C, D, H, W); leave it out" in said
    assert "Volumes are moved by RandomDepthFlip, RandomVerticalFlip, RandomHorizontalFlip, RandomCrop, CenterCrop" in said


@pytest.mark.parametrize("name", constructible())
def test_so_it_is_for_other_dtypes(name):
    assert "and here are volumes" in told({name: NEEDED.get(name, {})}, NotImplementedError, dtype=torch.int16)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"RandomCrop": {"size": [8, 8]}}, "RandomCrop on volumes does not take {'size': [8, 8]}: size=[8, 8]: a whole"),
        ({"RandomCrop": {"size": 8, "padding": 2}}, "RandomCrop on volumes does not take {'size': 8, 'padding': 2}: "),
        ({"CenterCrop": {"size": [8, 8]}}, "data.augment: CenterCrop on volumes does not take {'size': [8, 8]}: "),
        ({"ClassBalancedCrop": {"size": [8, 8]}}, "size=[8, 8] has 2 numbers and pixels have 3 dims; give one number per dim"),
    ],
)  # fmt: skip
def test_sizes_and_arguments_that_are_for_images_are_refused(entry, said):
    assert said in told(entry, ValueError)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"RandomCrop": {"size": [8, 8, 0]}}, "RandomCrop does not take {'size': [8, 8, 0]}: size=[8, 8, 0]: a whole"),
        ({"RandomCrop": {"size": [8, 8, 8], "padding_mode": "odd"}}, "padding_mode='odd': one of constant, edge, reflect"),
        ({"RandomDepthFlip": {"p": 2}}, "data.augment[0]: RandomDepthFlip does not take {'p': 2}: p=2: a number from 0 to 1"),
        ({"ClassBalancedCrop": {"size": [8, 8, 8, 8]}}, "a whole number above 0 is wanted, or a height and a width"),
    ],
)  # fmt: skip
def test_what_no_volume_has_is_refused_with_its_place_in_the_recipe(entry, said):
    with pytest.raises(ValueError) as caught:
        Transforms([entry], field="data.augment")
    assert said in str(caught.value)


@pytest.mark.parametrize("entry", ["RandomDepthFlip", {"RandomCrop": {"size": [4, 4, 4]}}, {"CenterCrop": {"size": [4, 4, 4]}}])
def test_transforms_of_volumes_are_refused_for_images(entry):
    said = told(entry, ValueError, dims=2)
    assert "which is for volumes (C, D, H, W), and data.name=cells has images (C, H, W)" in said
    with pytest.raises(NotImplementedError, match=r"for volumes \(C, D, H, W\), and here is an image"):
        Transforms([entry], field="data.augment")(torch.zeros(1, 9, 9), 0)


def test_a_class_balanced_crop_of_three_sizes_is_refused_for_images():
    entry = {"ClassBalancedCrop": {"size": [4, 4, 4]}}
    assert "has 3 numbers and pixels have 2 dims" in told(entry, ValueError, dims=2)


def test_a_crop_that_does_not_fit_names_the_volume_and_the_transform():
    problem = reader(Cells(), [{"RandomCrop": {"size": [14, 4, 4]}}]).__getitems__([Key(0, 0, 1)]).problem
    assert problem == (
        "cells/1: data.augment: RandomCrop on 13 x 22 x 19 px: the crop's depth 14 is larger than 13; give a smaller one, or "
        "pad_if_needed: true"
    )


@dataclass
class Uneven(Readable):
    def shape(self, index: int) -> tuple[int, ...]:
        return (3, 13 + index, 22, 19)

    def whole(self, index: int) -> tuple[Tensor, Tensor]:
        return Cells((13 + index, 22, 19)).whole(index)


def test_volumes_that_a_batch_cannot_stack_say_what_to_add():
    problem = reader(Uneven(), []).__getitems__([Key(0, position, position) for position in range(2)]).problem
    assert "differ in size (C, D, H, W): cells/0 is (3, 13, 22, 19) and cells/1 is (3, 14, 22, 19)" in problem
    assert "RandomCrop: {size: [D, H, W], pad_if_needed: true} to data.read and CenterCrop: {size: [D, H, W]}" in problem


def test_sizes_of_boxes_and_crops_agree():
    assert size_of(full_box(VolumeCrop(4).sides)) == (4, 4, 4)
