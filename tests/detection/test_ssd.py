"""Are SSD's default boxes, losses, gradients and what is found torchvision's, in float64?"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSD, SSDHead
from torchvision.ops import box_iou

from widefield.config import ModelConfig
from widefield.detection.matching import matched_with_best
from widefield.detection.targets import rows_of, stacked
from widefield.models import build as build_model
from widefield.tasks.detection import build

CLASSES = 4
RATIOS = [[2], [2, 3], []]
SCALES = [0.1, 0.3, 0.6, 0.9]
STRIDES = [8, 16, 37]
SIZES = [(96, 128), (77, 131)]


class Features(nn.Module):
    """A backbone that is not run: maps come from outside."""

    out_channels = [6, 8, 5]

    def forward(self, images: Tensor) -> OrderedDict:
        raise AssertionError("not run")


def theirs(*, steps: bool) -> SSD:
    torch.manual_seed(3)
    places = DefaultBoxGenerator(RATIOS, scales=SCALES, steps=STRIDES if steps else None)
    head = SSDHead(Features.out_channels, places.num_anchors_per_location(), 1 + CLASSES)
    model = SSD(Features(), places, (300, 300), 1 + CLASSES, head=head, score_thresh=0.2, topk_candidates=30).double()
    for weight in model.head.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def task_of(*, steps: bool):
    limits = {"score": 0.2, "candidates": 30, "suppress": 0.45, "detections": 200}
    asked = {"strides": STRIDES, "ratios": RATIOS, "scales": SCALES, "torchvision_anchors": steps}
    return build(CLASSES, method="ssd", **asked, **limits)


def example(size: tuple[int, int], seed: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Features of three images, of as many places as a network without padding may have; boxes: several, none, one."""
    torch.manual_seed(seed)
    maps = [torch.randn(3, c, size[0] // s - (s > 30), size[1] // s, dtype=torch.float64)
            for c, s in zip(Features.out_channels, STRIDES, strict=True)]  # fmt: skip
    targets = []
    for count in (7, 0, 1):
        start = torch.rand(count, 2, dtype=torch.float64) * torch.tensor([size[1] * 0.7, size[0] * 0.7])
        sides = 3 + torch.rand(count, 2, dtype=torch.float64) * torch.tensor([size[1] * 0.3, size[0] * 0.3]) * 0.9
        boxes = torch.cat([start, torch.minimum(start + sides, torch.tensor([size[1], size[0]]))], dim=1).double()
        targets.append({"boxes": boxes, "labels": torch.randint(CLASSES, (count,))})
    return maps, targets


def output_of(model: SSD, maps: list[Tensor]) -> list[tuple[Tensor, ...]]:
    heads = model.head.classification_head.module_list, model.head.regression_head.module_list
    return [(of_class(one), of_box(one)) for one, of_class, of_box in zip(maps, *heads, strict=True)]


def anchors_of(model: SSD, maps: list[Tensor], size: tuple[int, int]) -> list[Tensor]:
    return model.anchor_generator(ImageList(torch.zeros(3, 3, *size, dtype=torch.float64), [size] * 3), maps)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_losses_and_gradients_are_torchvisions(size, steps):
    model, task = theirs(steps=steps), task_of(steps=steps)
    maps, targets = example(size)
    anchors = anchors_of(model, maps, size)
    none = torch.full((len(anchors[0]),), -1)
    matched = [
        model.proposal_matcher(box_iou(one["boxes"], own)) if len(one["boxes"]) else none
        for one, own in zip(targets, anchors, strict=True)
    ]
    behind = [one | {"labels": one["labels"] + 1} for one in targets]
    total = sum(model.compute_loss(behind, model.head(maps), anchors, matched).values())
    slopes = torch.autograd.grad(total, list(model.parameters()))
    target = stacked([rows_of(one["boxes"], one["labels"]) for one in targets], [size] * 3)
    found = task.loss_sum(output_of(model, maps), target) / task.count(target)
    assert found.item() == pytest.approx(total.item(), rel=1e-12)
    for one, other in zip(torch.autograd.grad(found, list(model.parameters())), slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_is_found_is_torchvisions(size):
    model, task = theirs(steps=False), task_of(steps=False)
    maps, _ = example(size, seed=1)
    with torch.no_grad():
        wanted = model.postprocess_detections(model.head(maps), anchors_of(model, maps, size), [size] * 3)
        found = task.found(output_of(model, maps), [size] * 3)
    assert sum(len(one.boxes) for one in found) > 30 and all(one.cut_candidates for one in found)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.boxes, other["boxes"], rtol=0, atol=1e-9)
        torch.testing.assert_close(one.scores, other["scores"], rtol=0, atol=1e-12)
        assert torch.equal(one.labels, other["labels"] - 1)


def test_a_crowd_is_not_learned():
    model, task, size = theirs(steps=False), task_of(steps=False), SIZES[1]
    maps, targets = example(size)
    crowd = torch.arange(7) % 2
    rows = [rows_of(targets[0]["boxes"], targets[0]["labels"], crowd=crowd), rows_of([], []), rows_of([], [])]
    without = [rows_of(*(targets[0][name][crowd == 0] for name in ("boxes", "labels"))), *rows[1:]]
    losses = [task.loss_sum(output_of(model, maps), stacked(some, [size] * 3)) for some in (rows, without)]
    assert losses[0] == losses[1] > 0


def test_matching_in_pieces_is_torchvisions(monkeypatch):
    """Two boxes share their best anchor, which the last one has; a box that meets none is learned by none."""
    from torchvision.models.detection._utils import SSDMatcher

    torch.manual_seed(0)
    start = torch.randint(0, 60, (40, 2)).double()
    start[:4] = torch.tensor([[0, 0], [20, 20], [21, 21], [22, 24]])
    levels = [torch.cat([start, start + 16], dim=1), torch.cat([start[:9] - 20, start[:9] + 44], dim=1)]
    boxes = torch.tensor([[3.0, 5, 8, 9], [20, 20, 36, 36], [20, 20, 36, 36], [1, 0, 64, 50]], dtype=torch.float64)
    wanted = SSDMatcher(0.5)(box_iou(boxes, torch.cat(levels)))
    for entries in (2**24, 12, 1):
        monkeypatch.setattr("widefield.detection.matching._ENTRIES", entries)
        assert torch.equal(torch.cat(matched_with_best(boxes, levels, above=0.5)), wanted)
    far = torch.cat([boxes, boxes.new_tensor([[500.0, 500, 510, 510]])])
    assert torch.equal(torch.cat(matched_with_best(far, levels, above=0.5)), wanted)
    assert set(wanted.tolist()) == {-1, 0, 1, 2, 3} and wanted[1] == 2


def test_default_boxes_in_pixels_are_those_of_the_same_shares():
    shares, size = task_of(steps=False), (80, 80)
    pixels = build(
        CLASSES, method="ssd", strides=STRIDES, ratios=RATIOS, scales=[80 * one for one in SCALES], scales_in_px=True
    )
    model, (maps, _) = theirs(steps=False), example((80, 80))
    for one, other in zip(*(task.heads.anchors_of(size, output_of(model, maps)) for task in (shares, pixels)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------- the network


def test_images_in_which_ssd300s_last_map_has_no_place_are_refused():
    with pytest.raises(ValueError, match="whose last map has no place in an image of 300 x 267 px"):
        made()(torch.zeros(1, 3, 300, 267))


def made(**options) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(name="ssd", options=options), in_channels=3, num_classes=CLASSES)


@pytest.mark.long
def test_weights_load_into_torchvisions_ssd300_and_give_its_maps():
    ours = made().double().eval()
    other = detection.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=1 + CLASSES).double().eval()
    assert list(ours.state_dict()) == list(other.state_dict())
    other.load_state_dict(ours.state_dict())
    image = torch.randn(1, 3, 300, 300, dtype=torch.float64)
    with torch.no_grad():
        levels = ours(image)
        wanted = other.head(list(other.backbone(image).values()))
    assert [level[0].shape[-1] for level in levels] == [38, 19, 10, 5, 3, 1]
    for part, (key, values) in enumerate({name: wanted[name] for name in ("cls_logits", "bbox_regression")}.items()):
        many = values.shape[2]
        rows = [one.view(1, -1, many, *one.shape[2:]).permute(0, 3, 4, 1, 2).reshape(1, -1, many) for one in
                (level[part] for level in levels)]  # fmt: skip
        torch.testing.assert_close(torch.cat(rows, dim=1), values, rtol=1e-12, atol=1e-12, msg=key)
    task, target = build(CLASSES, method="ssd"), stacked([rows_of([[30, 40, 90, 140]], [2])], [(300, 300)])
    assert task.loss_sum(levels, target) > 0 and len(torch.cat(task.heads.anchors_of((300, 300), levels))) == 8732


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strides": [8, 16]}, "backbone=vgg16 has the strides [8, 16, 32, 64, 100, 300] and wants"),
        ({"boxes": [4, 6]}, "model.options.boxes is [4, 6] and strides None"),
        ({"backbone": "small", "strides": [4, 8], "boxes": [4]}, "model.options.boxes is [4] and there are 2 strides"),
        ({"backbone": "small", "strides": [4, 8], "boxes": [4, 0]}, "boxes"),
    ],
)
def test_levels_and_boxes_that_cannot_be_are_refused(options, told):
    with pytest.raises(ValueError) as caught:
        made(**options)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ratios": [[2]]}, "of ssd a list of numbers above 0 is wanted for each of the 6 levels"),
        ({"ratios": [2]}, "ratios is [2]"),
        ({"scales": [0.1]}, "7 numbers above 0 are wanted, of the 6 levels and of one more"),
        ({"scales_in_px": True}, "scales_in_px is true and scales is not set"),
        ({"negatives": 0}, "negatives is 0"),
    ],
)
def test_options_out_of_range_are_refused(options, told):
    with pytest.raises(ValueError) as caught:
        build(CLASSES, method="ssd", **options)
    assert told in str(caught.value)
