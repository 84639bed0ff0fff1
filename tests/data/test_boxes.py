"""Do boxes follow their image through every transform, whatever window of it is read, and are bad ones refused in words?"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from widefield.comm.mesh import Mesh, World
from widefield.config import DataConfig, parse_config
from widefield.data import WindowedImages, open_dataset
from widefield.data.batch import Batch
from widefield.data.loader import reader_of
from widefield.data.map_style import dataset_of
from widefield.data.order import Key
from widefield.detection.targets import NOTHING, WHOLE, boxes_in, rows_of, sizes_in, stacked
from widefield.geometry import Interval
from widefield.plans import Plan
from widefield.training.assemble import assemble

CPU = torch.device("cpu")
SIZE = (60, 80)


class Rectangles:
    """Images of one bright rectangle of class 1, and a faint one of class 0; the third has none."""

    rectangles = ([(10, 20, 34, 41, 1), (50, 5, 71, 12, 0)], [(0, 0, 80, 60, 1)], [])

    def __init__(self) -> None:
        self.read_px = 0

    def __len__(self) -> int:
        return 3

    def name_of(self, index: int) -> str:
        return f"scan{index}.png"

    def shape(self, index: int) -> tuple[int, ...]:
        return (1, *SIZE)

    def read(self, index: int):
        return self.read_window(index, tuple(Interval(0, extent) for extent in SIZE))

    def read_window(self, index: int, window):
        image = torch.zeros(1, *SIZE, dtype=torch.uint8)
        for x1, y1, x2, y2, label in self.rectangles[index]:
            image[:, y1:y2, x1:x2] = 200 if label else 90
        rows, columns = window
        self.read_px += len(rows) * len(columns)
        found = self.rectangles[index]
        target = rows_of([one[:4] for one in found], [one[4] for one in found])
        return image[:, rows.start : rows.stop, columns.start : columns.stop], target


def batch_of(*augment, images=None, window=None, indices=(0,), visible: float = 0.1, seed: int = 0) -> Batch:
    config = DataConfig(name="x", augment=list(augment), visible=visible)
    images = Rectangles() if images is None else images
    reader = reader_of(
        config, images, num_classes=2, seed=seed, train=True, device=CPU, window=window, moves_as_one=True, boxes=True
    )
    return reader.__getitems__([Key(0, number, index) for number, index in enumerate(indices)])


def seen(image: torch.Tensor, above: int) -> list[int]:
    """The smallest box of the pixels above a value."""
    rows, columns = (np.flatnonzero((image[0] > above).any(dim).numpy()) for dim in (1, 0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


# ---------------------------------------------------------------------------------------------- batches


def test_images_with_several_boxes_and_with_none_are_one_batch():
    batch = batch_of(indices=(0, 2, 1))
    assert batch.target.shape == (3, 3, 7) and batch.target.dtype == torch.float64
    first, none, all_of_it = boxes_in(batch.target)
    assert first.boxes.tolist() == [[10, 20, 34, 41], [50, 5, 71, 12]] and first.labels.tolist() == [1, 0]
    assert len(none.boxes) == 0 and all_of_it.boxes.tolist() == [[0, 0, 80, 60]] and all_of_it.area.tolist() == [4800]
    assert sizes_in(batch.target) == [SIZE] * 3
    assert batch.target[..., 4].tolist() == [[WHOLE, 1, 0], [WHOLE, NOTHING, NOTHING], [WHOLE, 1, NOTHING]]
    only = batch.only([1, 2])
    assert [len(one.boxes) for one in boxes_in(only.target)] == [0, 1]
    assert stacked([], []).shape == (0, 1, 7)


def test_a_batch_of_images_without_boxes_has_their_sizes():
    batch = batch_of(indices=(2, 2))
    assert batch.target.shape == (2, 1, 7) and sizes_in(batch.target) == [SIZE] * 2


def test_crowds_are_there_and_not_learned():
    rows = rows_of([[0, 0, 5, 5], [1, 1, 9, 9]], [0, 1], crowd=[1, 0], area=[20, 50])
    (image,) = boxes_in(stacked([rows], [(10, 10)]))
    assert image.crowd.tolist() == [True, False] and image.area.tolist() == [20, 50]
    assert image.learned.boxes.tolist() == [[1, 1, 9, 9]] and image.learned.labels.tolist() == [1]


# ---------------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize(
    ("move", "wanted"),
    [
        ("RandomHorizontalFlip", [46, 20, 70, 41]),
        ("RandomVerticalFlip", [10, 19, 34, 40]),
        ({"Pad": {"padding": [3, 5, 0, 0]}}, [13, 25, 37, 46]),
        ({"CenterCrop": {"size": [50, 70]}}, [5, 15, 29, 36]),
        ({"CenterCrop": {"size": [30, 50]}}, [0, 5, 19, 26]),
        ({"Resize": {"size": [120, 160]}}, [20, 40, 68, 82]),
        ({"Resize": {"size": [30, 40], "interpolation": "nearest"}}, [5, 10, 17, 20.5]),
        ({"RandomAffine": {"degrees": [90, 90]}}, [29, 0, 50, 24]),
    ],
    ids=str,
)  # fmt: skip
def test_a_box_is_where_its_object_went(move, wanted):
    if isinstance(move, str):
        move = {move: {"p": 1.0}}
    batch = batch_of(move)
    (image,) = boxes_in(batch.target)
    box = image.boxes[image.labels == 1][0]
    assert box.tolist() == pytest.approx(wanted, abs=1e-12)
    assert seen(batch.image[0], 150) == pytest.approx(wanted, abs=1), "and there are its pixels"
    assert image.size == tuple(batch.image.shape[2:])


def test_flips_and_crops_of_random_places_keep_boxes_on_their_pixels():
    moves = ({"RandomCrop": {"size": [41, 53]}}, "RandomHorizontalFlip", "RandomRotate90", "RandomVerticalFlip")
    shown = 0
    for seed in range(30):
        batch = batch_of(*moves, seed=seed, visible=0.0)
        (image,) = boxes_in(batch.target)
        for box, label in zip(image.boxes, image.labels, strict=True):
            if label == 1:
                assert box.tolist() == seen(batch.image[0], 150)
                shown += 1
    assert shown > 15


@pytest.mark.parametrize(("visible", "left"), [(0.0, 1), (0.24, 1), (0.26, 0)])
def test_a_box_of_which_too_little_is_visible_is_left_out(visible, left):
    """A crop that keeps 6 of the 24 columns, from x = 28 on."""

    class Cropped(Rectangles):
        rectangles = ([(10, 20, 34, 41, 1)],) * 3

    (image,) = boxes_in(batch_of({"CenterCrop": {"size": [60, 24]}}, images=Cropped(), visible=visible).target)
    assert len(image.boxes) == left
    if left:
        assert image.boxes.tolist() == [[0, 20, 6, 41]] and image.area.tolist() == pytest.approx([6 * 21])


# ---------------------------------------------------------------------------------------------- windows


def halves(shape: tuple[int, ...]) -> tuple[Interval, ...]:
    """The left half."""
    return Interval(0, shape[0]), Interval(0, shape[1] // 2)


@pytest.mark.parametrize("moves", [[], ["RandomHorizontalFlip"], [{"RandomAffine": {"degrees": 20, "translate": [0.1, 0.1]}}]],
                         ids=["plain", "flip", "turn"])  # fmt: skip
def test_a_rank_that_reads_a_window_has_all_boxes_of_the_whole_image(moves):
    images = Rectangles()
    assert isinstance(images, WindowedImages)
    for seed in range(4):
        whole, part = batch_of(*moves, seed=seed), batch_of(*moves, window=halves, images=images, seed=seed)
        assert torch.equal(part.target, whole.target) and part.whole_shape == (1, *SIZE)
        assert torch.equal(part.image, whole.image[..., : SIZE[1] // 2])
    if len(moves) < 1:
        assert images.read_px == 4 * SIZE[0] * SIZE[1] // 2, "no more than its window is read"


def test_the_boxes_of_a_page_are_those_of_its_ink():
    options = {"size": [130, 170], "pages": [3, 1], "digit_px": [16, 40]}
    boxed, masks = (open_dataset(DataConfig(name="page", options=options | more)) for more in ({"boxes": True}, {}))
    assert boxed.classes == masks.classes[1:] and boxed.labels == "boxes"
    counted = 0
    for index in range(3):
        (image, rows), (same, mask) = boxed.train.read(index), masks.train.read(index)
        assert torch.equal(image, same)
        inside = torch.zeros_like(mask, dtype=torch.bool)
        for x1, y1, x2, y2, label, *_ in rows.long().tolist():
            digit = mask[y1:y2, x1:x2] == label + 1
            assert all(side.any() for side in (digit[0], digit[-1], digit[:, 0], digit[:, -1])), "the smallest box"
            inside[y1:y2, x1:x2] = True
            counted += 1
        assert not mask[~inside].any(), "every digit has one"
    assert counted > 3


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("box", "told"),
    [
        (
            (10, 20, 10, 41, 1),
            r"box 0 of scan0.png, counted from 0, with x1, y1, x2, y2 and class 10, 20, 10, 41, 1, has no area",
        ),
        ((34, 20, 10, 41, 1), r"has no area: x2 must be above x1"),
        ((10, 20, 84, 41, 1), r"10, 20, 84, 41, 1, is outside of its image of 60 x 80 px"),
        ((10, 20, 34, 41, 2), r"has a class outside of 0..1"),
        ((10, float("nan"), 34, 41, 1), r"has a number that is not finite"),
    ],
)
def test_a_bad_box_is_refused_with_its_file_and_numbers(box, told):
    class Bad(Rectangles):
        rectangles = ([box],) * 3

        def read_window(self, index, window):
            return Rectangles().read_window(2, window)[0], rows_of([box[:4]], [box[4]])

    for window in (None, halves):
        problem = batch_of(images=Bad(), window=window).problem
        assert problem is not None and re.search(told, problem), problem


def test_rounding_at_the_border_is_cut_off():
    class Nearly(Rectangles):
        rectangles = ([(-0.4, 0, 80.3, 60, 1)],) * 3

        def read_window(self, index, window):
            return Rectangles().read_window(2, window)[0], rows_of([[-0.4, 0, 80.3, 60]], [1])

    (image,) = boxes_in(batch_of(images=Nearly()).target)
    assert image.boxes.tolist() == [[0, 0, 80, 60]]


def assembled(*settings: str):
    config = "model: {name: retinanet, options: {backbone: small, strides: [8, 16], anchors: 3, width: 4, features: 8}}\n" \
             "data: {name: page, options: {boxes: true, size: [64, 64], pages: [2, 2]}, workers: 0}\n" \
             "task: {name: detection, options: {strides: [8, 16], octaves: 1}}"  # fmt: skip
    return assemble(parse_config(config, list(settings)), Mesh(Plan(), World(), CPU))


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (["data.augment=[case_transforms:left_half]"], NotImplementedError, r"left_half, which may move pixels, and"),
        (["data.augment=[RandomIoUCrop]"], NotImplementedError, r"RandomIoUCrop, which moves or"),
        (["data.augment=[{ClassBalancedCrop: {size: [8, 8]}}]"], ValueError, r"page has no labels of pixels; use RandomCrop"),
        (["data.mixup=0.2"], ValueError, r"data.mixup=0.2 mixes images of one class number per image and"),
        (["data.patches={size: [16, 16]}"], NotImplementedError, r"data.patches cuts images up before their boxes are known"),
        (["data.options.pairs=true"], ValueError, r"data.options has pairs and boxes"),
        (["data.options.boxes=false"], ValueError, r"learns boxes and data.name=page has one per pixel; set task.name=segment"),
        (["task.name=segmentation", "task.options={}"], ValueError, r"has boxes; set task.name=detection"),
        (["task.class_weights=balanced"], ValueError, r"the task learns boxes, whose losses weigh classes by alpha"),
        (["task.loss=focal"], ValueError, r"task.loss is set and task.name=detection has a loss of its own"),
        (["task.metrics=[f1]"], ValueError, r"task.metrics has 'f1' and the task learns boxes"),
        (["task.options.method=yolo"], ValueError, r"method is 'yolo'; retinanet, fcos, ssd, faster_rcnn are there"),
        (["task.options.strides=[16, 8]"], ValueError, r"strides is \[16, 8\]; whole numbers that rise"),
        (["task.options.octaves=0"], ValueError, r"octaves is 0; a whole number"),
        (["task.options.ratios=[0]"], ValueError, r"ratios is \[0\]; numbers above 0"),
        (["task.options.overlap=[0.5, 0.4]"], ValueError, r"overlap is \[0.5, 0.4\]; two rising numbers"),
        (["task.options.box_loss=ciou"], ValueError, r"box_loss is 'ciou'; l1, smooth_l1, giou are there"),
        (["task.options.score=2"], ValueError, r"score is 2 and suppress 0.5; shares"),
        (["task.options.detections=0"], ValueError, r"detections 0; whole numbers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_first_step(settings, error, told, monkeypatch):
    with pytest.raises(error, match=told):
        assembled(*settings)


def test_a_dataset_of_a_program_has_boxes_as_torchvisions():
    image = torch.zeros(3, 8, 9, dtype=torch.uint8)
    samples = [(image, {"boxes": torch.tensor([[0, 0, 4, 5.0]]), "labels": torch.tensor([1])}),
               (image, {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)})]  # fmt: skip
    dataset = dataset_of(samples, samples, classes=["a", "b"])
    assert dataset.labels == "boxes" and dataset.moves_as_one
    assert dataset.train.read(0)[1].tolist() == [[0, 0, 4, 5, 1, 0, 20]] and dataset.train.read(1)[1].shape == (0, 7)
    with pytest.raises(ValueError, match=r"train\[0\] has boxes that are none"):
        dataset_of([(image, {"boxes": torch.zeros(3), "labels": [1]})], samples, classes=2)
