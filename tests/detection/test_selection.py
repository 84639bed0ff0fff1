"""Are boxes found in the same order on every device, class by class, and is what limits leave out counted?"""

from __future__ import annotations

import torch

from widefield.detection.anchor_heads import AnchorHeads
from widefield.detection.anchors import MapLevels
from widefield.detection.selection import Limits, found_in
from widefield.tasks.detection import build

HEADS = AnchorHeads(2, MapLevels((8, 16)), ((8,), (16,)), (1.0,))


def output_of(size: tuple[int, int], logit: float = 2.0) -> list[tuple[torch.Tensor, ...]]:
    """Maps of one image in which every place says the same of both classes, and its anchor is the box."""
    maps = HEADS.levels.maps_of(size)
    return [(torch.full((2, *one), logit), torch.zeros(4, *one)) for one in maps]


def test_equal_scores_are_taken_in_the_order_of_levels_places_and_classes():
    found = found_in(HEADS, output_of((32, 32)), (32, 32), Limits(0.5, 0.9, 1000, 1000))
    assert found.labels.tolist() == [0, 1] * (len(found.labels) // 2)
    fine = found.boxes[: 2 * 16 : 2]
    assert fine[0].tolist() == [0, 0, 4, 4] and fine[1].tolist() == [4, 0, 12, 4], "row by row, cut to the image"
    assert found.boxes[2 * 16].tolist() == [0, 0, 8, 8] and len(found.boxes) == 2 * (16 + 4)


def test_limits_keep_the_first_and_count_what_they_leave_out():
    found = found_in(HEADS, output_of((32, 32)), (32, 32), Limits(0.5, 0.9, 10, 13))
    assert len(found.boxes) == 13 and found.cut_candidates == 2 * 16 - 10
    assert found.cut_detections == 10 + 8 - 13
    none = found_in(HEADS, output_of((32, 32), logit=-9.0), (32, 32), Limits(0.5, 0.9, 10, 13))
    assert (len(none.boxes), none.cut_candidates, none.cut_detections) == (0, 0, 0)


def test_limits_grow_with_the_area_beyond_a_megapixel():
    limits = Limits(0.05, 0.5, 1000, 100)
    assert [limits.most(100, size) for size in ((10, 10), (1000, 1000), (1000, 1001), (20000, 20000))] == [100, 100, 101, 40000]


def test_boxes_of_two_classes_at_one_far_place_do_not_suppress_each_other():
    """At 20,000 px, where an offset between classes would leave float32 an eighth of a pixel."""
    size = (16, 20_000)
    maps = output_of(size, logit=-9.0)
    for number, label, logit in ((2498, 0, 3.0), (2498, 1, 2.0), (2499, 0, 1.0)):
        maps[0][0][label, 0, number] = logit
    maps[0][1][:2, 0, 2499] = torch.tensor([-0.5, 0.0])  # half an anchor to the left: an IoU of 1/3 with its neighbour
    kept = found_in(HEADS, maps, size, Limits(0.5, 0.34, 1000, 100))
    assert kept.labels.tolist() == [0, 1, 0] and kept.boxes[0].tolist() == kept.boxes[1].tolist() == [19980, 0, 19988, 4]
    assert found_in(HEADS, maps, size, Limits(0.5, 0.33, 1000, 100)).labels.tolist() == [0, 1]


def test_the_share_of_images_that_a_limit_cut_is_said():
    task = build(2)
    values = {"map": 61.23, "map50": 90.1, "capped": 0.0}
    assert task.sentence(values) == "mAP 61.2 %, mAP50 90.1 %"
    assert task.sentence(values | {"capped": 12.5}).endswith(", limits left boxes out of 12.5 % of the images")
